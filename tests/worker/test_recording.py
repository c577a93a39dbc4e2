"""Which steps a worker writes down, and what stands there."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from chameleon_ft.plan import LayerRange
from chameleon_ft.protocol.parts import OperationTimes
from chameleon_ft.schedule import OperationKind
from chameleon_ft.storage import timelines
from chameleon_ft.storage.timelines import RecordedReduction, TimelineLog, read_recorded_steps
from chameleon_ft.sync import Segment
from chameleon_ft.worker.execution.steps import StepRecorder, StepStats, TimedReduction

STATS = StepStats(
    spans=[
        (OperationKind.FORWARD, 100.0, 100.25),
        (OperationKind.FORWARD, 100.25, 101.0),
        (OperationKind.INPUT_GRAD, 101.0, 101.5),
        (OperationKind.WEIGHT_GRAD, 101.5, 101.75),
    ],
    reductions=(TimedReduction(Segment(LayerRange(2, 4), (0, 1)), 101.5, 102.0),),
    vote_s=(102.0, 102.25),
    end_s=102.5,
)


def recorder(folder: Path, *, every: int = 10) -> StepRecorder:
    return StepRecorder(log=TimelineLog(folder / "worker-3.jsonl"), worker=3, every=every)


@pytest.mark.parametrize(
    ("every", "first_step", "steps"), [(10, 7, [7, 8, 10, 20]), (10, 9, [9, 10, 20]), (1, 18, [18, 19, 20]), (0, 7, [])]
)
def test_those_that_are_due_and_the_first_after_a_change(
    every: int, first_step: int, steps: list[int], tmp_path: Path
) -> None:
    own = recorder(tmp_path, every=every)
    assert [step for step in range(first_step, 21) if own.is_due(step, first_step=first_step)] == steps


def test_a_step_is_written_in_seconds_since_it_began(tmp_path: Path) -> None:
    recorder(tmp_path).record(40, STATS, generation=2, start_s=100.0, start_unix_s=1_750_000_000.0)
    (step,) = read_recorded_steps(tmp_path)
    assert (step.step, step.generation, step.worker, step.time) == (40, 2, 3, 1_750_000_000.0)
    assert step.operations == ((0.0, 0.25), (0.25, 1.0), (1.0, 1.5), (1.5, 1.75))
    assert step.reductions == (RecordedReduction(2, 4, 1.5, 2.0),)
    assert (step.vote_s, step.end_s) == ((2.0, 2.25), 2.5)


def test_a_deferred_step_that_no_other_follows_is_written_once(tmp_path: Path) -> None:
    own = recorder(tmp_path)
    own.record(40, STATS, generation=2, start_s=100.0, start_unix_s=1_750_000_000.0)
    (step,) = read_recorded_steps(tmp_path)
    own.log.defer(replace(step, step=41))
    assert len(read_recorded_steps(tmp_path)) == 1
    for _ in range(2):
        own.log.write_deferred()
    assert [each.step for each in read_recorded_steps(tmp_path)] == [40, 41]


def test_what_cannot_be_written_does_not_stop_training(tmp_path: Path) -> None:
    folder = tmp_path / "no" / "folder"
    steps = recorder(folder)
    for step in (40, 41):
        steps.record(step, STATS, generation=2, start_s=100.0, start_unix_s=1_750_000_000.0)
    assert not folder.exists()
    folder.mkdir(parents=True)
    written = threading.Event()
    while [step.step for step in read_recorded_steps(folder)] != [40, 41]:
        written.wait(0.01)


def test_of_what_cannot_be_written_a_few_megabytes_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelines, "_LONGEST_BYTES", 1000)
    folder = tmp_path / "no" / "folder"
    steps = recorder(folder)
    for step in range(40, 60):
        steps.record(step, STATS, generation=2, start_s=100.0, start_unix_s=1_750_000_000.0)
    folder.mkdir(parents=True)
    written = threading.Event()
    while not (found := read_recorded_steps(folder)):
        written.wait(0.01)
    while steps.log._files.num_waiting:
        written.wait(0.01)
    found = read_recorded_steps(folder)
    assert 0 < len(found) < 10
    assert [step.step for step in found] == list(range(40, 40 + len(found)))


def test_the_halves_of_a_split_backward_count_as_one() -> None:
    assert STATS.operation_times() == OperationTimes(forward_s=0.5, backward_s=0.75, longest_s=0.75)
    fused = StepStats(spans=[(OperationKind.BACKWARD, 1.0, 3.0)])
    assert fused.operation_times() == OperationTimes(forward_s=0.0, backward_s=2.0, longest_s=2.0)
