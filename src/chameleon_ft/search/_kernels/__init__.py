"""Inner loops of the search, compiled by numba. Importing a module of this package loads numba."""
