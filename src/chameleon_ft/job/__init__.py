"""The job to train, as functions that know nothing of the runtime. Importing this package imports no torch."""
