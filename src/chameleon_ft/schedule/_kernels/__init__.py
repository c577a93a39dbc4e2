"""The inner loops of schedule and replay, compiled by numba.

Importing one of these modules loads numba, so callers import them inside the function that runs a kernel. No kernel is
compiled with fast math: sums keep their order, so results do not depend on the machine.

A trap: numba's cache of compiled code is invalidated only by changes of the file of the kernel that is called and of
the types of its arguments. So a kernel and all the functions that it calls are in one file.
"""
