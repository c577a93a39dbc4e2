"""Reads of samples that take long: they are told, and no worker is given up for one before its own limit."""

from __future__ import annotations

from chameleon_ft.config import Timeouts
from chameleon_ft.coordinator.commands import Record
from chameleon_ft.coordinator.detectors.base import Finding, Lost, ProbeAnswered, StopRequested, Ticked
from chameleon_ft.coordinator.detectors.connection import QuiesceTimeout
from chameleon_ft.events.kinds import Waiting
from chameleon_ft.protocol.messages import Position, Probe, ProcessState
from chameleon_ft.protocol.parts import Member
from tests.coordinator.histories import AGENT, History
from tests.coordinator.situations import training

TIMEOUTS = Timeouts()
SAMPLE = "reading sample 7 of micro-batch 3 in step 8"


def reading(since_s: float, *, doing: str = SAMPLE, probe: int = 0) -> Position:
    return Position(probe=probe, doing=doing, waiting=True, since_s=since_s, is_reading=True)


def answer(history: History, worker: int, since_s: float, *, doing: str = SAMPLE) -> list[float]:
    """Have a worker answer the newest probe, and return the seconds of reading that are told."""
    probe = history.sent(Probe, to=history.connection(worker))[-1].probe
    done = history.tell(worker, reading(since_s, doing=doing, probe=probe))
    records = (each.record for each in done if isinstance(each, Record))
    return [each.since_s for each in records if isinstance(each, Waiting)]


def test_a_read_is_told_whenever_its_time_has_doubled() -> None:
    history = training()
    history.wait(0.5)
    assert answer(history, 1, 9.0) == []
    assert answer(history, 1, 12.0) == [10.0]
    assert answer(history, 1, 19.0) == []
    assert answer(history, 2, 12.0) == [10.0], "each worker reads by itself"
    assert answer(history, 1, 21.0) == [20.0]
    assert answer(history, 1, 9.0, doing="reading sample 8") == [], "another sample begins anew"
    assert answer(history, 1, 10.0, doing="reading sample 8") == [10.0]
    assert history.live() == (0, 1, 2, 3)


def test_a_read_has_a_limit_of_its_own() -> None:
    history = training()
    history.wait(0.5)
    answer(history, 1, TIMEOUTS.sample_read_s)
    assert history.live() == (0, 1, 2, 3)
    answer(history, 1, TIMEOUTS.sample_read_s + 1.0)
    assert history.live() == (0, 2, 3)
    history.quiesce()
    history.start()
    ((worker, noticed_by, cause),) = history.failures
    assert (worker, noticed_by) == (1, "watchdog")
    assert SAMPLE in cause


def lost(found: tuple[Finding, ...]) -> set[int]:
    assert all(isinstance(each, Lost) for each in found)
    return {each.worker for each in found if isinstance(each, Lost)}


def test_a_worker_that_reads_leaves_its_operation_later() -> None:
    limit_s = 60.0
    detector = QuiesceTimeout(TIMEOUTS)

    def late(at_s: float) -> set[int]:
        return lost(detector.observe(Ticked(at_s, 0.0, (1, 2), (), ()))[1])

    detector, _ = detector.observe(StopRequested(0.0))
    read_s = limit_s - 1.0
    detector, _ = detector.observe(ProbeAnswered(1, reading(read_s), read_s, in_first_step=False))
    assert late(limit_s + 1.0) == {2}
    assert late(read_s + limit_s + 1.0) == {1, 2}
    detector, _ = detector.observe(StopRequested(500.0))
    assert late(500.0 + limit_s + 1.0) == {1, 2}, "the time runs anew at each stop"


def test_a_read_that_keeps_the_process_from_answering_is_told_by_its_agent() -> None:
    history = training()

    def ask(seconds: float, *, is_reading: bool = True) -> None:
        history.wait(seconds)
        probe, doing = history.sent(Probe, to=AGENT)[-1].probe, SAMPLE if is_reading else ""
        history.say(AGENT, ProcessState(probe=probe, member=Member(1, 1), stopped=False, doing=doing))

    ask(0.5)
    ask(60.0)
    assert [event["doing"] for event in history.events("waiting")] == [SAMPLE]
    ask(1.0, is_reading=False)
    assert history.live() == (0, 1, 2, 3), "its silence begins with the end of the read"
    ask(1.0)
    ask(TIMEOUTS.sample_read_s)
    assert history.live() == (0, 2, 3)
