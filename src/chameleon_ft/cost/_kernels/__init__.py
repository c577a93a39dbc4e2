"""The kernels of the memory model. Importing their modules loads numba; `records` does not."""
