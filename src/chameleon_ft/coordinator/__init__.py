"""The coordinator: it tracks the members of a run, detects failures and decides what every worker does next."""
