"""Plans of a search, with workers that hold most of what they need already."""

from __future__ import annotations

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.cost.transition import StallModel
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, Route
from chameleon_ft.recovery import DecisionContext
from chameleon_ft.recovery.proposal import remap_workers
from chameleon_ft.schedule import CostModel
from chameleon_ft.search import FoundPlan
from chameleon_ft.workload import LayerCost, Workload

FIRST, LAST = LayerRange(0, 1), LayerRange(1, 2)


def pairs(*pipelines: tuple[int, int]) -> Plan:
    """Pipelines of two stages."""
    held = {worker: (layers,) for pipeline in pipelines for worker, layers in zip(pipeline, (FIRST, LAST), strict=True)}
    routes = tuple(
        Route(number, (Hop(first, FIRST), Hop(last, LAST)))
        for number, (first, last) in enumerate(pipelines[number % len(pipelines)] for number in range(4))
    )
    return Plan(Placement(2, held), routes)


def test_what_moves_more_and_keeps_rings_on_their_hosts_is_proposed_beside_what_moves_less() -> None:
    layer = LayerCost("layer", 1.0, 1.0, 1.0, param_bytes=10, gradient_bytes=10)
    workers = tuple(Worker(number, f"host {number // 2}") for number in range(4))
    costs = CostModel(Workload((layer,) * 2, 4, 1), Cluster(workers, Link(0.0, 1000.0), Link(0.0, 1.0)))
    context = DecisionContext(
        plan=pairs((0, 1), (2, 3)),
        in_flight_limits={},
        costs=costs,
        phases=StallModel(detect_s=0.0, stop_s=0.0, decide_s=0.0, regroup_s=0.0),
        repeat_s=0.0,
        restart_cost_s=0.0,
    )
    on_hosts = pairs((0, 2), (1, 3))
    found = FoundPlan(
        name="pipelines",
        plan=on_hosts,
        in_flight_limits={},
        step_s=6.0,
        program_s=6.0,
        peak_bytes=0,
        moved_bytes=20,
        host_single_points_of_failure=2,
    )
    near, anywhere = remap_workers("repartition", [found], context)
    assert near.plan is not None
    assert len(near.plan.placement.single_points_of_failure(costs.cluster.hosts)) == 2
    assert anywhere.plan is not None
    assert anywhere.plan.placement == context.plan.placement
