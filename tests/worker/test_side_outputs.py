"""Auxiliary losses, metrics and sums of layers count once in each step, however it is computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from chameleon_ft import auxiliary_loss, log
from chameleon_ft.errors import ConfigError
from chameleon_ft.job.job import Job
from chameleon_ft.models.checks import boundary_specs
from chameleon_ft.plan import LayerRange
from chameleon_ft.side_outputs import collecting, summed_buffers
from chameleon_ft.verify.plain_loop import PlainLoop
from chameleon_ft.worker.execution.layers import HeldLayers
from tests.golden import message, refused
from tests.harness import assert_trained_as_if_nothing_failed, fails, train_job
from tests.models.jobs import Zeros, make_job
from tests.worker.interrupted import BATCH, LAYERS, Cluster, plan_of_pairs
from tests.worker.toy import SEED, Penalised, Routed, examined, toy_job, train_plainly


def job() -> Job:
    """The job that the run of this file names."""
    return toy_job(LAYERS, kinds=(Routed, Penalised, Routed))


JOB = examined(job(), BATCH.micro_batch_size)


def test_they_are_found_before_a_run() -> None:
    routed = ("auxiliary_loss", "positive", "share")
    assert JOB.side_outputs == ((), routed, ("auxiliary_loss",), routed, ())


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recomputed"])
def test_they_count_once_however_a_step_is_computed(split: bool, recompute: bool) -> None:
    """One of the pipelines has a detour; then a worker is lost at some point of the step, and another in its rest."""
    plan = plan_of_pairs(split=split, recompute=recompute)
    cluster = Cluster(plan, tied=False, job=JOB)
    cluster.run()
    cluster.assert_is_the_whole_step()
    for worker in (1, 4):
        for count in range(0, len(cluster.program[worker]) + 1, 3):
            hit = Cluster(plan, tied=False, job=JOB)
            hit.run(stop=(worker, count))
            hit.lose(worker)
            rest = hit.rest()
            if worker == 4:
                hit.run(rest, stop=(0, 2))
                hit.lose(0)
                rest = hit.rest()
            hit.run(rest)
            hit.assert_is_the_whole_step()


class Odd(nn.Module):
    """Does something on some inputs alone, or as it is told."""

    load: Tensor
    count: Tensor

    def __init__(self, on_some: str = "", *, sums: Sequence[str] = (), after: str | None = "count") -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("load", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.on_some, self.step_sums, self.calls = on_some, sums, 0
        if after is not None:
            self.after_step = lambda sums: setattr(self, after, getattr(self, after) + 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.step_sums:
            self.load += x.detach().mean()
        if self.on_some and x.any():
            match self.on_some:
                case "count":
                    self.count += 1
                case "auxiliary_loss":
                    auxiliary_loss(x.mean())
                case "log":
                    log("mean", x.mean())
        output: Tensor = self.inner(x)
        return output


def odd_job(**arguments: Any) -> Job:
    return make_job([nn.Identity, partial(Odd, **arguments)], Zeros(4))


def forward_of(job: Job, x: Tensor) -> None:
    """Run layer 1 on two micro-batches, as a worker does."""
    held = HeldLayers(job, [1], seed=0, device=torch.device("cpu"))
    for number in range(2):
        with held.collecting([1]) as side:
            held.forward(LayerRange(1, 2), x, step=0, micro_batch=number)
        held.side_sums(1, side, lambda: 1.0)


@pytest.mark.parametrize("on_some", ["count", "auxiliary_loss"])
def test_what_the_first_micro_batch_did_not_show_is_refused_when_it_comes(on_some: str) -> None:
    job = examined(odd_job(on_some=on_some), 2)
    forward_of(job, torch.zeros(2, 4))
    with refused(ConfigError):
        forward_of(job, torch.ones(2, 4))


def test_a_metric_that_the_first_micro_batch_did_not_show_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    forward_of(examined(odd_job(on_some="log"), 2), torch.ones(2, 4))
    message(capsys.readouterr().err)


@pytest.mark.parametrize(
    "arguments",
    [
        {"sums": ("weight",)},
        {"sums": ("load",), "after": None},
        {"sums": ("load",), "after": "calls"},
    ],
    ids=["no buffer", "no use", "an attribute"],
)
def test_sums_that_cannot_be_are_refused(arguments: dict[str, Any]) -> None:
    boundary_specs(odd_job(sums=("load",)), 2)
    with refused(ConfigError):
        boundary_specs(odd_job(**arguments), 2)


def test_outside_of_a_run_they_do_nothing_and_inside_they_are_checked() -> None:
    auxiliary_loss(torch.ones(3))
    log("", 1)

    def add(x: Tensor) -> Tensor:
        auxiliary_loss(x.sum())
        return x

    calls: list[Callable[[], None]] = [
        lambda: auxiliary_loss(torch.ones(3)),
        lambda: auxiliary_loss(torch.ones((), dtype=torch.int64)),
        lambda: auxiliary_loss(1.0, terms=-1),
        lambda: auxiliary_loss(1.0, terms=math.nan),
        lambda: log("auxiliary_loss", 1.0),
        lambda: checkpoint(add, torch.ones(2, requires_grad=True), use_reentrant=True),
    ]
    for call in calls:
        with refused(ConfigError), collecting():
            call()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_layer_and_one_with_checkpoints_have_them() -> None:
    torch.manual_seed(0)
    layer, x = Routed(), torch.randn(2, 3, 6, requires_grad=True)
    found = []
    for run in (layer, torch.compile(layer, backend="aot_eager"), partial(checkpoint, layer, use_reentrant=False)):
        with collecting(summed_buffers(layer)) as side:
            output = run(x)
        (output.sum() + side.loss(3.0)).backward()
        gradients = [each.grad.clone() for each in (x, *layer.parameters()) if each.grad is not None]
        found.append([*gradients, *side.step_sums, side.sums(side.names, 3.0, x.device)])
        layer.zero_grad()
        x.grad = None
    for others in found[1:]:
        torch.testing.assert_close(others, found[0])


@pytest.mark.multiprocess
def test_a_run_records_them_as_the_plain_loop_does_through_a_failure(tmp_path: Path) -> None:
    failures = (fails(3, step=2, phase="backward"),)
    ended = train_job(f"{__file__}:job", tmp_path / "run", batch=BATCH, steps=6, failures=failures, seed=SEED)
    assert_trained_as_if_nothing_failed(ended)
    loop = PlainLoop(ended.run.config(), job())
    records = ended.run.steps()
    assert [each.loss for each in records] == pytest.approx(
        [each.loss for each in train_plainly(job(), BATCH, 6)], rel=1e-5
    )
    for record in records:
        plain = loop.run_step(record.step, job())
        assert record.auxiliary_loss == pytest.approx(plain.auxiliary_loss, rel=1e-5)
        assert plain.auxiliary_loss > 0.1
        assert record.metrics == pytest.approx(plain.metrics, rel=1e-5)
        assert record.metrics.keys() == {"share", "positive"}
