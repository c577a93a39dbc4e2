"""Seconds of operations and messages, one by one and as the times of a pipeline's stages."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from chameleon_ft.cluster import Cluster
from chameleon_ft.errors import PlanError
from chameleon_ft.plan import Hop, LayerRange, RecomputedLayers
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.schedule.program import Operation, OperationKind
from chameleon_ft.workload import Workload, is_recomputed


@dataclass(frozen=True, slots=True)
class CostModel:
    """The cost model: a workload's layer times on a cluster's workers and links."""

    workload: Workload
    cluster: Cluster

    def operation_s(self, worker: int, operation: Operation) -> float:
        """Return the seconds of `operation` on `worker`: `compute_s` of its kind and layers."""
        return self.compute_s(worker, operation.kind, operation.layers, recompute=operation.recompute)

    def compute_s(
        self, worker: int, kind: OperationKind, layers: LayerRange, *, recompute: RecomputedLayers | None = None
    ) -> float:
        """Return the seconds of an operation: the fixed overhead, and the layers' times over the worker's speed.

        The first hop of a route has no input gradient to compute: with split backward its I does nothing, and its W is
        the whole backward. The operation that begins the backward (B, I, or the W of a first hop) recomputes the layers
        in `recompute`, except the model's first and last layer.

        Raises PlanError when the workload has too few layers, ConfigError when the cluster lacks the worker.
        """
        if layers.stop > len(self.workload.layers):
            raise PlanError(f"layers {layers} go past the {len(self.workload.layers)} layers of the workload")
        costs = self.workload.layers[layers.start : layers.stop]
        times_s: list[float] = []
        if kind is OperationKind.FORWARD:
            times_s += [cost.forward_s for cost in costs]
        elif kind is OperationKind.WEIGHT_GRAD and layers.start:
            times_s += [cost.weight_grad_s for cost in costs]
        elif kind is OperationKind.INPUT_GRAD and layers.start:
            times_s += [cost.input_grad_s for cost in costs] + self._recompute_s(layers, recompute)
        elif kind is not OperationKind.INPUT_GRAD:
            for cost in costs:
                fused_s = cost.fused_backward_s
                times_s += (cost.input_grad_s, cost.weight_grad_s) if fused_s is None else (fused_s,)
            times_s += self._recompute_s(layers, recompute)
        # fsum rounds once, so that stages of equal layers cost exactly the same wherever they are.
        return self.workload.operation_overhead_s + math.fsum(times_s) / self.cluster.worker(worker).speed

    def _recompute_s(self, layers: LayerRange, recompute: RecomputedLayers | None) -> list[float]:
        """Seconds of recomputing each of these layers."""
        costs = self.workload.layers
        part = None if recompute is None else recompute.intersection(layers)
        return [
            costs[layer].forward_s if layer in part.full else costs[layer].selective_s
            for layer in part or ()
            if part is not None and is_recomputed(layer, len(costs))
        ]

    def pace(self, worker: int) -> float:
        """Return a number that is equal for workers on which equal operations take equally long."""
        return self.cluster.worker(worker).speed

    def message_s(self, src: int, dst: int, num_bytes: float) -> float:
        """Return the seconds from the start of a send until it has arrived; zero between a worker and itself."""
        return 0.0 if src == dst else self.cluster.link(src, dst).message_s(num_bytes)

    def all_reduce_s(self, layers: LayerRange, holders: Collection[int], num_bytes: int) -> float:
        """Return the seconds in which `holders` sum the gradients of a segment, which begins with these layers."""
        return self.cluster.ring_all_reduce_s(holders, num_bytes)

    def message_bytes(self, layer: int) -> int:
        """Return the bytes of the activation after `layer`, which are those of its gradient."""
        return self.workload.layers[layer].output_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimes:
    """Seconds of each stage of a pipeline, first to last, for one micro-batch.

    Attributes:
        forward_s: of F at each stage (f).
        backward_s: of B, or with split backward of I (b).
        weight_grad_s: of W (w); zeros with fused backward.
        message_s: between a stage and the next, in one direction (c); one fewer than there are stages.

    Raises:
        PlanError: no stages, or lists whose lengths do not fit.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weight_grad_s: tuple[float, ...]
    message_s: tuple[float, ...]

    def __post_init__(self) -> None:
        depth, *others = map(len, (self.forward_s, self.backward_s, self.weight_grad_s, self.message_s))
        if depth < 1 or others != [depth, depth, depth - 1]:
            raise PlanError(
                "a pipeline of p stages needs p forward, backward and weight-gradient times and p - 1 message times; "
                f"got {depth}, {others[0]}, {others[1]} and {others[2]}"
            )

    @property
    def depth(self) -> int:
        """Stages (p)."""
        return len(self.forward_s)


def pipeline_times(
    hops: Sequence[Hop],
    costs: CostModel,
    *,
    split_backward: bool = False,
    recompute: Mapping[int, RecomputedLayers] = FrozenMap({}),
) -> PipelineTimes:
    """Return the times of a route's hops, each on its worker; `recompute` is that of the plan.

    Raises:
        PlanError: no hops, or unknown layers.
        ConfigError: the cluster lacks a worker.
    """

    def times_s(kind: OperationKind) -> tuple[float, ...]:
        return tuple(costs.compute_s(hop.worker, kind, hop.layers, recompute=recompute.get(hop.worker)) for hop in hops)

    return PipelineTimes(
        forward_s=times_s(OperationKind.FORWARD),
        backward_s=times_s(OperationKind.INPUT_GRAD if split_backward else OperationKind.BACKWARD),
        weight_grad_s=times_s(OperationKind.WEIGHT_GRAD) if split_backward else (0.0,) * len(hops),
        message_s=tuple(
            costs.message_s(hop.worker, after.worker, costs.message_bytes(hop.layers.stop - 1))
            for hop, after in pairwise(hops)
        ),
    )
