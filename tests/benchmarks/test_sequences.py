"""Drawn sequences of failures: what is drawn, and that the checks of a run find what is wrong with it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from benchmarks._sequence_checks import Findings, look_at
from benchmarks._sequence_diagnoses import diagnosed
from benchmarks._sequence_draws import DrawnRun, Part, Strike, StrikeKind, Target, draw
from benchmarks._sequence_strikes import Struck
from benchmarks.sequences import config_of
from chameleon_ft.config import LASTING_KINDS, FailureKind, FailurePhase, PolicyName
from tests.harness import Ended, fails, train_here
from tests.report.records import failure_record

MANY = 400


def test_every_drawn_run_is_a_valid_one(tmp_path: Path) -> None:
    for seed in range(MANY):
        run = draw(seed)
        config = config_of(run, tmp_path)
        assert len({failure.worker for failure in config.failures}) == len(config.failures) < run.workers <= 8


def test_everything_is_drawn() -> None:
    runs = [draw(seed) for seed in range(MANY)]
    failures = [failure for run in runs for failure in run.failures]
    assert {failure.phase for failure in failures} == {*get_args(FailurePhase)}
    assert {failure.kind for failure in failures} == {*get_args(FailureKind)} - {*LASTING_KINDS}
    assert {run.policy for run in runs} == set(get_args(PolicyName))
    assert {run.split_backward for run in runs} == {run.evaluation is None for run in runs} == {False, True}
    assert {part for run in runs for part in run.parts} == {*get_args(Part)} - {"best", "recomputed"}  # to be asked for
    assert {len(run.failures) for run in runs} == {1, 2, 3, 4}
    at_once = Counter((run.seed, f.step, f.phase) for run in runs for f in run.failures)
    assert max(at_once.values()) > 1
    in_recoveries = Counter((run.seed, f.step) for run in runs for f in run.failures if f.phase == "confirm")
    assert in_recoveries


def test_strikes_hit_every_kind_of_process_in_the_order_of_their_steps() -> None:
    runs = [draw(seed, strikes=True) for seed in range(MANY)]
    strikes = [strike for run in runs for strike in run.strikes]
    assert {strike.target for strike in strikes} == {*get_args(Target)}
    assert {strike.kind for strike in strikes} == {*get_args(StrikeKind)}
    assert {strike.in_evaluation for strike in strikes} == {False, True}
    for run in runs:
        assert [strike.step for strike in run.strikes] == sorted({strike.step for strike in run.strikes})
        hit = [strike.worker for strike in run.strikes if strike.worker is not None]
        ended = {failure.worker for failure in run.failures if failure.kind not in LASTING_KINDS}
        assert run.respawn or not ended.intersection(hit)


def test_workers_of_runs_with_strikes_also_fail_in_ways_that_they_survive(tmp_path: Path) -> None:
    runs = [draw(seed, strikes=True) for seed in range(MANY)]
    assert {failure.kind for run in runs for failure in run.failures} == {*get_args(FailureKind)}
    for run in runs:
        config_of(run, tmp_path)  # is valid
        # State that only one worker holds is compared with no other.
        assert (run.dp > 1 and run.owners != 1) or all(failure.kind != "corrupt" for failure in run.failures)


# --- what the checks find --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run with a change of placement."""
    run = DrawnRun(
        seed=5,
        dp=2,
        pp=2,
        split_backward=False,
        policy="repartition",
        micro_batches=4,
        micro_batch_size=1,
        blocks=3,
        dropout=0.0,
        steps=5,
        checkpoint_every=0,
        failures=(fails(1, step=2),),
        parts=("routed",),
        evaluation=(2, 3),
    )
    folder = tmp_path_factory.mktemp("drawn")
    return train_here(config_of(run, folder), folder / "run")


@pytest.mark.multiprocess
def test_a_run_as_it_should_be(ended: Ended) -> None:
    found = look_at(ended.run, exit_code=ended.code)
    assert found.problems == ()
    assert (found.ended, found.transitions, found.repeated_steps, found.evaluations) == ("finished", 1, 0, 2)
    assert [fault["worker"] for fault in found.fired] == [1]


