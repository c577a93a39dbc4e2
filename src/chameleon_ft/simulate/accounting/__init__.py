"""Where the time of a simulation goes, and what comes of it."""
