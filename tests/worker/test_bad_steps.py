"""Steps with a loss or gradient that is not finite, or a spike: they are computed again, and left out if bad again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.config import Batch, Checkpoint, Health, Parallel, Recovery, RunConfig, Snapshots
from chameleon_ft.data import SampleOrder
from chameleon_ft.plan import LayerRange
from chameleon_ft.plan.vote import Vote
from chameleon_ft.storage.checkpoints import complete_checkpoints
from chameleon_ft.verify.verification import Verification, repeat_run
from chameleon_ft.worker.execution.bad_steps import BadStepError, RecentSteps, Repetition
from tests.harness import (
    PATIENT,
    TOLERANCE,
    Ended,
    assert_as_the_plain_loop,
    fails,
    resume_here,
    small_config,
    train_here,
)

BATCH = Batch(micro_batches=4, micro_batch_size=2)
SAMPLES = 800
JOB = """
import functools
import time
from pathlib import Path
import torch
from torch import nn
from chameleon_ft import Job
from chameleon_ft.storage.checkpoints import complete_checkpoints

def wait_for_checkpoint(run):
    # Samples are also read before the first step.
    while (Path(run) / "metrics.jsonl").exists() and not complete_checkpoints(Path(run) / "checkpoints"):
        time.sleep(0.01)

class Data:
    def __len__(self):
        return {samples}
    def __getitem__(self, index):
        if index in {late}:
            wait_for_checkpoint({run!r})
        x = torch.sin(torch.arange(6.0) * (index + 1))
        return x.fill_({value}) if index in {bad} else x, x.sum()

