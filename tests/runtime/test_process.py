"""The manners of a process that belongs to a run."""

from __future__ import annotations

import signal

import pytest

from chameleon_ft.runtime.process import interrupts_held


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    done = []

    def interrupted() -> None:
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
            done.append("the rest")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done == ["the rest"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_an_interrupt_nothing_happens() -> None:
    with interrupts_held():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
