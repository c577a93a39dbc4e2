"""The watchdog tells hung workers from waiting ones, at given times."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.config import Timeouts
from chameleon_ft.coordinator.detectors.base import (
    Finding,
    LinksCut,
    Lost,
    MessagesOverdue,
    OperationsTimed,
    ProbeAnswered,
    Progressed,
    SendProbe,
    Signal,
    StepCommitted,
    Ticked,
)
from chameleon_ft.coordinator.detectors.watchdog import Watchdog
from chameleon_ft.protocol.messages import Position, ProcessState
from chameleon_ft.protocol.parts import Member

TIMEOUTS = Timeouts(
    heartbeat_timeout_s=1.0,
    watchdog_min_s=1.5,
    watchdog_factor=10.0,
    collective_timeout_s=30.0,
    rendezvous_s=60.0,
    first_step_s=120.0,
)


class Dog:
    """A watchdog, and what it finds."""

    def __init__(self, timeouts: Timeouts = TIMEOUTS) -> None:
        self.detector = Watchdog(timeouts)

    def tell(self, signal: Signal) -> tuple[Finding, ...]:
        self.detector, found = self.detector.observe(signal)
        return found

    def operation(self, longest_s: float, *, in_first_step: bool = False) -> None:
        assert not self.tell(OperationsTimed(longest_s, in_first_step))

    def committed(self, now: float, *, step_s: float) -> None:
        assert not self.tell(StepCommitted(now, step_s))

    def progress(self, now: float) -> None:
        assert not self.tell(Progressed(now))

    def ask(self, now: float, *, held_up_s: float = 0.0) -> int | None:
        """The number of the probe that is sent out now; None if none is."""
        found = self.tell(Ticked(now, held_up_s, (), (), ()))
        if not found:
            return None
        (probe,) = found
        assert isinstance(probe, SendProbe)
        return probe.probe

    def judge(
        self, worker: int, answer: Position | ProcessState, *, now: float = 0.0, in_first_step: bool = False
    ) -> Lost | None:
        found = self.tell(ProbeAnswered(worker, answer, now, in_first_step))
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
    return ProcessState(probe=probe, member=Member(4, 1), stopped=stopped)


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
    assert dog.judge(4, position(second, since_s=60.0)) is not None


def test_a_process_that_is_stopped_at_two_probes_is_hung() -> None:
    dog = watchdog(step_s=60.0)
    assert dog.judge(4, state(dog.ask(100.0), stopped=True), now=100.0) is None
    assert dog.ask(100.2) is None
    verdict = dog.judge(4, state(dog.ask(100.6), stopped=True), now=100.6)
    assert verdict is not None
    assert (verdict.worker, verdict.cause) == (4, "hung: its process is stopped")


@pytest.mark.parametrize("how", ["its agent says that it runs", "it answers itself", "a step is committed"])
def test_a_process_that_a_debugger_stops_now_and_then_is_not_hung(how: str) -> None:
    dog = watchdog(step_s=1.0, longest_s=10.0)
    now = 2.0
    for _ in range(3):
        assert dog.judge(4, state(dog.ask(now), stopped=True), now=now) is None
        now += 2.0
        if how == "a step is committed":
            dog.committed(now, step_s=1.0)
            now += 2.0
            continue
        probe = dog.ask(now)
        running = state(probe, stopped=False) if "agent" in how else position(probe, waiting=True)
        assert dog.judge(4, running, now=now) is None
        now += 2.0


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
    assert dog.ask(14.0) is None
    probe = dog.ask(16.0)
    assert dog.judge(4, position(probe, since_s=119.0), in_first_step=True) is None
    assert dog.judge(4, position(probe, since_s=121.0), in_first_step=True) is not None
    assert dog.judge(5, state(probe, stopped=True), in_first_step=True) is None
    assert dog.judge(5, state(probe, stopped=True), now=1.0, in_first_step=True) is not None


def test_the_first_step_of_a_worker_may_take_longer_than_those_of_others() -> None:
    dog = watchdog(longest_s=0.1)
    probe = dog.ask(5.0)
    assert dog.judge(5, position(probe, since_s=100.0), in_first_step=True) is None
    assert dog.judge(4, position(probe, since_s=100.0)) is not None


def test_operations_of_first_steps_are_a_measure_only_until_there_is_a_better() -> None:
    dog = Dog()
    dog.operation(5.0, in_first_step=True)
    dog.committed(0.0, step_s=1.0)
    probe = dog.ask(60.0)
    assert dog.judge(4, position(probe, since_s=49.0)) is None
    dog.operation(0.1)
    assert dog.judge(4, position(probe, since_s=49.0)) is not None


# --- workers that do not answer, and messages that do not come -------------------------------------------------------


def test_a_worker_that_does_not_answer_has_as_long_as_an_operation() -> None:
    dog = watchdog(step_s=1.0)
    assert dog.judge(4, state(dog.ask(50.0), stopped=False), now=50.0) is None, "it has not been asked before"
    assert dog.judge(4, state(dog.ask(51.0), stopped=False), now=51.0) is None
    verdict = dog.judge(4, state(dog.ask(51.7), stopped=False), now=51.7)
    assert verdict is not None
    assert verdict.cause == "hung: its process lives, but has not answered for 1.7 s"


def test_an_answer_ends_the_silence() -> None:
    dog = watchdog(step_s=1.0)
    for now in range(10, 100):
        probe = dog.ask(float(now))
        assert dog.judge(4, state(probe, stopped=False), now=float(now)) is None
        assert dog.judge(4, position(probe, waiting=True), now=now + 0.5) is None


def test_in_its_first_step_a_worker_may_be_silent_for_longer() -> None:
    dog = watchdog(step_s=1.0)
    for now in (50.0, 60.0, 169.0):
        assert dog.judge(4, state(dog.ask(now), stopped=False), now=now, in_first_step=True) is None
    assert dog.judge(4, state(dog.ask(171.0), stopped=False), now=171.0, in_first_step=True) is not None


def waits(dog: Dog, now: float, positions: dict[int, Position]) -> tuple[Finding, ...]:
    """Return the findings of the tick after these workers, of three, have answered a probe."""
    for worker, answer in positions.items():
        assert dog.judge(worker, answer, now=now) is None
    return dog.tell(Ticked(now, 0.0, (), (1, 2, 3), ()))


def for_message(
    probe: int | None,
    peer: int | None,
    *,
    since_s: float = 31.0,
    unreached: dict[int, float] | None = None,
) -> Position:
    assert probe is not None
    return Position(
        probe=probe,
        doing="a message",
        waiting=True,
        since_s=since_s,
        for_message=True,
        peer=peer,
        unreached=tuple((1, worker, silent_s) for worker, silent_s in (unreached or {}).items()),
    )


def test_messages_are_lost_if_all_workers_wait_for_them() -> None:
    dog = watchdog()
    probe = dog.ask(40.0)
    (found,) = waits(dog, 40.1, {1: for_message(probe, 2), 2: for_message(probe, 1), 3: for_message(probe, None)})
    assert isinstance(found, MessagesOverdue)
    assert [(report.reporter, report.peer) for report in found.reports] == [(1, 2), (2, 1), (3, None)]
    assert dog.ask(40.2) is None, "the generation ends"


def test_only_those_are_named_that_wait_for_each_other() -> None:
    dog = watchdog()
    probe = dog.ask(40.0)
    (found,) = waits(dog, 40.1, {1: for_message(probe, 3), 2: for_message(probe, 3), 3: for_message(probe, 2)})
    assert isinstance(found, MessagesOverdue)
    assert [(report.reporter, report.peer) for report in found.reports] == [(2, 3), (3, 2)]
    dog = watchdog()
    probe = dog.ask(40.0)
    (found,) = waits(dog, 40.1, {1: for_message(probe, 2), 2: for_message(probe, 3), 3: for_message(probe, None)})
    assert isinstance(found, MessagesOverdue)
    assert [(report.reporter, report.peer) for report in found.reports] == [(2, 3), (3, None)]


@pytest.mark.parametrize("both_ways", [True, False])
def test_a_link_is_cut_if_one_end_acknowledges_nothing_whoever_waits(*, both_ways: bool) -> None:
    dog = watchdog()
    probe = dog.ask(40.0)
    seen = {1: for_message(probe, 3, unreached={2: 20.0}), 2: for_message(probe, 1), 3: position(probe, since_s=0.1)}
    assert waits(dog, 40.1, seen) == (), "it may come back"
    probe = dog.ask(60.0)
    other = for_message(probe, 1, unreached={1: 31.0 if both_ways else 1.0})
    seen = {
        1: for_message(probe, 3, unreached={2: 30.5, 3: 1.5}),
        2: other,
        3: for_message(probe, 1, unreached={2: 16.0}),
    }
    (found,) = waits(dog, 60.1, seen)
    assert isinstance(found, LinksCut)
    assert [{report.reporter, report.peer} for report in found.reports] == [{1, 2}, {2, 3}], "3 and 1 reach each other"
    assert dog.ask(60.2) is None, "the generation ends"


@pytest.mark.parametrize(("longest_s", "timeout_s"), [(0.1, 15.0), (60.0, 180.0)])
def test_by_default_the_time_for_a_message_follows_the_longest_step(longest_s: float, timeout_s: float) -> None:
    for silent_s, is_cut in ((timeout_s - 1, False), (timeout_s + 1, True)):
        dog = Dog(Timeouts())
        for step_s in (0.1, longest_s, 0.1):
            dog.committed(0.0, step_s=step_s)
        probe = dog.ask(500.0)
        seen = {1: for_message(probe, None, unreached={2: silent_s}), 2: position(probe), 3: position(probe)}
        assert isinstance(next(iter(waits(dog, 500.1, seen)), None), LinksCut) is is_cut


@pytest.mark.parametrize(
    "third",
    [
        lambda probe: {},
        lambda probe: {3: position(probe, since_s=1.0)},
        lambda probe: {3: position(probe, waiting=True, since_s=1e6)},
        lambda probe: {3: for_message(probe, 1, since_s=29.0)},
    ],
    ids=["it does not answer", "it computes", "it waits for its disk", "it has received a message"],
)
def test_messages_are_only_late_if_a_worker_is_slow(third: Callable[[int | None], dict[int, Position]]) -> None:
    dog = watchdog()
    probe = dog.ask(40.0)
    assert waits(dog, 40.1, {1: for_message(probe, 2), 2: for_message(probe, 1), **third(probe)}) == ()


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