def job():
    return Job(
        layers=[functools.partial(nn.Linear, 6, 6), nn.Tanh, functools.partial(nn.Linear, 6, 1)],
        loss=lambda output, targets: ((output.squeeze(1) - targets) ** 2).sum(),
        dataset=Data(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )
"""


def sample_of(step: int, micro_batch: int, *, seed: int = 0) -> int:
    """Return a sample of a micro-batch."""
    return SampleOrder(SAMPLES, seed).ids(step, BATCH.samples)[micro_batch * BATCH.micro_batch_size]


def config_with(
    tmp_path: Path, *, bad: list[int], value: str = "float('nan')", after_checkpoint: bool = False, **changes: Any
) -> RunConfig:
    """A run whose data have bad samples, which come only once there is a complete checkpoint if `after_checkpoint`."""
    path, late = tmp_path / "job.py", bad if after_checkpoint else []
    path.write_text(JOB.format(samples=SAMPLES, bad=bad, value=value, late=late, run=str(tmp_path / "run")))
    fields: dict[str, Any] = {
        "job": str(path),
        "workers": 4,
        "parallel": Parallel(dp=2, pp=2, optimizer_redundancy="all"),
        "batch": BATCH,
        "steps": 12,
        "checkpoint": Checkpoint(every=0),
        "snapshots": Snapshots(every=0),
        "timeouts": PATIENT,
        "recovery": Recovery(policy="reroute"),
    }
    return RunConfig(**{**fields, **changes})


def only_bad_step(ended: Ended) -> dict[str, Any]:
    (event,) = ended.events("bad_step")
    return event


@pytest.mark.each_kind
@pytest.mark.multiprocess
def test_a_fault_of_the_hardware_is_told_from_the_data_and_its_worker_named(tmp_path: Path) -> None:
    config = small_config(tmp_path, failures=(fails(3, step=4, phase="backward", kind="nan"),))
    ended = train_here(config, tmp_path / "run")
    assert ended.code == 0, ended.summary["reason"]
    event = only_bad_step(ended)
    assert (event["step"], event["is_bad_again"], event["action"], event["changed"]) == (4, False, "applied", [3])
    assert "the contribution of worker 3 differed" in event["message"]
    assert ended.summary["samples_skipped"] == 0
    assert_as_the_plain_loop(ended)


@pytest.mark.multiprocess
def test_the_samples_of_a_bad_step_are_left_out_and_the_place_is_named(tmp_path: Path) -> None:
    config = config_with(tmp_path, bad=[sample_of(5, 2)], checkpoint=Checkpoint(every=5))
    ended = train_here(config, tmp_path / "run")
    assert ended.code == 0, ended.summary["reason"]
    event = only_bad_step(ended)
    assert (event["step"], event["is_bad_again"], event["action"], event["changed"]) == (5, True, "skip", [])
    first = event["origins"][0]
    assert (first["micro_batch"], first["where"]) == (2, "data")
    assert first["worker"] in (0, 2)
    assert ended.steps == list(range(12))
    assert [row.step for row in ended.run.steps() if row.is_skipped] == [5]
    summary = ended.summary
    assert (summary["samples_skipped"], summary["samples_lost"], summary["samples_repeated"]) == (8, 0, 0)
    assert summary["samples_seen"] == 11 * 8
    verification = Verification.of(repeat_run(ended.run), tolerance=TOLERANCE)
    assert (verification.steps, verification.first_step_outside) == (11, None)


@pytest.mark.multiprocess
def test_all_return_to_a_checkpoint_and_leave_the_samples_out_then(tmp_path: Path) -> None:
    config = config_with(
        tmp_path,
        bad=[sample_of(5, 2)],
        after_checkpoint=True,
        checkpoint=Checkpoint(every=2),
        health=Health(detect_slow=False, on_bad_step="rollback"),
    )
    ended = train_here(config, tmp_path / "run")
    assert ended.code == 0, ended.summary["reason"]
    assert only_bad_step(ended)["action"] == "rollback"
    first = ended.steps[5]
    assert 2 <= first <= 4
    assert ended.steps == [*range(5), *range(first, 12)]
    assert [row.step for row in ended.run.steps() if row.is_skipped] == [5]
    assert ended.summary["samples_skipped"] == 8
    assert Verification.of(repeat_run(ended.run), tolerance=TOLERANCE).first_step_outside is None


@pytest.mark.multiprocess
def test_the_run_ends_with_the_state_before_a_bad_step(tmp_path: Path) -> None:
    config = config_with(tmp_path, bad=[sample_of(5, 1)], health=Health(detect_slow=False, on_bad_step="stop"))
    ended = train_here(config, tmp_path / "run")
    assert ended.code == 1
    reason = ended.summary["reason"]
    assert reason.startswith(
        "the loss is nan in step 5, also when it was computed again, first in the data of micro-ba"
    )
    assert "resume with --health.on-bad-step skip" in reason
    assert complete_checkpoints(ended.run.checkpoints) == [5]
    resumed = resume_here(ended, health=Health(detect_slow=False, on_bad_step="skip"))
    assert resumed.code == 0
    assert [row.step for row in resumed.run.steps() if row.is_skipped] == [5]
    assert Verification.of(repeat_run(ended.run), tolerance=TOLERANCE).first_step_outside is None


@pytest.mark.multiprocess
def test_a_spike_is_a_bad_step(tmp_path: Path) -> None:
    config = config_with(
        tmp_path, bad=[sample_of(30, 3)], value="80.0", steps=36, health=Health(detect_slow=False, spike_factor=50.0)
    )
    ended = train_here(config, tmp_path / "run")
    assert ended.code == 0, ended.summary["reason"]
    event = only_bad_step(ended)
    assert event["step"] == 30
    assert "is a spike, above" in event["why"]
    assert Verification.of(repeat_run(ended.run), tolerance=TOLERANCE).first_step_outside is None


# --- bounds and places -----------------------------------------------------------------------------------------------


def recent(factor: float, values: list[float]) -> RecentSteps:
    found = RecentSteps(factor)
    for value in values:
        found.add(value, value)
    return found


@given(st.lists(st.floats(0.1, 10.0), min_size=16, max_size=80), st.integers(1, 5), st.integers(0, 3))
def test_all_workers_have_one_bound_whatever_they_remember(values: list[float], know: int, know_not: int) -> None:
    known, new = recent(8.0, values), recent(8.0, values[:3])
    ballots = [known.ballot()] * know + [new.ballot()] * know_not
    sums = [sum(column) for column in zip(*ballots, strict=True)]
    assert {each.why_bad(1e9, 1.0, sums) is not None for each in (known, new)} == {True}
    assert known.why_bad(min(values), min(values), sums) is None


def test_without_a_factor_or_enough_steps_only_what_is_not_finite_is_bad() -> None:
    off = recent(0.0, [1.0] * 64)
    assert off.ballot() == []
    assert off.why_bad(1e9, 1e9, []) is None
    few = recent(5.0, [1.0] * 8)
    assert few.why_bad(1e9, 1e9, few.ballot()) is None
    assert few.why_bad(math.inf, 1.0, few.ballot()) == "the loss is inf"
    assert off.why_bad(1.0, math.nan, []) == "the gradient norm is nan"


VOTE = Vote(grad_square_sum=math.nan, loss_sum=1.0, terms=1, samples=1, finish=False)


@pytest.mark.parametrize(
    ("before", "later", "has_changed"),
    [
        ({"loss": 1.0, "a": math.nan}, {"loss": 1.0, "a": math.nan}, False),
        ({"loss": 1.0, "a": math.nan}, {"loss": 1.0, "a": 2.0}, True),
        ({"loss": 1.0, "a": 2.0}, {"loss": 1.0, "a": 2.0}, False),
        ({"loss": math.inf}, {"loss": 1.0}, True),
        ({"loss": 1.0, "a": 2.0}, {"loss": 1.0, "a": 2.0000002}, False),
        ({"loss": 1.0, "a": math.nan, "b": 2.0}, {"loss": 1.0, "a": math.nan, "b": 2.0000002}, False),
        ({"loss": 1.0}, {"loss": 1.0, "a": 2.0}, True),
    ],
)
def test_contributions_are_compared(before: dict[str, float], later: dict[str, float], has_changed: bool) -> None:
    assert BadStepError(VOTE, "why", before).changed(later) is has_changed


def test_in_a_spike_the_last_bit_of_a_contribution_counts() -> None:
    spike = BadStepError(replace(VOTE, grad_square_sum=9.0), "why", {"loss": 1.0, "a": 2.0})
    assert spike.changed({"loss": 1.0, "a": 2.0000002})
    assert not spike.changed({"loss": 1.0, "a": 2.0})


def origins(look: Callable[[Repetition], None]) -> list[tuple[int, int, int, str]]:
    repetition = Repetition()
    look(repetition)
    return repetition.found


def test_only_the_first_operation_with_values_that_are_not_finite_is_named() -> None:
    good, bad, layers = [torch.ones(2)], [torch.tensor([1.0, math.nan])], LayerRange(2, 4)
    assert not origins(lambda each: each.forward(0, layers, data=[], received=bad, result=bad))
    assert origins(lambda each: each.forward(0, layers, data=[], received=good, result=bad)) == [(0, 2, 4, "forward")]
    assert origins(lambda each: each.forward(1, layers, data=bad, received=[], result=bad)) == [(1, 2, 4, "data")]

    def after_a_bad_forward(each: Repetition) -> None:
        each.forward(0, layers, data=[], received=bad, result=bad)
        each.backward(0, layers, received=[], result=bad, gradients={2: bad})

    def two_backwards(each: Repetition) -> None:
        each.backward(0, layers, received=good, result=good, gradients={2: good, 3: bad})
        each.backward(1, layers, received=good, result=good, gradients={2: good, 3: bad})

    assert not origins(after_a_bad_forward)
    assert origins(two_backwards) == [(0, 2, 4, "backward")]
