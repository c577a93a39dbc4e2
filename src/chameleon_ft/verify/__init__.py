"""The judges of a run: a plain PyTorch loop of its job, or one that the user has written."""
