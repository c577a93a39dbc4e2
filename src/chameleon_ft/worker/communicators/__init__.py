"""Communicators: how tensors travel between the ranks of one generation, behind one interface for each backend."""
