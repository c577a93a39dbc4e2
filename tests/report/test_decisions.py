"""Decisions read from the events of a run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chameleon_ft.errors import ConfigError
from chameleon_ft.events.lines import parse_event
from chameleon_ft.report.decisions import Decisions, DecisionStory
from tests.golden import refused
from tests.report.records import failure_record, outcome_record, run_info


def started() -> dict[str, Any]:
    return {"time": 1.0, "event": "started", **run_info().values()}


def weighed(
    policy: str,
    step_s: float | None,
    stall_s: float | None,
    num_bytes: int | None,
    *,
    reason: str | None = None,
    **more: float,
) -> dict[str, Any]:
    """Return a candidate with batches of 100 samples, and the next failure after 1000 s."""
    samples = 0.0 if reason or step_s is None or stall_s is None else 100 * (1000.0 - stall_s) / step_s
    return {
        "policy": policy,
        "step_s": step_s,
        "stall_s": stall_s,
        "transfer_s": None if stall_s is None else max(0.0, stall_s - 0.5),
        "migration_s": 0.0,
        "waves": 0,
        "bytes": num_bytes,
        "samples": samples,
        "feasible": reason is None,
        "reason": reason,
        "worker_single_points_of_failure": 0,
        "host_single_points_of_failure": 0,
        "fatal_share": 0.0,
        "return_s": 0.0,
        "shared_s": 0.0,
        **more,
    }


def decided(
    generation: int,
    *lost: int,
    chosen: str | None = "repartition",
    candidates: list[dict[str, Any]] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    return {
        "time": 1_767_268_800.0,
        "event": "decision",
        "generation": generation,
        "search_s": 0.02,
        "prepared": False,
        "step": 40,
        "lost": list(lost),
        "live": 7,
        "plan": "4 pipelines of 2 stages",
        "rate": {
            "failures": 1,
            "worker_s": 240.0,
            "prior_failures": 1.0,
            "worker_mtbf_s": 13_760.0,
            "host_failure_fraction": 0.25,
            "incidents": 1,
            "together": {},
            "bursts": 0,
        },
        "stall": {
            "repeat_s": 0.25,
            "detect_s": 0.125,
            "stop_s": 0.025,
            "decide_s": 0.05,
            "regroup_s": 0.05,
            "restart_cost_s": 300.0,
        },
        "corrections": {
            "operations": 3.5,
            "step": 1.0,
            "transfer": 1.0,
            "migration": 1.0,
            "slow": {"3": 0.5},
            "slow_links": {"2-3": 0.4},
        },
        "chosen": chosen,
        "horizon_s": 1000.0,
        "candidates": candidates
        or [
            weighed("reroute", 0.5, 0.5, 0),
            weighed("repair", None, None, None, reason="the plan has [detours]"),
            weighed("repartition", 0.4, 0.75, 47_056_120),
        ],
        **changes,
    }


def planned(generation: int, policy: str) -> dict[str, Any]:
    return {"time": 1.0, "event": "plan", "generation": generation, "policy": policy}


def lost(worker: int, generation: int) -> dict[str, Any]:
    record = failure_record(40, worker=worker).values()
    return {"time": 1.0, "event": "failure", **record, "generation": generation}


def came(generation: int) -> dict[str, Any]:
    return {"time": 1.0, "event": "outcome", **outcome_record().values(), "generation": generation}


def decision_stories(lines: list[dict[str, Any]]) -> tuple[DecisionStory, ...]:
    return Decisions.of(parse_event(json.dumps(line).encode()) for line in lines).stories()


def test_a_decision_has_its_losses_policy_and_outcome() -> None:
    events = [started(), decided(2, 5), planned(2, "repartition"), lost(5, 2), came(2)]
    (story,) = decision_stories(events)
    assert (story.number, story.session, story.policy) == (1, 1, "repartition")
    assert [loss.worker for loss in story.losses] == [5]
    assert story.outcome is not None
    assert story.outcome.measured_step_s == 0.41
    assert story.decided.best is not None
    assert story.decided.best.bytes == 47_056_120
    assert story.decided.second is not None
    assert story.decided.second.policy == "reroute"


def test_a_decision_that_was_overtaken_has_its_losses_and_no_outcome() -> None:
    events = [
        started(),
        decided(2, 5),
        planned(2, "repartition"),
        decided(3, 1, 5),
        planned(3, "repartition"),
        lost(5, 3),
        lost(1, 3),
        came(3),
    ]
    first, second = decision_stories(events)
    assert [loss.worker for loss in first.losses] == [5]
    assert [loss.worker for loss in second.losses] == [1, 5]
    assert first.outcome is None
    assert second.outcome is not None


def test_a_no_op_has_no_outcome_of_the_running_generation() -> None:
    stay = decided(2, trigger="join", chosen="stay", candidates=[weighed("stay", 0.4, 0.0, 0)])
    events = [started(), decided(2, 5), planned(2, "repartition"), lost(5, 2), stay, came(2)]
    first, second = decision_stories(events)
    assert (first.policy, first.is_noop, first.outcome is None) == ("repartition", False, False)
    assert (second.policy, second.is_noop, second.outcome) == ("stay", True, None)


def test_a_worker_that_came_back_and_is_lost_again_has_two_losses() -> None:
    events = [started(), decided(2, 5), planned(2, "repartition"), lost(5, 2)]
    events += [decided(3, trigger="join"), planned(3, "repartition")]
    events += [decided(4, 5), planned(4, "repartition"), {**lost(5, 4), "cause": "hung"}]
    first, join, second = decision_stories(events)
    assert [loss.generation for loss in first.losses] == [2]
    assert join.losses == ()
    assert [(loss.generation, loss.cause) for loss in second.losses] == [(4, "hung")]


def test_sessions_of_a_run_are_distinguished() -> None:
    events = [started(), decided(2, 5), planned(2, "repartition"), lost(5, 2)]
    events += [started(), decided(4, 5), planned(4, "repartition"), lost(5, 4), came(4)]
    first, second = decision_stories(events)
    assert (first.number, first.session, second.number, second.session) == (1, 1, 2, 2)
    assert [loss.generation for loss in (*first.losses, *second.losses)] == [2, 4]


def test_a_run_that_ended_at_a_decision_carried_nothing_out() -> None:
    (story,) = decision_stories([started(), decided(2, 5, chosen=None)])
    assert (story.policy, story.outcome, story.losses, story.decided.best) == (None, None, (), None)


def test_json_has_all_that_the_event_has() -> None:
    event = decided(2, 5)
    (story,) = decision_stories([started(), event, planned(2, "repartition")])
    told = json.loads(json.dumps(story.to_json()))
    assert {name: value for name, value in told.items() if name in event} == {
        name: value for name, value in event.items() if name != "event"
    }


@pytest.mark.parametrize("field", ["lost", "rate", "corrections", "candidates"])
def test_a_field_that_is_missing_is_named(field: str) -> None:
    event = {name: value for name, value in decided(2, 5).items() if name != field}
    with refused(ConfigError):
        decision_stories([started(), event])
