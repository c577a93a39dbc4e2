"""Memory of one worker of a plan while it trains: a complete rank without peers."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from chameleon_ft.config import Batch
from chameleon_ft.job.job import Job
from chameleon_ft.plan import Placement
from chameleon_ft.plan.shards import Sharding
from chameleon_ft.schedule import Operation
from chameleon_ft.storage.files import FaultLog
from chameleon_ft.sync import ADDS_TO_GRADIENTS, gradient_segments
from chameleon_ft.trees import Boundary
from chameleon_ft.worker.communicators.base import Membership
from chameleon_ft.worker.context import RankContext
from chameleon_ft.worker.control_client import Activity
from chameleon_ft.worker.device import is_host_memory
from chameleon_ft.worker.execution.commit import CommitContext, Committer, ComputedStep
from chameleon_ft.worker.execution.executor import Executor
from chameleon_ft.worker.execution.gradients import GradientBuffers
from chameleon_ft.worker.execution.layers import HeldLayers
from chameleon_ft.worker.execution.micro_batches import KEPT_MICRO_BATCHES, DatasetReads, MicroBatches
from chameleon_ft.worker.execution.reductions import Reductions
from chameleon_ft.worker.fault_injection import FaultInjector
from chameleon_ft.worker.mover import Mover

_STEPS = 2  # the state of the optimizer exists from the first on
_SEED = 0
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Arrived:
    """A message that is complete; like the runtime's own, it holds its tensor."""

    tensor: Tensor

    def wait(self) -> None:
        """Return at once."""


