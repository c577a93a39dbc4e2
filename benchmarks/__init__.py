"""Measurements beside other systems; docs/benchmarks.md has the commands and what came out. Run from the top folder."""
