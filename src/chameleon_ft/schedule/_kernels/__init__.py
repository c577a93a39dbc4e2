"""The inner loops of schedule and replay, compiled by numba.

Importing one of these modules loads numba, so callers import them inside the function that runs a kernel. No kernel is
compiled with fast math: sums keep their order, so results do not depend on the machine.

A trap: the cache of compiled code is invalidated only by changes of the files in the folder of a kernel, and of the
types of its arguments. So a kernel, the functions that it calls and the constants that it reads are in one folder.
"""
