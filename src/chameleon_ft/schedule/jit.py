"""Compilation of kernels by numba. Importing this module loads numba, so only modules of kernels import it."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from importlib import resources
from typing import Any, ClassVar, ParamSpec, TypeVar, cast

from numba import njit
from numba.core.caching import FunctionCache

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Counting references to all arrays of a tuple on every call takes ten times as long as the calls themselves.
_NO_REFCOUNT: dict[str, Any] = {"_nrt": False, "forceinline": True}


def kernel(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Compile `function` at its first call, and cache the result on disk for later processes if possible."""
    return _cached(njit()(function), function)


def kernel_part(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Compile `function` into the kernels that call it, without a file of its own in the cache."""
    return cast("Callable[_P, _T]", njit()(function))


def no_refcount_kernel(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Compile a kernel without reference counting, which creates no arrays and calls only `no_refcount_inline`s."""
    return _cached(njit(**_NO_REFCOUNT)(function), function)


def no_refcount_inline(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Compile `function` into the kernels that call it, inlined and without reference counting."""
    return cast("Callable[_P, _T]", njit(**_NO_REFCOUNT)(function))


def tell_before_compiling(tell: Callable[[], object] | None) -> None:
    """Have `tell` called once before the next kernel is compiled that no earlier process has compiled."""
    _Cache.tell = tell


def _cached(compiled: Any, function: Callable[_P, _T]) -> Callable[_P, _T]:
    # `cache=True` would use numba's own cache, which fails if a file does. Without a writable folder there is none.
    with contextlib.suppress(RuntimeError):
        compiled._cache = _Cache(function)
    return cast("Callable[_P, _T]", compiled)


class _Cache(FunctionCache):
    """Numba's cache on disk; files that cannot be read are compiled anew, files that cannot be written are skipped.

    Unpickling a file that is damaged, or refers to names of another version, can raise any exception. A kernel contains
    functions and constants of other files in its folder, so a change to any of them makes it obsolete.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        folder = resources.files(function.__module__.rpartition(".")[0])
        sources = sorted((file.name, file.read_bytes()) for file in folder.iterdir() if file.name.endswith(".py"))
        self._cache_file._source_stamp = hashlib.sha256(b"".join(source for _, source in sources)).digest()

    tell: ClassVar[Callable[[], object] | None] = None

    def load_overload(self, sig: object, target_context: object) -> object:
        found: object = None
        try:
            found = super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception:  # noqa: BLE001 - see above
            # Otherwise it could not be overwritten either.
            with contextlib.suppress(OSError):
                self.flush()  # type: ignore[no-untyped-call]
        if found is None and (tell := _Cache.tell) is not None:
            _Cache.tell = None
            tell()
        return found

    def save_overload(self, sig: object, data: object) -> None:
        with contextlib.suppress(Exception):
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
