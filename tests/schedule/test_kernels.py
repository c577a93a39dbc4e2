"""Kernels run also where what was compiled cannot be kept, or was damaged since."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chameleon_ft.schedule.jit import kernel, no_refcount_kernel, tell_before_compiling

_SOURCE = "def double(number):\n    return 2 * number\n"


@pytest.fixture(autouse=True)
def untold() -> None:
    """Drop the message of a command of another test in this process, whose output is closed."""
    tell_before_compiling(None)


def _double(number: int) -> int:
    return 2 * number


def _in_file(path: Path) -> Any:
    """A function of a file beside which numba looks for a folder."""
    # With a module's name: else numba keeps all builtins with it, to which other tests may have added anything.
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(_SOURCE, str(path), "exec"), names)
    return names["double"]


def _is_loaded(double: Callable[[int], int]) -> bool:
    """Call `double` as a kernel; return whether it came from the cache."""
    compiled: Any = kernel(double)
    assert compiled(21) == 42
    return bool(compiled.stats.cache_hits)


@pytest.mark.parametrize("decorate", [kernel, no_refcount_kernel])
def test_where_there_is_no_folder_a_kernel_is_compiled_all_the_same(
    decorate: Callable[[Callable[[int], int]], Callable[[int], int]],
) -> None:
    assert decorate(_in_file(Path("/nowhere/double.py")))(21) == 42


def test_where_the_disk_is_full_a_kernel_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("numba.core.caching.Cache.save_overload", full)

    assert [kernel(_double)(number) for number in (1, 2)] == [2, 4]


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("content", [b"", b"\x80\x05", b"cnowhere\ngone\n."])
def test_a_file_that_cannot_be_read_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, content: bytes
) -> None:
    monkeypatch.setattr("numba.config.CACHE_DIR", "")
    path = tmp_path / "double.py"
    path.write_text(_SOURCE)
    assert kernel(_in_file(path))(21) == 42
    (kept,) = tmp_path.rglob(f"*.{suffix}")
    kept.write_bytes(content)

    assert kernel(_in_file(path))(21) == 42
    assert _is_loaded(_in_file(path))


def test_a_kernel_is_compiled_anew_when_a_file_beside_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("numba.config.CACHE_DIR", "")
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "kernels_of_a_test"
    package.mkdir()
    (package / "double.py").write_text(_SOURCE)
    beside = package / "inlined.py"
    function = importlib.import_module("kernels_of_a_test.double").double
    for factor in (2, 3):
        beside.write_text(f"FACTOR = {factor}")
        assert [_is_loaded(function) for _ in range(2)] == [False, True]
