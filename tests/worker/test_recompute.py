"""A worker that recomputes does bit for bit what one does that keeps everything."""

from __future__ import annotations

import dataclasses
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from chameleon_ft.config import Batch, LlamaConfig
from chameleon_ft.job.job import Job
from chameleon_ft.models.llama import llama_layers, next_token_loss
from chameleon_ft.models.recomputation import recomputable
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, RecomputedLayers, Route, data_pipeline_plan
from chameleon_ft.schedule import best_program, check_program
from chameleon_ft.sync import gradient_segments
from chameleon_ft.worker.execution.executor import Executor
from chameleon_ft.worker.execution.gradients import GradientBuffers
from chameleon_ft.worker.execution.layers import HeldLayers
from chameleon_ft.worker.execution.micro_batches import DatasetReads, MicroBatches
from chameleon_ft.worker.execution.steps import StepState
from tests.harness import assert_trained_as_if_nothing_failed, fails, small_config, train_here
from tests.strategies import equal_costs
from tests.worker.toy import SEED, Constant, toy_job, toy_rank

CPU = torch.device("cpu")
MICRO_BATCHES = 4
LLAMA = LlamaConfig(
    vocab_size=16, dim=16, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=24, seq_len=8, dropout=0.2
)


class Sentences:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        ids = torch.arange(index, index + LLAMA.seq_len) % LLAMA.vocab_size
        return ids, ids.roll(1)