def spoilt(ended: Ended, file: Path, change: Callable[[list[dict[str, Any]]], object]) -> Findings:
    """Return the check after `change` to the lines of one of the run's files, which is then restored."""
    text = file.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    change(lines)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    try:
        return look_at(ended.run, exit_code=ended.code)
    finally:
        file.write_text(text)


def of_kind(lines: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(line for line in lines if line["event"] == name)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda lines: of_kind(lines, "transition").update(moved_bytes=7), "what moved is not what was planned"),
        (lambda lines: of_kind(lines, "decision").update(chosen="prayer"), "prayer is chosen and not feasible"),
        (lambda lines: of_kind(lines, "failure").update(worker=2), "has workers that are lost"),
        (lambda lines: of_kind(lines, "failure").update(worker=2), "and lost are"),
        (lambda lines: of_kind(lines, "failure").update(noticed_by="checksum"), "the state of no worker was spoiled"),
        (lambda lines: of_kind(lines, "evaluation").update(loss=5.0), "the evaluation after 1 has loss 5.0"),
        (lambda lines: lines.remove(of_kind(lines, "evaluation")), "evaluated were the steps [3], and due [1, 3]"),
        (lambda lines: lines.append({"event": "refused", "time": 0.0, "address": "", "reason": ""}), "not understood"),
    ],
)
def test_what_is_wrong_with_an_event_is_found(
    ended: Ended, change: Callable[[list[dict[str, Any]]], object], problem: str
) -> None:
    found = spoilt(ended, ended.run.events_file, change)
    assert any(problem in each for each in found.problems), str(found)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda steps: steps[3].update(loss=steps[3]["loss"] * 1.0001), "it is not the plain loop"),
        (lambda steps: steps[3]["metrics"].update(largest_load=1.0), "step 3 has"),
        (lambda steps: steps.append(steps[4]), "is trained again, and no failure says so"),
        (lambda steps: steps.append({**steps[4], "loss": 1.0}), "was trained again with another loss"),
        (lambda steps: steps[1].update(samples=3), "the steps should have [4, 4, 4, 4, 4] samples"),
        (lambda steps: steps.pop(), "4 of 5 steps"),
    ],
)
def test_what_is_wrong_with_a_step_is_found(
    ended: Ended, change: Callable[[list[dict[str, Any]]], object], problem: str
) -> None:
    found = spoilt(ended, ended.run.metrics_file, change)
    assert any(problem in each for each in found.problems), str(found)


@pytest.mark.multiprocess
def test_an_end_without_need_is_found(ended: Ended) -> None:
    (problem,) = [each for each in look_at(ended.run, exit_code=1).problems if each.startswith("it ended")]
    assert "exit code 1, status finished" in problem


def test_each_fault_is_laid_beside_what_it_is_called() -> None:
    def failure(worker: int, noticed_by: str, cause: str, time: float) -> dict[str, Any]:
        changes = {"noticed_by": noticed_by, "cause": cause, "time": time}
        return {**failure_record(3, worker=worker).to_json(), **changes}

    events = [
        failure(0, "child", "SIGKILL", 10.0),
        failure(1, "connection", "control connection closed", 20.0),
        failure(2, "peer", "no data passes between it and 0, though the coordinator reaches all", 35.0),
        {"event": "background_replaced", "reason": "was stopped", "message": "", "time": 41.0},
        {"event": "finished", "status": "finished", "reason": "all steps are trained", "time": 99.0},
    ]
    faults = [
        {"worker": 0, "kind": "kill", "time": 9.0},
        {"worker": 1, "kind": "hang", "time": 19.0},
        {"worker": 3, "kind": "kill", "time": 98.9},
    ]
    struck = [
        Struck(Strike(step=1, delay_s=0.0, target="link", kind="cut"), 30.0, 36.0),
        Struck(Strike(step=2, delay_s=0.0, target="background process", kind="stop"), 40.0, 42.0),
        Struck(Strike(step=3, delay_s=0.0, target="disk", kind="fill"), 50.0, 52.0),
    ]
    assert list(diagnosed(events, faults, struck)) == [
        ("kill", "kill"),
        ("hang", "disconnect"),
        ("cut link", "cut link"),
        ("stop background process", "stop background process"),
        ("fill disk", "nothing"),
    ]
