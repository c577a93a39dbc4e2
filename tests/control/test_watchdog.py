"""The watchdog tells hung workers from waiting ones, at given times."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.config import Timeouts
from chameleon_ft.control.detectors.base import (
    Finding,
    Lost,
    OperationsTimed,
    ProbeAnswered,
    Progressed,
    SendProbe,
    Signal,
    StepCommitted,
    Ticked,
)
from chameleon_ft.control.detectors.watchdog import Watchdog
from chameleon_ft.control.wire.messages import Position, ProcessState

TIMEOUTS = Timeouts(
    heartbeat_timeout_s=1.0, watchdog_min_s=1.5, watchdog_factor=10.0, collective_timeout_s=30.0, rendezvous_s=60.0
)


class Dog:
    """A watchdog, and what it finds."""

    def __init__(self) -> None:
        self.detector = Watchdog(TIMEOUTS)

    def tell(self, signal: Signal) -> tuple[Finding, ...]:
        self.detector, found = self.detector.observe(signal)
        return found

    def operation(self, longest_s: float) -> None:
        assert not self.tell(OperationsTimed(longest_s))

    def committed(self, now: float, *, step_s: float) -> None:
        assert not self.tell(StepCommitted(now, step_s))

    def progress(self, now: float) -> None:
        assert not self.tell(Progressed(now))

    def ask(self, now: float, *, held_up_s: float = 0.0) -> int | None:
        """The number of the probe that is sent out now; None if none is."""
        found = self.tell(Ticked(now, held_up_s, ()))
        if not found:
            return None
        (probe,) = found
        assert isinstance(probe, SendProbe)
        return probe.probe

    def judge(self, worker: int, answer: Position | ProcessState) -> Lost | None:
        found = self.tell(ProbeAnswered(worker, answer))
        if not found:
            return None
        (lost,) = found
        assert isinstance(lost, Lost)
        assert lost.noticed_by == "watchdog"
        return lost


def watchdog(*, step_s: float = 1.0, longest_s: float = 0.1, steps: int = 3) -> Dog:
    """One that has seen `steps` steps, the last at time 0."""
    dog = Dog()
    for _ in range(steps):
        dog.operation(longest_s)
        dog.committed(0.0, step_s=step_s)
    dog.progress(0.0)
    return dog


def position(probe: int | None, *, waiting: bool = False, since_s: float = 0.0) -> Position:
    assert probe is not None
    return Position(probe=probe, doing="F3", waiting=waiting, since_s=since_s)


def state(probe: int | None, *, stopped: bool) -> ProcessState:
    assert probe is not None
    return ProcessState(probe=probe, worker=4, stopped=stopped)


def test_no_worker_is_probed_while_a_step_may_be_under_way() -> None:
    dog = watchdog(step_s=1.0)
    assert dog.ask(1.2) is None
    assert dog.ask(1.3) is not None


def test_steps_of_a_moment_may_take_a_tenth_of_a_second() -> None:
    assert watchdog(step_s=0.001).ask(0.09) is None
    assert watchdog(step_s=0.001).ask(0.11) is not None


def test_progress_ends_the_questions() -> None:
    dog = watchdog()
    probe = dog.ask(2.0)
    dog.progress(2.1)
    assert dog.ask(2.5) is None
    assert dog.judge(4, state(probe, stopped=True)) is None, "an answer to what is settled"


def test_it_asks_again_but_not_all_the_time() -> None:
    dog = watchdog(step_s=1.0)
    first = dog.ask(2.0)
    assert dog.ask(2.1) is None
    second = dog.ask(3.0)
    assert first is not None
    assert second is not None
    assert second > first
    assert dog.judge(4, state(first, stopped=True)) is None, "an answer to the question before"
    assert dog.judge(4, state(second, stopped=True)) is not None


def test_a_stopped_process_is_hung() -> None:
    dog = watchdog()
    verdict = dog.judge(4, state(dog.ask(2.0), stopped=True))
    assert verdict is not None
    assert (verdict.worker, verdict.cause) == (4, "hung: its process is stopped")


def test_a_slow_step_is_not_a_hang() -> None:
    dog = watchdog(step_s=1.0, longest_s=0.1)
    for now in range(2, 200, 2):
        probe = dog.ask(float(now))
        assert dog.judge(4, state(probe, stopped=False)) is None
        assert dog.judge(4, position(probe, since_s=1.4)) is None


def test_a_worker_stuck_in_an_operation_is_hung() -> None:
    dog = watchdog(longest_s=0.1)
    probe = dog.ask(5.0)
    assert dog.judge(4, position(probe, since_s=1.4)) is None, "less than the least"
    verdict = dog.judge(4, position(probe, since_s=1.6))
    assert verdict is not None
    assert verdict.cause == "hung: in F3 for 1.6 s"


def test_long_operations_may_take_their_time() -> None:
    dog = watchdog(step_s=5.0, longest_s=1.0)
    probe = dog.ask(20.0)
    assert dog.judge(4, position(probe, since_s=9.0)) is None
    assert dog.judge(4, position(probe, since_s=11.0)) is not None


@given(st.floats(0.0, 1e6))
def test_who_waits_is_innocent_however_long(since_s: float) -> None:
    dog = watchdog()
    assert dog.judge(4, position(dog.ask(5.0), waiting=True, since_s=since_s)) is None


def test_before_the_first_step_silence_says_little() -> None:
    dog = Dog()
    dog.progress(0.0)
    assert dog.ask(29.0) is None
    probe = dog.ask(31.0)
    assert dog.judge(4, position(probe, since_s=59.0)) is None
    assert dog.judge(4, position(probe, since_s=61.0)) is not None
    assert dog.judge(5, state(probe, stopped=True)) is not None


def test_the_longest_operation_is_forgotten_slowly() -> None:
    dog = watchdog(longest_s=1.0, steps=1)
    for _ in range(300):
        dog.operation(0.01)
        dog.committed(0.0, step_s=1.0)
    probe = dog.ask(5.0)
    assert dog.judge(4, position(probe, since_s=1.6)) is not None
    dog = watchdog(longest_s=1.0, steps=1)
    for _ in range(3):
        dog.operation(0.01)
        dog.committed(0.0, step_s=1.0)
    assert dog.judge(4, position(dog.ask(5.0), since_s=7.0)) is None


def test_the_expected_step_is_the_median_of_recent_ones() -> None:
    dog = Dog()
    for step_s in [100.0] * 20 + [1.0] * 20 + [50.0]:
        dog.operation(0.1)
        dog.committed(0.0, step_s=step_s)
    assert dog.ask(1.3) is not None


@given(st.integers(0, 100), st.integers(0, 100))
def test_time_in_which_the_coordinator_was_held_up_does_not_count(held_up_s: int, now: int) -> None:
    asked = watchdog().ask(now + held_up_s, held_up_s=held_up_s)
    assert (asked is None) == (watchdog().ask(now) is None)