class InParts(nn.Module):
    """A layer whose recomputable parts draw random numbers, and use the outputs of other parts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        noisy = recomputable(partial(nn.functional.dropout, p=0.4), recomputable(torch.sigmoid, self.inner(x)))
        torch.rand(3)
        made: Tensor = self.outer(recomputable(torch.mul, noisy, recomputable(_with_noise, noisy)))
        return x + made


def _with_noise(x: Tensor) -> Tensor:
    return recomputable(torch.tanh, x) + torch.rand_like(x)


class Frozen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)
        self.requires_grad_(False)


def llama_job() -> Job:
    return Job(
        layers=llama_layers(LLAMA),
        loss=next_token_loss,
        dataset=Sentences(),
        optimizer=partial(torch.optim.AdamW, lr=0.05),
    )


def with_layers(job: Job, **layers: type[nn.Module]) -> Job:
    """The toy with other layers in place of some, named by their numbers."""
    factories = list(job.layers)
    for name, layer in layers.items():
        factories[int(name.removeprefix("at"))] = layer
    return dataclasses.replace(job, layers=factories)


JOBS = {
    "a Llama with dropout": llama_job(),
    "a mixture": toy_job(7),
    "recomputable parts of parts": with_layers(toy_job(7), at1=InParts, at2=InParts, at4=InParts, at5=InParts),
    "one layer": toy_job(1),
    "two layers": toy_job(2),
    "three layers": toy_job(3),
    "no way to the first layers": with_layers(toy_job(7), at3=Constant),
    "nothing is trained at first": with_layers(toy_job(7), at1=Frozen, at2=Frozen),
    "a layer that hands its input through": with_layers(toy_job(7), at2=nn.Identity, at4=nn.Identity),
}


def one_worker(job: Job, hops: int, *, split_backward: bool, recompute: RecomputedLayers | None) -> Plan:
    """One worker that holds all layers, with routes of `hops` hops."""
    layers = job.num_layers
    edges = sorted({layers * hop // hops for hop in range(hops + 1)})
    ways = tuple(Hop(0, LayerRange(start, stop)) for start, stop in pairwise(edges))
    return Plan(
        Placement(layers, {0: (LayerRange(0, layers),)}),
        tuple(Route(m, ways) for m in range(MICRO_BATCHES)),
        split_backward,
        {} if recompute is None else {0: recompute},
    )


def trained(job: Job, plan: Plan, steps: int = 2) -> list[Tensor]:
    """Train `steps` steps of a plan of one worker; losses, gradients and weights after each."""
    batch = Batch(micro_batches=MICRO_BATCHES, micro_batch_size=2)
    program = best_program(plan, equal_costs(layers=job.num_layers, micro_batches=MICRO_BATCHES, workers=1)).program
    check_program(program, plan)
    held = HeldLayers(job, range(job.num_layers), seed=SEED, device=CPU)
    buffers = GradientBuffers(held, gradient_segments(plan.placement))
    executor = Executor(
        rank=toy_rank(job, micro_batch_size=batch.micro_batch_size),
        held=held,
        micro_batches=MicroBatches(DatasetReads(job, batch, seed=SEED), CPU, job),
        communicators=None,  # type: ignore[arg-type]  # there are no peers
    )
    found: list[Tensor] = []
    for step in range(steps):
        buffers.zero()
        stats = executor.run(StepState(step), program.of(0), after=lambda count: None)
        parameters = held.parameters(LayerRange(0, job.num_layers))
        found += [torch.tensor(stats.loss, dtype=torch.float64), torch.tensor(stats.terms)]
        found += [p.grad.clone() for p in parameters if p.grad is not None]
        held.update(step)
        found += [p.detach().clone() for p in parameters]
    return found


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("hops", [1, 3])
@pytest.mark.parametrize("name", JOBS)
def test_the_loss_the_gradients_and_the_weights_are_the_same_bits(name: str, hops: int, split: bool) -> None:
    job = JOBS[name]
    expected = trained(job, one_worker(job, hops, split_backward=split, recompute=None))
    # All layers, and ranges that end or begin in the middle of a hop.
    edges = {(0, job.num_layers), (0, max(1, job.num_layers - 3)), (job.num_layers // 2, job.num_layers)}

    for start, stop in sorted(edges):
        for num_selective in sorted({0, (stop - start) // 2, stop - start}):
            recompute = RecomputedLayers(start, stop, num_selective)
            found = trained(job, one_worker(job, hops, split_backward=split, recompute=recompute))
            assert len(found) == len(expected)
            assert all(map(torch.equal, expected, found)), recompute


def runs_of_each_layer(job: Job, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts = [0] * job.num_layers
    forward = HeldLayers.forward

    def counted(self: HeldLayers, layers: LayerRange, boundary: Tensor, **others: Any) -> Any:
        for layer in layers:
            counts[layer] += 1
        return forward(self, layers, boundary, **others)

    with monkeypatch.context() as patched:
        patched.setattr(HeldLayers, "forward", counted)
        trained(job, plan, steps=1)
    return counts


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize(
    ("recompute", "twice"),
    [
        (None, ()),
        (RecomputedLayers(0, 5), (1, 2, 3)),
        (RecomputedLayers(0, 2), (1,)),
        (RecomputedLayers(1, 3), (1, 2)),
        (RecomputedLayers(3, 5), (3,)),
        (RecomputedLayers(4, 5), ()),
        (RecomputedLayers(0, 5, 2), (1, 2)),
        (RecomputedLayers(0, 4, 4), ()),
    ],
    ids=str,
)
def test_the_layers_that_are_recomputed_run_twice_but_for_the_ends(
    recompute: RecomputedLayers | None, twice: tuple[int, ...], split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JOBS["a Llama with dropout"]

    found = runs_of_each_layer(job, one_worker(job, 2, split_backward=split, recompute=recompute), monkeypatch)

    assert found == [MICRO_BATCHES * (1 + (layer in twice)) for layer in range(5)]


@pytest.mark.multiprocess
def test_a_run_by_a_plan_that_recomputes_goes_through_a_kill(tmp_path: Path) -> None:
    plan = data_pipeline_plan(layer_costs=[1.0] * 4, dp=3, pp=2, micro_batches=6)
    recompute = {
        worker: RecomputedLayers(*own) for worker, own in ((0, (0, 2)), (1, (2, 3)), (2, (1, 2)), (5, (2, 4, 2)))
    }
    plan = dataclasses.replace(plan, recompute=recompute)
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json())

    ended = train_here(small_config(tmp_path, plan=file, failures=(fails(2, step=4),)), tmp_path / "run")

    assert_trained_as_if_nothing_failed(ended)
    first, last = ended.plans()
    assert first["recompute"] == {"0": [0, 2], "1": [2, 3], "2": [1, 2], "5": [2, 4, 2]}
    assert last["recompute"] == {"0": [0, 2], "1": [2, 3], "5": [2, 4, 2]}
