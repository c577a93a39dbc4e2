"""Signals while a launcher starts."""

from __future__ import annotations

import contextlib
import signal

import pytest

from chameleon_ft.launch.processes import signals_not_lost


@pytest.mark.parametrize("is_swallowed", [True, False])
def test_ctrl_c_counts_although_a_compiler_swallows_it(*, is_swallowed: bool) -> None:
    reached: list[str] = []

    def compiled() -> None:
        with signals_not_lost():
            with contextlib.suppress(KeyboardInterrupt) if is_swallowed else contextlib.nullcontext():
                signal.raise_signal(signal.SIGINT)
            reached.append("the end of the block")

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        compiled()
    assert (len(reached), signal.getsignal(signal.SIGINT)) == (is_swallowed, before)
