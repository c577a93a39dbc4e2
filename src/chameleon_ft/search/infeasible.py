"""Why there is no plan: which limit binds, by how much, and with how many workers there would be one."""

from __future__ import annotations

from chameleon_ft.cluster import Cluster, Worker
from chameleon_ft.errors import PlanError
from chameleon_ft.quantities import data_size
from chameleon_ft.schedule import CostModel, InFlightLimit
from chameleon_ft.search._bounds import Pipelines
from chameleon_ft.search._kinds import Crew
from chameleon_ft.search._memory import StageMemory
from chameleon_ft.search._mixes import holds

__all__ = ["InfeasibleError"]


class InfeasibleError(PlanError):
    """No pipelines of the live workers fit their memory.

    Attributes:
        layer: number of a layer that is too large for every worker; None where each layer alone fits.
        missing_bytes: bytes that every worker would need more, at the least.
        workers_needed: how many workers like the largest would do; None where no number does.
    """

    layer: int | None
    missing_bytes: int
    workers_needed: int | None

    def __init__(self, message: str, *, layer: int | None, missing_bytes: int, workers_needed: int | None) -> None:
        super().__init__(message)
        self.layer = layer
        self.missing_bytes = missing_bytes
        self.workers_needed = workers_needed

    def __reduce__(self) -> tuple[object, ...]:
        return _restored, (str(self), self.layer, self.missing_bytes, self.workers_needed)


def _restored(message: str, layer: int | None, missing_bytes: int, workers_needed: int | None) -> InfeasibleError:
    return InfeasibleError(message, layer=layer, missing_bytes=missing_bytes, workers_needed=workers_needed)


def why_infeasible(costs: CostModel) -> InfeasibleError:
    """The error for a workload that the cluster's workers cannot hold; there must be workers, with known memory."""
    cluster, layers = costs.cluster, costs.workload.layers
    capacity = max(worker.memory_bytes or 0 for worker in cluster.workers)
    memory = StageMemory(costs.workload, split_backward=False)
    alone = [memory.stage_bytes(index, index + 1, InFlightLimit(1, 1), 1) for index in range(len(layers))]
    largest = max(range(len(layers)), key=alone.__getitem__)
    missing = _missing_bytes(costs, capacity)
    if alone[largest] > capacity:
        return InfeasibleError(
            f"layer {largest} ({layers[largest].name!r}) needs {data_size(alone[largest])} for one micro-batch, "
            f"but the largest worker has {data_size(capacity)}: {data_size(alone[largest] - capacity)} "
            "short; use smaller micro-batches, tensor parallelism, or workers with more memory",
            layer=largest,
            missing_bytes=missing,
            workers_needed=None,
        )
    needed = _workers_needed(costs, capacity)
    count = len(cluster.workers)
    remedy = (
        f"{needed} workers with {data_size(capacity)} each would do"
        if needed is not None
        else "no number of such workers would do, even if they recompute; use smaller micro-batches"
    )
    return InfeasibleError(
        f"the model does not fit the memory of {count} worker{'s' if count > 1 else ''}: each needs "
        f"{data_size(missing)} more; {remedy}",
        layer=None,
        missing_bytes=missing,
        workers_needed=needed,
    )


def _missing_bytes(costs: CostModel, capacity: int) -> int:
    """What every worker would need more, to the nearest 2^-20 of the capacity above."""
    low, high = 0, capacity
    while not _feasible(costs, _with_more_memory(costs.cluster, high)):
        low, high = high, 2 * high
    while high - low > max(1, capacity >> 20):
        middle = (low + high) // 2
        if _feasible(costs, _with_more_memory(costs.cluster, middle)):
            high = middle
        else:
            low = middle
    return high


def _workers_needed(costs: CostModel, capacity: int) -> int | None:
    """The fewest workers of the largest memory that hold a mix of pipelines; more never hold less."""
    have = len(costs.cluster.workers)
    # Each pipeline as deep as can be, with one micro-batch to each, is as little as a worker can be asked to hold.
    most = max(have, len(costs.workload.layers) * costs.workload.micro_batches)
    if not _feasible(costs, _of_equals(costs.cluster, most, capacity)):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        if _feasible(costs, _of_equals(costs.cluster, middle, capacity)):
            high = middle
        else:
            low = middle
    return high


def _feasible(costs: CostModel, cluster: Cluster) -> bool:
    # Split backward with as few kept as possible needs no less than fused backward.
    crew = Crew.of(cluster)
    return any(
        holds(
            Pipelines(CostModel(workload, cluster), crew.kinds, split_backward=False),
            crew.counts,
            workload.micro_batches,
        )
        for workload in (costs.workload.recomputed(), costs.workload)
    )


def _with_more_memory(cluster: Cluster, num_bytes: int) -> Cluster:
    workers = (
        Worker(w.id, w.host, w.speed, None if w.memory_bytes is None else w.memory_bytes + num_bytes)
        for w in cluster.workers
    )
    return Cluster(tuple(workers), cluster.intra_host, cluster.inter_host)


def _of_equals(cluster: Cluster, count: int, capacity: int) -> Cluster:
    workers = tuple(Worker(number, "host", memory_bytes=capacity) for number in range(count))
    return Cluster(workers, cluster.intra_host, cluster.inter_host)
