"""Data rerouting: the lost workers' share of the micro-batches goes to the other holders of their layers."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from chameleon_ft.errors import NoHolderError
from chameleon_ft.plan.placement import LayerRange, Placement
from chameleon_ft.plan.plan import Hop, Plan, Route
from chameleon_ft.schedule.costs import CostModel
from chameleon_ft.schedule.program import OperationKind

__all__ = ["reroute"]


def reroute(plan: Plan, lost: Collection[int], costs: CostModel) -> Plan:
    gone = frozenset(lost)
    placement = plan.placement.without(gone)
    if unheld := placement.unheld_layers:
        raise NoHolderError(unheld)
    load = dict.fromkeys(placement.workers, 0.0)

    def work(worker: int, layers: LayerRange) -> float:
        return sum(
            costs.compute_s(worker, k, layers) for k in (OperationKind.FORWARD, OperationKind.BACKWARD)
        )

    for route in plan.routes:
        for hop in route.hops:
            if hop.worker not in gone:
                load[hop.worker] += work(hop.worker, hop.layers)
    routes: list[Route] = []
    for route in plan.routes:
        hops: list[Hop] = []
        for hop in route.hops:
            if hop.worker not in gone:
                hops.append(hop)
                continue
            for layers in _segments(placement, hop.layers):
                worker = min(
                    placement.holders(layers.start), key=lambda w: (load[w] + work(w, layers), w)
                )
                load[worker] += work(worker, layers)
                hops.append(Hop(worker, layers))
        routes.append(Route(route.micro_batch, _joined(hops)))
    return Plan(placement, tuple(routes), plan.split_backward)


def _segments(placement: Placement, layers: LayerRange) -> Iterable[LayerRange]:
    start = layers.start
    for layer in layers:
        if layer + 1 == layers.stop or placement.holders(layer + 1) != placement.holders(layer):
            yield LayerRange(start, layer + 1)
            start = layer + 1


def _joined(hops: list[Hop]) -> tuple[Hop, ...]:
    joined: list[Hop] = []
    for hop in hops:
        if joined and joined[-1].worker == hop.worker:
            joined[-1] = Hop(hop.worker, LayerRange(joined[-1].layers.start, hop.layers.stop))
        else:
            joined.append(hop)
    return tuple(joined)
