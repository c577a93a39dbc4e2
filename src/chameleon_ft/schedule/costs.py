"""How long operations and messages take, one by one and as the times of a pipeline's stages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from chameleon_ft.cluster import Cluster
from chameleon_ft.errors import PlanError
from chameleon_ft.plan import Hop, LayerRange, RecomputedLayers
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.schedule.program import Operation, OperationKind
from chameleon_ft.workload import LayerCost, Workload, is_recomputed

__all__ = ["CostModel", "PipelineTimes", "pipeline_times"]


@dataclass(frozen=True, slots=True)
class CostModel:
    """The cost model of DESIGN section 4: a workload's layer times on a cluster's workers and links."""

    workload: Workload
    cluster: Cluster

    def operation_s(self, worker: int, operation: Operation) -> float:
        """Seconds that `operation` takes on `worker`: the fixed overhead, and its layers' times over its speed."""
        return self.compute_s(worker, operation.kind, operation.layers, recompute=operation.recompute)

    def compute_s(
        self, worker: int, kind: OperationKind, layers: LayerRange, *, recompute: RecomputedLayers | None = None
    ) -> float:
        """Seconds that an operation of this kind on these layers takes on `worker`, which recomputes some of them.

        The first hop of a route has no input gradient to make, and nobody waits for one: with split backward its I does
        nothing, and its W is the backward in one go. The operation that begins the backward (B, I, or the W of a first
        hop) recomputes the layers in `recompute`, except the model's first and last layer.

        Raises PlanError when the workload has fewer layers than that, ConfigError when the cluster lacks the worker.
        """
        if layers.stop > len(self.workload.layers):
            raise PlanError(f"layers {layers} go past the {len(self.workload.layers)} layers of the workload")
        costs = self.workload.layers[layers.start : layers.stop]
        recompute_s = self._recompute_s(layers, recompute)
        # fsum rounds once, so that stages of equal layers cost exactly the same wherever they lie.
        match kind:
            case OperationKind.FORWARD:
                work_s = math.fsum(cost.forward_s for cost in costs)
            case OperationKind.BACKWARD:
                work_s = _backward_s(costs, recompute_s)
            case OperationKind.INPUT_GRAD:
                work_s = math.fsum((*(cost.input_grad_s for cost in costs), *recompute_s)) if layers.start else 0.0
            case OperationKind.WEIGHT_GRAD:
                work_s = (
                    math.fsum(cost.weight_grad_s for cost in costs) if layers.start else _backward_s(costs, recompute_s)
                )
        return self.workload.operation_overhead_s + work_s / self.cluster.worker(worker).speed

    def _recompute_s(self, layers: LayerRange, recompute: RecomputedLayers | None) -> list[float]:
        """Seconds of what is run again of each of the forwards."""
        if recompute is None or (part := recompute.intersection(layers)) is None:
            return []
        costs = self.workload.layers
        return [
            costs[layer].forward_s if layer in part.full else costs[layer].selective_s
            for layer in part
            if is_recomputed(layer, len(costs))
        ]

    def pace(self, worker: int) -> float:
        """A number that is equal for workers on which the same operations take equally long."""
        return self.cluster.worker(worker).speed

    def message_s(self, src: int, dst: int, num_bytes: float) -> float:
        """Seconds from the start of a send until it has arrived; zero when both ends are the same worker."""
        return 0.0 if src == dst else self.cluster.link(src, dst).message_s(num_bytes)

    def message_bytes(self, layer: int) -> int:
        """Bytes of the activation after `layer`, and of its gradient on the way back."""
        return self.workload.layers[layer].output_bytes


def _backward_s(costs: Iterable[LayerCost], recompute_s: Iterable[float]) -> float:
    """Of the halves where there is no other figure, each rounded with the rest only once."""
    halves = chain.from_iterable(
        (cost.input_grad_s, cost.weight_grad_s) if cost.fused_backward_s is None else (cost.fused_backward_s,)
        for cost in costs
    )
    return math.fsum((*halves, *recompute_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimes:
    """Seconds of each stage of a pipeline, first to last, for one micro-batch.

    Attributes:
        forward_s: of F at each stage (f).
        backward_s: of B, or with split backward of I (b).
        weight_grad_s: of W (w); zeros with fused backward.
        message_s: one way between a stage and the next (c); one fewer than there are stages.

    Raises:
        PlanError: no stages, or lists whose lengths do not fit.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weight_grad_s: tuple[float, ...]
    message_s: tuple[float, ...]

    def __post_init__(self) -> None:
        depth = len(self.forward_s)
        if depth < 1 or (len(self.backward_s), len(self.weight_grad_s), len(self.message_s)) != (
            depth,
            depth,
            depth - 1,
        ):
            raise PlanError(
                "a pipeline of p stages needs p forward, backward and weight-gradient times and p - 1 message times; "
                f"got {depth}, {len(self.backward_s)}, {len(self.weight_grad_s)} and {len(self.message_s)}"
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
    """The times of a route's hops, each on its worker; `recompute` is that of the plan.

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
