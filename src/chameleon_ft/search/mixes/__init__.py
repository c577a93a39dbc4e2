"""Pipelines side by side: how many of which depth, with which shares of the micro-batches."""
