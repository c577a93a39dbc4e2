"""How kernels are compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from numba import njit
from numba.core.caching import FunctionCache

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
    compiled: Any = njit(**options)(function)
    # `cache=True` would put one there that fails where a file does. Without a folder for its files there is none.
    with contextlib.suppress(RuntimeError):
        compiled._cache = _Cache(function)  # type: ignore[no-untyped-call]
    kept: Callable[_P, _T] = compiled
    return kept


class _Cache(FunctionCache):
    """Numba's files of what was compiled; what cannot be read is compiled anew, what cannot be written is not kept.

    Files may be damaged, or name what an earlier version had and this one has not: that can raise anything.
    """

    def load_overload(self, sig: object, target_context: object) -> object:
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception:  # noqa: BLE001 - see above
            # Else it could not be written either.
            with contextlib.suppress(OSError):
                self.flush()  # type: ignore[no-untyped-call]
            return None

    def save_overload(self, sig: object, data: object) -> None:
        with contextlib.suppress(Exception):
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
