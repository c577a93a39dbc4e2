"""Programs that tests replay, and costs that they are replayed under."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from chameleon_ft.plan import Plan
from chameleon_ft.schedule import CostModel, Operation, OperationKind, Program
from chameleon_ft.sync import Segment, segment_bytes
from tests.strategies import Planned

# Of a backward in one go over its halves: less where these do work twice, more where in one go it is held up.
SHARES_OF_HALVES = st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0, 1.5]), st.floats(0.0, 3.0))


def one_f_one_b(plan: Plan) -> Program:
    """1F1B with fused backward on a plan of pipelines that share no workers, by its textbook order."""
    operations: dict[int, list[Operation]] = {worker: [] for worker in plan.workers}
    for hops in dict.fromkeys(route.hops for route in plan.routes):
        routes = [route for route in plan.routes if route.hops == hops]
        for stage, hop in enumerate(hops):
            warm_up = min(len(hops) - stage - 1, len(routes))
            order = [(OperationKind.FORWARD, route) for route in routes[:warm_up]]
            for index, route in enumerate(routes):
                if warm_up + index < len(routes):
                    order.append((OperationKind.FORWARD, routes[warm_up + index]))
                order.append((OperationKind.BACKWARD, route))
            operations[hop.worker] += [Operation.of(kind, route, stage) for kind, route in order]
    return Program({worker: tuple(own) for worker, own in operations.items()})


@st.composite
def with_fused_backwards(draw: st.DrawFn, cases: st.SearchStrategy[Planned]) -> Planned:
    """`cases` in which some layers take less or more time for a backward in one go than for its halves."""
    case = draw(cases)
    layers = []
    for layer in case.costs.workload.layers:
        share = draw(SHARES_OF_HALVES)
        layers.append(layer if share is None else replace(layer, fused_backward_s=share * layer.halves_s))
    workload = replace(case.costs.workload, layers=tuple(layers))
    return Planned(case.plan, CostModel(workload, case.costs.cluster))


def stage_bytes(*, stage: int, stages: int, layers: int, state_bytes: float, activation_bytes: float) -> float:
    """Bytes of stage i, from 0, by the paper's formula: L_i (m_p + m_g + m_opt) + (N_pp - i) L_i m_act.

    `state_bytes` is m_p + m_g + m_opt and `activation_bytes` m_act, both of one of the stage's `layers` (L_i).
    """
    return layers * (state_bytes + (stages - stage) * activation_bytes)


def reduction_s(segment: Segment, costs: CostModel) -> float:
    """Seconds of a ring all-reduce of the segment's gradients."""
    return costs.cluster.ring_all_reduce_s(segment.holders, segment_bytes(segment, costs.workload))
