"""Compilation of kernels by numba.

Importing this module loads numba, so only modules of kernels import it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from numba import njit
from numba.core.caching import FunctionCache

__all__ = ["kernel", "lean_kernel", "lean_part", "part_of_kernel"]

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Counting references to all arrays of a tuple on every call takes ten times as long as the calls themselves.
_UNCOUNTED: dict[str, Any] = {"_nrt": False, "forceinline": True}


def kernel(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """`function`, compiled at its first call and cached on disk for later processes, if that is possible."""
    return _compiled(function, kept=True)


def part_of_kernel(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """`function`, compiled into the kernels that call it."""
    return _compiled(function)


def lean_kernel(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """A kernel without reference counting, so it must not create arrays. All functions that it calls are lean parts."""
    return _compiled(function, kept=True, **_UNCOUNTED)


def lean_part(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """`function`, compiled into the lean kernels that call it: inlined, and without reference counting."""
    return _compiled(function, **_UNCOUNTED)


def _compiled(function: Callable[_P, _T], *, kept: bool = False, **options: Any) -> Callable[_P, _T]:
    compiled: Any = njit(**options)(function)
    if kept:
        # `cache=True` would use numba's own cache, which fails if a file does. Without a writable folder there is none.
        with contextlib.suppress(RuntimeError):
            compiled._cache = _Cache(function)  # type: ignore[no-untyped-call]
    return cast("Callable[_P, _T]", compiled)


class _Cache(FunctionCache):
    """Numba's cache on disk; files that cannot be read are compiled anew, files that cannot be written are skipped.

    Unpickling a file that is damaged, or refers to names of another version, can raise any exception.
    """

    def load_overload(self, sig: object, target_context: object) -> object:
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception:  # noqa: BLE001 - see above
            # Otherwise it could not be overwritten either.
            with contextlib.suppress(OSError):
                self.flush()  # type: ignore[no-untyped-call]
            return None

    def save_overload(self, sig: object, data: object) -> None:
        with contextlib.suppress(Exception):
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
