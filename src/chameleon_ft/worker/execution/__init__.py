"""Execution of a step: the layers that a rank holds, its program, and the commit."""
