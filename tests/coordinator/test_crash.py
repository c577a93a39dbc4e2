"""Errors of ranks: those of one worker, and those of the job."""

from __future__ import annotations

import pytest

from chameleon_ft.coordinator.detectors.base import ErrorReported, Fatal, Lost
from chameleon_ft.coordinator.detectors.process import CrashDetector


class Crashes:
    """A detector, and the errors that it is told of."""

    def __init__(self) -> None:
        self.detector = CrashDetector()

    def is_of_the_job(self, worker: int, error: str, *, step: int, since_step: int | None = 0) -> bool:
        """Whether an error is one that every worker would run into."""
        self.detector, (found,) = self.detector.observe(ErrorReported(worker, error, step, since_step, "a.log"))
        if isinstance(found, Fatal):
            assert found.reason == f"worker {worker} failed in step {step}: {error}; see a.log"
            assert step == 0 or found.explained != worker
            return True
        assert found == Lost(worker, "self", error)
        return False


def test_an_error_in_the_first_step_is_of_the_job() -> None:
    assert Crashes().is_of_the_job(0, "KeyError: 'x'", step=0)


def test_later_it_is_of_the_job_if_another_worker_meets_it_in_the_same_step() -> None:
    crashes = Crashes()
    assert not crashes.is_of_the_job(0, "KeyError: 'x'", step=5)
    assert not crashes.is_of_the_job(0, "KeyError: 'x'", step=5), "one that has come back proves nothing new"
    assert not crashes.is_of_the_job(1, "KeyError: 'y'", step=5)
    assert not crashes.is_of_the_job(1, "KeyError: 'x'", step=6)
    assert crashes.is_of_the_job(2, "KeyError: 'y'", step=5)


def test_numbers_do_not_make_another_error_of_it() -> None:
    crashes = Crashes()
    out = "OutOfMemoryError: Tried to allocate {} GiB, in the forward of micro-batch {} in layers {}-7 in step 5"
    assert not crashes.is_of_the_job(0, out.format(2.5, 1, 0), step=5)
    assert crashes.is_of_the_job(1, out.format("1.25", 3, 4), step=5)


def test_neither_do_units_of_memory_and_the_other_processes_of_a_device() -> None:
    crashes = Crashes()
    out = "OutOfMemoryError: CUDA out of memory. Tried to allocate {}. {} free. {} memory in use."
    one = out.format("20.00 MiB", "18.31 MiB", "Process 71 has 1.3 GiB memory in use. This process has 2 GiB")
    other = out.format("1.25 GiB", "512.00 bytes", "This process has 1.3 GiB")
    assert not crashes.is_of_the_job(0, one, step=5)
    assert not crashes.is_of_the_job(1, "RuntimeError: CUDA error: misaligned address. Compile with x", step=5)
    assert not crashes.is_of_the_job(2, other, step=5)
    assert crashes.is_of_the_job(3, one, step=5)


def test_units_of_sizes_in_the_first_sentence_do_not_either() -> None:
    crashes = Crashes()
    assert not crashes.is_of_the_job(0, "RuntimeError: no room for 20.00 MiB", step=5)
    assert crashes.is_of_the_job(1, "RuntimeError: no room for 1.25 GiB", step=5)


@pytest.mark.parametrize("since_step", [None, 5], ids=["takes no part", "has just come"])
def test_a_newcomer_proves_nothing(since_step: int | None) -> None:
    crashes = Crashes()
    assert not crashes.is_of_the_job(7, "OSError: no such device", step=5, since_step=since_step)
    assert not crashes.is_of_the_job(1, "OSError: no such device", step=5)
