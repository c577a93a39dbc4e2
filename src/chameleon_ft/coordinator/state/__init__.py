"""The records of the state of a run: frozen values with pure methods."""
