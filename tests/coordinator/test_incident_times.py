"""The times of an incident phase by phase, and the best known cause of a loss."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.coordinator.detectors.process import describe_exit
from chameleon_ft.coordinator.state.incidents import Fault, Incident, Loss
from chameleon_ft.cost.transition import StallModel


def loss(**changes: object) -> Loss:
    values = Loss(worker=1, step=4, noticed_by="child", cause="SIGKILL", noticed_at=10.0, failed_at=9.5)
    return dataclasses.replace(values, **changes)  # type: ignore[arg-type]


def test_an_incident_is_timed_phase_by_phase() -> None:
    incident = Incident(
        (
            loss(),
            loss(worker=2, noticed_at=10.5, failed_at=None),
        ),
        stopped_at=11.0,
        decided_at=11.25,
    )
    first, second = incident.records(None, generation=3, resumed_at=12.0, cause_of=lambda loss: loss.cause, stop="why")
    assert (first.detect_s, first.stop_s, first.decide_s, first.regroup_s) == (0.5, 1.0, 0.25, 0.75)
    assert first.stall_s == 2.5
    assert (second.detect_s, second.stop_s, second.stall_s) == (None, 0.5, 1.5)
    assert (first.policy, first.action, first.resume_step, first.lost_layers) == ("stop", "why", 4, ())


EXPECTED = StallModel(detect_s=2.0, stop_s=3.0, decide_s=0.5, regroup_s=0.25)


def test_a_decision_knows_the_completed_part_of_a_stall() -> None:
    incident = Incident(
        (
            loss(),
            loss(worker=2, noticed_at=10.5, failed_at=None),
        ),
        stopped_at=11.0,
    )
    phases, repeat_s = incident.stall_so_far(9.0, EXPECTED)
    assert phases == StallModel(detect_s=0.5, stop_s=1.0, decide_s=0.5, regroup_s=0.25)
    assert repeat_s == 0.5
    # After another decision, only what has come since.
    phases, repeat_s = incident.stall_so_far(10.25, EXPECTED)
    assert (phases.detect_s, phases.stop_s, repeat_s) == (0.25, 0.5, 0.0)


def test_an_unknown_failure_time_is_estimated() -> None:
    incident = Incident((loss(failed_at=None),), stopped_at=11.0)
    phases, repeat_s = incident.stall_so_far(7.0, EXPECTED)
    assert (phases.detect_s, phases.stop_s, repeat_s) == (2.0, 1.0, 1.0)
    phases, repeat_s = incident.stall_so_far(None, EXPECTED)
    assert (phases.detect_s, phases.stop_s, repeat_s) == (0.0, 0.0, 0.0)


@given(*[st.floats(0, 100) for _ in range(4)], st.booleans())
def test_what_is_over_adds_up_to_the_time_that_has_passed(
    since: float, failed: float, noticed: float, stopped: float, known: bool
) -> None:
    incident = Incident((loss(noticed_at=noticed, failed_at=failed if known else None),), stopped_at=stopped)
    phases, repeat_s = incident.stall_so_far(since, EXPECTED)
    assert min(phases.detect_s, phases.stop_s, repeat_s) >= 0
    if since <= noticed <= stopped:
        assert phases.detect_s + phases.stop_s + repeat_s == pytest.approx(stopped - since)


@given(*[st.floats(0, 100) for _ in range(4)])
def test_times_are_never_negative(noticed: float, stopped: float, decided: float, resumed: float) -> None:
    # Clocks of different hosts differ, and a loss may be noticed after all others had quiesced.
    incident = Incident((loss(noticed_at=noticed),), stopped_at=stopped, decided_at=decided)
    (record,) = incident.records(None, generation=1, resumed_at=resumed, cause_of=lambda loss: "", stop="")
    assert record.detect_s is not None
    assert min(record.detect_s, record.stop_s, record.decide_s, record.regroup_s) >= 0


@pytest.mark.parametrize(
    ("code", "text"), [(0, "exit code 0"), (3, "exit code 3"), (-9, "SIGKILL"), (-11, "SIGSEGV"), (-63, "signal 63")]
)
def test_how_a_process_ended(code: int, text: str) -> None:
    assert describe_exit(code) == text


@pytest.mark.parametrize(
    ("known", "text"),
    [
        ({"crash": "ValueError: x", "exit_code": 1}, "ValueError: x"),
        ({"exit_code": -9}, "SIGKILL"),
        ({}, "connection closed"),
        ({"exit_code": -9, "fault": Fault(1, "disconnect", 9.5)}, "connection closed"),
        ({"exit_code": -9, "fault": Fault(1, "kill", 9.5)}, "SIGKILL"),
    ],
)
def test_the_best_known_cause(known: dict[str, object], text: str) -> None:
    found = loss(noticed_by="connection", cause="connection closed")
    arguments = {"crash": None, "exit_code": None, "fault": None, **known}
    assert found.describe_cause(**arguments) == text  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["watchdog", "heartbeat", "peer"])
def test_a_worker_that_was_given_up_did_not_die_of_the_kill(path: str) -> None:
    found = loss(noticed_by=path, cause="hung")
    assert found.describe_cause(crash=None, exit_code=-9, fault=None) == "hung"