class _NoPeers:
    """Communicators without other ends: received messages are made up, sent ones are dropped."""

    def __init__(self, members: int) -> None:
        self._members = members

    def open(self, membership: Membership) -> None: ...

    def settle(self) -> None: ...

    def send(self, tensor: Tensor, *, peer: int, tag: int, stands_for_bytes: int | None = None) -> _Arrived:
        return _Arrived(tensor)

    def receive(self, tensor: Tensor, *, peer: int, tag: int) -> _Arrived:
        return _Arrived(tensor.normal_(std=0.1) if tensor.is_floating_point() else tensor.zero_())

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...]) -> _Arrived:
        return _Arrived(tensor.add_(1.0))  # other holders have given each parameter a gradient

    def vote(self, ballot: Tensor, group: tuple[int, ...]) -> _Arrived:
        # Gradients, loss, terms, samples; no vote to finish, switch or keep the state; this worker's contributions; all
        # voters.
        ballot[:4], ballot[4:-2], ballot[-1] = 1.0, 0.0, self._members
        return _Arrived(ballot)

    def unreached(self) -> dict[int, float]:
        return {}

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """A worker that trains without its peers."""

    job: Job
    batch: Batch
    boundaries: tuple[Boundary, ...]
    placement: Placement
    worker: int
    operations: tuple[Operation, ...]
    sharding: Sharding | None = None
    device: torch.device = _CPU

    @property
    def _owned(self) -> dict[int, tuple[tuple[int, int], ...]] | None:
        return None if self.sharding is None else self.sharding.owned_by(self.worker)

    def train(self) -> HeldLayers:
        """Build the layers and train some steps, with what a long run comes to hold.

        That is the optimizer's state of all parameters, also of experts that get no token here, and as many samples
        prefetched.
        """
        held = HeldLayers(
            self.job,
            self.placement.layers_of(self.worker),
            seed=_SEED,
            device=self.device,
            owned=self._owned,
        )
        members = self.placement.workers
        rank = RankContext(
            worker=self.worker,
            job=self.job,
            boundaries=self.boundaries,
            device=self.device,
            activity=Activity(),
            faults=FaultInjector(self.worker, (), log=_NoLog(), disconnect=lambda: None),
        )
        # The vote has those of this worker only.
        contributions = sum(len(o.layers) for o in self.operations if o.kind in ADDS_TO_GRADIENTS)
        committer = Committer(
            rank=rank,
            held=held,
            buffers=GradientBuffers(held, gradient_segments(self.placement)),
            contributions=lambda step: contributions,
            committed=0,
        )
        micro_batches = MicroBatches(DatasetReads(self.job, self.batch, seed=_SEED), self.device, self.job)
        communicators = _NoPeers(len(members))
        executor = Executor(
            rank=rank,
            held=held,
            micro_batches=micro_batches,
            communicators=communicators,
        )
        self._load_earlier(micro_batches)
        held.update(0)  # of all parameters, each with a gradient of zeros
        context = CommitContext(communicators=communicators, members=members)
        with Reductions(committer.buffers, self.operations, Mover(communicators)) as reductions:
            for _ in range(_STEPS):
                stats = executor.run(committer.begin(), self.operations, after=reductions.after)
                computed = ComputedStep(stats=stats, reductions=reductions, contributions=contributions)
                committer.commit(computed, context)
        return held

    def _load_earlier(self, micro_batches: MicroBatches) -> None:
        """Request the samples that earlier steps have prefetched."""
        if any(operation.first or operation.last for operation in self.operations):
            for number in range(KEPT_MICRO_BATCHES):
                micro_batches(_STEPS + number // self.batch.micro_batches, number % self.batch.micro_batches)

    def likeness(self) -> object:
        """Return a key that is equal for workers with equal work on the same layers, whatever their micro-batches."""
        numbers: dict[tuple[int, int], int] = {}
        owned = self._owned and tuple(self._owned.items())
        return (
            self.placement.ranges_of(self.worker),
            owned,
            tuple(
                (
                    operation.kind,
                    operation.layers,
                    operation.receive_from is None,
                    operation.send_to is None,
                    operation.first,
                    operation.last,
                    numbers.setdefault((operation.micro_batch, operation.hop), len(numbers)),
                )
                for operation in self.operations
            ),
        )


class _NoLog(FaultLog):
    def __init__(self) -> None: ...


def peak_of_allocator(alone: Alone) -> int:
    """Return the peak of bytes that torch's allocator has given out, from each of its allocations and frees.

    This is the most independent count: it does not depend on tensors, graphs or this project, includes buffers inside
    kernels, and counts a block until it is freed. On an accelerator it is the allocator's own figure.
    """
    if not is_host_memory(alone.device):
        return _peak_on(alone)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    gc.collect()
    with torch.autograd.profiler.profile(use_cpu=True, profile_memory=True, use_kineto=False) as profiler:
        alone.train()
    results: Any = profiler.kineto_results
    return _largest_sum(
        event.nbytes()
        for event in sorted(results.events(), key=lambda event: event.start_ns())
        if event.name() == "[memory]"
    )


def _peak_on(alone: Alone) -> int:
    gc.collect()
    torch.accelerator.synchronize(alone.device)
    torch.accelerator.reset_peak_memory_stats(alone.device)
    before = torch.accelerator.memory_allocated(alone.device)
    alone.train()
    torch.accelerator.synchronize(alone.device)
    return torch.accelerator.max_memory_allocated(alone.device) - before


def peak_of_storages(alone: Alone) -> int:
    """Return the peak of bytes of live storages, by weak references to the outputs of every operation.

    It does not see the buffers of kernels, and is there to check the other count.
    """
    storages = _Storages()
    with storages:
        alone.train()
    return storages.peak


class _Storages(TorchDispatchMode):
    """Counts every storage from the operation that creates it until it is freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._alive = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._see, made)
        return made

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if tensor.is_meta:  # it has no memory
            return
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self._alive += storage.nbytes()
            self.peak = max(self.peak, self._alive)
            weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())

    def _gone(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self._alive -= num_bytes


def _largest_sum(changes: Iterable[int]) -> int:
    total = largest = 0
    for change in changes:
        total += change
        largest = max(largest, total)
    return largest
