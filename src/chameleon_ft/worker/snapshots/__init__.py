"""Snapshots of the training state in the memory of ranks."""
