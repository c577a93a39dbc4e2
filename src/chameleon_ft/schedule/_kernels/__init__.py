"""The inner loops of schedule and replay, compiled by numba.

To import one of these modules loads numba, so that is left to those who run them, when they do. Sums are made in the
order in which they are written, so what a kernel returns does not depend on the machine.

A trap: numba keeps what it has compiled, and looks for changes only in the file of the function that is called and in
the types of its arguments. So all that a kernel calls is in its own file.
"""
