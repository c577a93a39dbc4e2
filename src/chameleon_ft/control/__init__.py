"""The control plane: who is in the run, what has failed, and what everyone does next."""
