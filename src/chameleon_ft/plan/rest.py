"""The rest of an interrupted step: the operations that the surviving workers still have to run, by partial routes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from chameleon_ft.errors import PlanError
from chameleon_ft.plan.plan import LayerRange, Plan

GradientKey: TypeAlias = tuple[int, ...]
"""Gradients that are reduced as one: ``(layer,)`` for a layer's own parameters, or all layers that share tied ones."""

HopKey: TypeAlias = tuple[int, LayerRange]
"""(micro-batch, layers): unlike the index of a hop, it is the same in a partial route."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgress:
    """The state of an interrupted step on a worker.

    Attributes:
        contributed: hops whose weight gradients are in the worker's gradient buffers.
        saved: hops whose F has run, and whose backward has not begun.
        deferred: hops whose I has run, and whose W has not.
        counted: micro-batches whose loss the worker has counted.
        totals: gradients of which the worker holds the sum over all holders, instead of its own contribution.
        activations: (micro-batch, layer) whose output the worker can send again.
        gradients: (micro-batch, layer) whose input gradient the worker can send again.
    """

    contributed: frozenset[HopKey] = frozenset()
    saved: frozenset[HopKey] = frozenset()
    deferred: frozenset[HopKey] = frozenset()
    counted: frozenset[int] = frozenset()
    totals: frozenset[GradientKey] = frozenset()
    activations: frozenset[tuple[int, int]] = frozenset()
    gradients: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialHop:
    """A hop of a micro-batch of which some operations remain, or none.

    Attributes:
        worker, layers: as in `Hop`.
        forward: F remains.
        backward: the gradient of the input remains to be computed, by I or by a fused B.
        weight_grad: the weight gradients remain to be added, by W or by a fused B.
        sends_activation: the worker sends again the output of an F that it has run before.
        sends_gradient: the worker sends again the input gradient of a B or I that it has run before.
    """

    worker: int
    layers: LayerRange
    forward: bool = False
    backward: bool = False
    weight_grad: bool = False
    sends_activation: bool = False
    sends_gradient: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialRoute:
    """The remaining operations of a micro-batch.

    Attributes:
        micro_batch: its number in the global batch.
        hops: from layer 0 to the last, also those of which nothing remains.
        is_counted: a surviving worker has counted its loss.

    Raises:
        PlanError: hops that do not cover the layers from 0 on without gap or overlap, or an operation whose input no
            hop makes or sends again.
    """

    micro_batch: int
    hops: tuple[PartialHop, ...]
    is_counted: bool

    def __post_init__(self) -> None:
        expected = 0
        for hop in self.hops:
            if hop.layers.start != expected:
                raise PlanError(
                    f"the partial route of micro-batch {self.micro_batch} must continue at layer {expected}, "
                    f"but worker {hop.worker} runs layers {hop.layers}"
                )
            expected = hop.layers.stop
        for before, after in pairwise(self.hops):
            if after.forward and not (before.forward or before.sends_activation):
                raise self._lacks(after, "activation", before)
            if before.backward and not (after.backward or after.sends_gradient):
                raise self._lacks(before, "gradient", after)

    def _lacks(self, hop: PartialHop, message: str, maker: PartialHop) -> PlanError:
        return PlanError(
            f"micro-batch {self.micro_batch} on worker {hop.worker} lacks the {message} of layers {maker.layers}, "
            f"which worker {maker.worker} neither makes nor sends again"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RestOfStep:
    """The rest of an interrupted step, as a plan with partial routes.

    Executed after what the surviving workers have run already, it gives the sums of the whole step: every (micro-batch,
    layer) contribution and every loss term exactly once.

    Attributes:
        plan: the interrupted plan: its placement, and how its workers run a backward. Lost workers may be in it.
        routes: micro-batches of which something remains, by number.
        sources: gradients whose sum some workers hold already, each with the worker that gives it to the others.
    """

    plan: Plan
    routes: tuple[PartialRoute, ...]
    sources: tuple[tuple[GradientKey, int], ...] = ()

    def __post_init__(self) -> None:
        num_layers = self.plan.placement.num_layers
        for route in self.routes:
            if not route.hops or route.hops[-1].layers.stop != num_layers:
                raise PlanError(
                    f"the partial route of micro-batch {route.micro_batch} does not reach layer {num_layers - 1}"
                )
            for hop in route.hops:
                if hop.weight_grad and not hop.backward and not self.plan.splits(hop.worker):
                    raise PlanError(
                        f"worker {hop.worker} does not split its backward, so it has no W of micro-batch "
                        f"{route.micro_batch} left to run"
                    )
