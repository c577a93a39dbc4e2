"""Ranks that hold slices of the optimizer's state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor, nn

from chameleon_ft.config import RunConfig
from chameleon_ft.job.computation import Precision
from chameleon_ft.job.job import Job
from chameleon_ft.optim import adamw
from chameleon_ft.plan import LayerRange, Placement
from chameleon_ft.plan.shards import Sharding, shard_optimizer
from chameleon_ft.sync import Segment
from chameleon_ft.worker.execution import gather
from chameleon_ft.worker.execution.gradients import GradientBuffers
from chameleon_ft.worker.execution.layers import HeldLayers
from chameleon_ft.worker.mover import Mover
from tests.worker.switchboard import Line, Switchboard
from tests.worker.toy import SEED, toy_job

CPU = torch.device("cpu")
LAYERS = 5
WHOLE = LayerRange(0, LAYERS)


class Block(nn.Module):
    """Parameters of many sizes, some of them frozen, in two element types."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, 100)
        self.scale = nn.Parameter(torch.randn(()))
        self.fine = nn.Parameter(torch.randn(130, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.ends = nn.ModuleDict({"down/left[0:4]": nn.Linear(100, 24)})  # a name with all that is in keys


def block_job() -> Job:
    """A job with AdamW, which decays matrices and no vectors."""
    return replace(toy_job(LAYERS), layers=[Block] * LAYERS, optimizer=lambda own: adamw(own, lr=0.1))


def sharding(workers: int, redundancy: int, before: Sharding | None = None) -> Sharding:
    placement = Placement(LAYERS, dict.fromkeys(range(workers), (WHOLE,)))
    return shard_optimizer(placement, dict.fromkeys(range(workers), "a host"), redundancy, before)


def held_layers(job: Job, owned: Sharding | None = None, worker: int = 0) -> HeldLayers:
    own = None if owned is None else owned.owned_by(worker)
    return HeldLayers(job, range(LAYERS), seed=SEED, device=CPU, owned=own)


def set_gradients(held: HeldLayers, step: int) -> None:
    random = torch.Generator().manual_seed(step)
    for parameter in held.parameters(WHOLE):
        assert parameter.grad is not None
        parameter.grad.copy_(torch.randn(parameter.shape, generator=random))


def weights(held: HeldLayers) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in held.parameters(WHOLE)]


def exchange(held: Sequence[HeldLayers], owned: Sharding) -> None:
    """Have workers exchange updated parameters, each in a thread."""
    board = Switchboard()
    shards = dict(enumerate(owned.layers))
    movers = [Mover(Line(worker, board)) for worker in range(len(held))]
    parts = [gather.ParameterExchange.of(worker, each, shards, movers[worker]) for worker, each in enumerate(held)]
    with ThreadPoolExecutor(len(parts)) as threads:
        for done in [threads.submit(part.run) for part in parts]:
            done.result(timeout=30)


def trained(
    job: Job, owned: Sharding, workers: int, steps: range, held: list[HeldLayers] | None = None
) -> list[HeldLayers]:
    held = held or [held_layers(job, owned, worker) for worker in range(workers)]
    for each in held:
        GradientBuffers(each, [Segment(WHOLE, tuple(range(workers)))])
    for step in steps:
        for each in held:
            set_gradients(each, step)
            each.update(step)
        exchange(held, owned)
    return held


def plain(job: Job, steps: int) -> HeldLayers:
    held = held_layers(job)
    GradientBuffers(held, [Segment(WHOLE, (0,))])
    for step in range(steps):
        set_gradients(held, step)
        held.update(step)
    return held


def in_bf16(job: Job) -> Job:
    return replace(job, precision=Precision("bf16", RunConfig().fp32_modules))


JOBS: dict[str, Callable[[], Job]] = {
    "block": block_job,
    "toy": lambda: toy_job(LAYERS),
    "tied": lambda: toy_job(LAYERS, tied=True),
    "block in bf16": lambda: in_bf16(block_job()),
    "tied in bf16": lambda: in_bf16(toy_job(LAYERS, tied=True)),
}
