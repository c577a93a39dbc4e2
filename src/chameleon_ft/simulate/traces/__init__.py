"""Failure traces: their events, formats, generators and figures."""
