"""Measurement of the layers of a job, and of the links between workers, on the device at hand."""
