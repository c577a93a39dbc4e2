"""Sinks: other tools that the records of a run are handed to. Each module loads what it needs when it is used."""
