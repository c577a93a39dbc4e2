"""Models as lists of layers, and how a job's layers are built, seeded and measured.

Importing this package loads no torch; its modules do.
"""
