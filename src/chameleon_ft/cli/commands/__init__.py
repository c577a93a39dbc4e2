"""The commands, one file each with a function `main` that takes the arguments and returns the exit code."""
