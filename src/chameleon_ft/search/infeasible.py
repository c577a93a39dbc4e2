"""Whether workers can hold the model; and if not, which limit binds, by how much, and how many workers would do."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from chameleon_ft.errors import PlanError
from chameleon_ft.quantities import counted, data_size
from chameleon_ft.schedule import CostModel
from chameleon_ft.schedule.records import Booleans
from chameleon_ft.search.bounds import CutPoints
from chameleon_ft.search.stages import Stages
from chameleon_ft.search.worker_classes import Shape, WorkerClass, WorkerPool

# Workers of each class that are used, and at which layers as many stages can stop; bool [L + 1].
_Reached = dict[tuple[int, ...], Booleans]


class InfeasibleError(PlanError):
    """No pipelines of the live workers fit their memory.

    Attributes:
        layer: number of a layer that is too large for every worker; None where each layer alone fits.
        missing_bytes: bytes that every worker would need more, for one pipeline of all micro-batches to fit.
        workers_needed: how many workers like the largest would do; None where no number does.
    """

    def __init__(
        self, message: str, *, layer: int | None = None, missing_bytes: int = 0, workers_needed: int | None = None
    ) -> None:
        super().__init__(message)
        self.layer = layer
        self.missing_bytes = missing_bytes
        self.workers_needed = workers_needed


def infeasible_error(costs: CostModel) -> InfeasibleError:
    """Return the error for a workload that the cluster's workers cannot hold; some worker's memory must be known."""
    cluster, layers = costs.cluster, costs.workload.layers
    capacity = max(worker.memory_bytes or 0 for worker in cluster.workers)
    # Bytes of each stage, by first layer and the one after the last, with a capacity that none exceeds.
    needed_bytes = np.minimum(
        *(Stages(costs, [WorkerClass(1.0, 2**60)], split_backward=split).min_bytes(0) for split in (False, True))
    )
    missing = _missing_bytes(costs, capacity, most=int(needed_bytes[0, -1]))
    for number, layer in enumerate(layers):
        alone = int(needed_bytes[number, number + 1])
        if alone > capacity:
            return InfeasibleError(
                f"layer {number} ({layer.name!r}) needs {data_size(alone)} for one micro-batch, "
                f"but the largest worker has {data_size(capacity)}: {data_size(alone - capacity)} "
                "short; use smaller micro-batches, tensor parallelism, or workers with more memory",
                layer=number,
                missing_bytes=missing,
            )
    largest = [WorkerClass(1.0, capacity)]
    pipelines = (
        fitting_pipeline(Stages(costs, largest, split_backward=split), [len(layers)]) for split in (False, True)
    )
    needed = next((len(shape) for shape, _ in filter(None, pipelines)), None)
    remedy = (
        f"{needed} workers with {data_size(capacity)} each would do"
        if needed is not None
        else "no number of such workers would do, even if they recompute; use smaller micro-batches"
    )
    return InfeasibleError(
        f"the model does not fit the memory of {counted(len(cluster.workers), 'worker')}: each needs "
        f"{data_size(missing)} more; {remedy}",
        missing_bytes=missing,
        workers_needed=needed,
    )


def _missing_bytes(costs: CostModel, capacity: int, *, most: int) -> int:
    """Return the bytes that every worker would need more for one pipeline, rounded up to 2^-20 of the capacity.

    `most` are the bytes of the whole model on one worker.
    """
    pool = WorkerPool.of(costs.cluster)
    step = max(1, capacity >> 20)

    def fit(steps: int) -> bool:
        classes = [replace(own, memory_bytes=(own.memory_bytes or 0) + steps * step) for own in pool.classes]
        return any(
            fitting_pipeline(Stages(costs, classes, split_backward=split), pool.counts) is not None
            for split in (False, True)
        )

    return step * bisect_left(range(most // step + 1), True, key=fit)


def fitting_pipeline(stages: Stages, counts: Sequence[int]) -> tuple[Shape, CutPoints] | None:
    """Return a pipeline of the fewest workers that holds the model, one micro-batch at a time; None if there is none.

    A worker that fits a stage fits it in every pipeline, and with any number of micro-batches. So dynamic programming
    over the workers of each class that are used finds the layers up to which these hold the model. `counts` are the
    workers of each class.
    """
    fits, num_layers = stages.fits, stages.num_layers
    reached: _Reached = {(0,) * len(counts): np.arange(num_layers + 1) == 0}
    newest = reached
    for _ in range(num_layers):
        following: _Reached = {}
        for used, holds_up_to in newest.items():
            for kind, count in enumerate(counts):
                if used[kind] < count:
                    more = _with(used, kind, 1)
                    following[more] = following.get(more, False) | (holds_up_to @ fits[kind])
        reached |= following
        for used, holds_up_to in following.items():
            if holds_up_to[-1]:
                return _traced(used, reached, fits)
        newest = following
    return None


def _traced(
    used: tuple[int, ...], reached: Mapping[tuple[int, ...], Booleans], fits: Booleans
) -> tuple[Shape, CutPoints]:
    """Return the pipeline of these workers, back from its last stage."""
    shape: list[int] = []
    cut_points = [fits.shape[-1] - 1]
    while any(used):
        for kind in range(len(used)):
            before = _with(used, kind, -1)
            if before in reached and (starts := reached[before] & fits[kind, :, cut_points[-1]]).any():
                shape.append(kind)
                cut_points.append(int(starts.argmax()))
                used = before
                break
    return tuple(reversed(shape)), tuple(reversed(cut_points[:-1]))


def _with(used: tuple[int, ...], kind: int, more: int) -> tuple[int, ...]:
    return (*used[:kind], used[kind] + more, *used[kind + 1 :])
