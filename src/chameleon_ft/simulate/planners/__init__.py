"""Policies in a simulation: decisions by `recovery.decide`, and on pipelines that are counted by class."""
