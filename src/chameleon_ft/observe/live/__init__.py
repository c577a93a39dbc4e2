"""The state of a run, followed from the files of its directory while it is live, or read after its end."""
