"""Kinds of plans on named workers. One file for each."""
