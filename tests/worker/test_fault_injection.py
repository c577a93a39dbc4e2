"""Failures that are injected into a rank."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.config import Failure, FailureKind, FailurePhase
from chameleon_ft.storage.files import FaultLog
from chameleon_ft.worker import fault_injection
from chameleon_ft.worker.fault_injection import FaultInjector, failures_of_incarnation


class Injector(FaultInjector):
    """One that fails only on paper."""

    def __init__(self, worker: int, failures: list[Failure], log: FaultLog) -> None:
        super().__init__(worker, failures, log=log, disconnect=lambda: None)
        self.failed: list[tuple[FailureKind, FailurePhase | None, int | None]] = []

    def fail(self, kind: FailureKind, *, phase: FailurePhase | None, step: int | None) -> None:
        self.failed.append((kind, phase, step))


def planned(worker: int, step: int, phase: FailurePhase = "sync") -> Failure:
    return Failure(step=step, worker=worker, phase=phase, kind="hang")


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.sampled_from(["sync", "vote"])), max_size=5))
def test_each_planned_failure_of_this_worker_happens_once_in_its_phase(
    failures: list[tuple[int, int, FailurePhase]],
) -> None:
    injector = Injector(1, [planned(*failure) for failure in failures], FaultLog(Path("unused")))
    phases: tuple[FailurePhase, ...] = ("sync", "vote")
    for step in range(10):
        for phase in phases:
            injector.at(phase, step)
            injector.at(phase, step)  # the step may be run again
    expected = [("hang", phase, step) for step in range(10) for phase in phases]
    assert sorted(injector.failed, key=str) == sorted(
        (e for e in expected for w, step, phase in failures if w == 1 and e[1:] == (phase, step)), key=str
    )


def test_a_failure_that_was_missed_happens_at_the_next_chance() -> None:
    # A phase such as "recovery" or "checkpoint" does not come in every step.
    injector = Injector(1, [planned(1, 4, "recovery")], FaultLog(Path("unused")))
    injector.at("recovery", 3)
    assert injector.failed == []
    injector.at("recovery", 8)
    assert injector.failed == [("hang", "recovery", 8)]


def test_failures_are_added_while_it_runs() -> None:
    injector = Injector(1, [], FaultLog(Path("unused")))
    injector.plan(planned(1, 0))
    injector.at("sync", 12)
    assert injector.failed == [("hang", "sync", 12)]


def test_a_disconnect_is_noted_and_carried_out(tmp_path: Path) -> None:
    log = FaultLog(tmp_path / "faults.jsonl")
    cut = threading.Event()
    injector = FaultInjector(
        2, [Failure(step=1, worker=2, phase="vote", kind="disconnect")], log=log, disconnect=cut.set
    )
    injector.at("vote", 1)
    assert cut.is_set()
    noted = log.last(2)
    assert noted is not None
    assert (noted["kind"], noted["phase"], noted["step"]) == ("disconnect", "vote", 1)


def test_a_failure_that_cannot_be_noted_happens_all_the_same(tmp_path: Path) -> None:
    cut = threading.Event()
    log = FaultLog(tmp_path / "no folder" / "faults.jsonl")
    FaultInjector(2, [], log=log, disconnect=cut.set).fail("disconnect", phase=None, step=None)
    assert cut.is_set()


def test_a_worker_computes_at_the_injected_speed_until_it_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(
        fault_injection, "time", SimpleNamespace(perf_counter=lambda: 5.0, sleep=lambda seconds: slept.append(seconds))
    )
    failures = [Failure(step=step, worker=1, kind="slow", factor=factor) for step, factor in ((2, 0.25), (4, 1.0))]
    injector = FaultInjector(1, failures, log=FaultLog(Path("unused")), disconnect=lambda: None)
    for step in range(6):
        injector.at("forward", step)
        injector.slow_down(3.0)
    assert slept == [6.0, 6.0], "in the steps 2 and 3, three times the two seconds that the operation has taken"


def test_an_incarnation_has_the_failures_up_to_the_one_that_ends_it() -> None:
    def at(step: int, kind: FailureKind = "slow", worker: int = 1) -> Failure:
        return Failure(step=step, worker=worker, kind=kind, factor=0.5 if kind == "slow" else None)

    failures = [at(1), at(2, "kill"), at(3, "hang"), at(4, worker=0), at(5), at(6)]
    found = [failures_of_incarnation(failures, 1, number) for number in (1, 2, 3, 4)]
    assert found == [[at(1), at(2, "kill")], [at(3, "hang")], [at(5), at(6)], []]
