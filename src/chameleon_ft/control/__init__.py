"""The control plane: the members of a run, what has failed, and what every worker does next."""
