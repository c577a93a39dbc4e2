"""Sinks: views that hand the records of a run to other tools. Each module loads what it needs when it is used."""
