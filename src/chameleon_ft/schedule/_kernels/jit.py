"""How kernels are compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from numba import njit

_P = ParamSpec("_P")
_T = TypeVar("_T")

# To count the references to all arrays of a tuple whenever that is handed on takes ten times as long as the rest.
_UNCOUNTED: dict[str, Any] = {"_nrt": False, "forceinline": True}


def kernel(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """`function`, compiled when it is first called, and then kept on disk for later processes, if that is possible."""
    return _kept(function)


def part_of_kernel(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """`function`, compiled together with the kernels that call it."""
    return _compiled(function)


def lean_kernel(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """A kernel that makes no arrays, and so need not count who uses them. All its parts have to be lean."""
    return _kept(function, **_UNCOUNTED)


def lean_part(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """`part_of_kernel` of a lean kernel."""
    return _compiled(function, **_UNCOUNTED)


def _compiled(function: Callable[_P, _T], **options: Any) -> Callable[_P, _T]:
    compiled: Callable[_P, _T] = njit(**options)(function)
    return compiled


def _kept(function: Callable[_P, _T], **options: Any) -> Callable[_P, _T]:
    try:
        compiled = _compiled(function, cache=True, **options)
    except RuntimeError:
        # There is no folder that it can be kept in.
        return _compiled(function, **options)

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return compiled(*args, **kwargs)
        except OSError:
            # Kernels read and write nothing: it could not be kept, but it is compiled.
            return compiled(*args, **kwargs)

    return call
