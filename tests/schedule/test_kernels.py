"""Kernels run also where what was compiled cannot be kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from chameleon_ft.schedule._kernels.jit import kernel, lean_kernel


def _double(number: int) -> int:
    return 2 * number


@pytest.mark.parametrize("decorate", [kernel, lean_kernel])
def test_where_there_is_no_folder_a_kernel_is_compiled_all_the_same(
    decorate: Callable[[Callable[[int], int]], Callable[[int], int]],
) -> None:
    names: dict[str, Any] = {}
    # Of a file that is not there: numba looks beside it for a folder.
    exec(compile("def double(number):\n    return 2 * number\n", "/nowhere/double.py", "exec"), names)

    assert decorate(names["double"])(21) == 42


def test_where_the_disk_is_full_a_kernel_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("numba.core.caching.Cache.save_overload", full)

    assert [kernel(_double)(number) for number in (1, 2)] == [2, 4]
