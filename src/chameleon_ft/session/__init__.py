"""From a configuration to a running job, from Python and for the command line."""
