"""The files of a run: its directory, checkpoints, object stores and the lock."""
