"""The typed records of a run."""
