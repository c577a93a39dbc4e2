"""Whose error it is that a rank ended with."""

from __future__ import annotations

import pytest

from chameleon_ft.control.detectors.crash import Crashes
from chameleon_ft.control.state.members import Worker


def worker(number: int, *, takes_part: bool = True, first_step: int | None = 0) -> Worker:
    return Worker(id=number, host="a", takes_part=takes_part, first_step=first_step)


def test_in_the_first_step_it_is_everyones() -> None:
    assert Crashes().is_everyones(worker(0), "KeyError: 'x'", step=0)


def test_later_it_is_everyones_when_another_one_ends_of_the_same_in_the_same_step() -> None:
    crashes = Crashes()
    assert not crashes.is_everyones(worker(0), "KeyError: 'x'", step=5)
    assert not crashes.is_everyones(worker(0), "KeyError: 'x'", step=5), "one that has come back proves nothing new"
    assert not crashes.is_everyones(worker(1), "KeyError: 'y'", step=5)
    assert not crashes.is_everyones(worker(1), "KeyError: 'x'", step=6)
    assert crashes.is_everyones(worker(2), "KeyError: 'y'", step=5)


@pytest.mark.parametrize("late", [worker(7, takes_part=False), worker(7, first_step=5)])
def test_who_has_only_just_come_proves_nothing(late: Worker) -> None:
    crashes = Crashes()
    assert not crashes.is_everyones(late, "OSError: no such device", step=5)
    assert not crashes.is_everyones(worker(1), "OSError: no such device", step=5)
