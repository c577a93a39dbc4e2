"""The control connections: what is said on them, how they are addressed, opened and served."""
