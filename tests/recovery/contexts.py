"""Situations to decide on: small plans of pipelines, with workers lost and joined."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.cost.transition import StallModel
from chameleon_ft.plan import Placement, data_pipeline_plan
from chameleon_ft.recovery import DecisionContext, FailureModel, uniform_limits
from chameleon_ft.schedule import CostModel
from chameleon_ft.transfer import Message
from chameleon_ft.workload import LayerCost, Workload

PHASES = StallModel(detect_s=0.25, stop_s=0.25, decide_s=0.0, regroup_s=0.5)


def layer(param_bytes: int, time_s: float = 1.0) -> LayerCost:
    return LayerCost(
        "layer",
        time_s,
        time_s,
        time_s,
        param_bytes=param_bytes,
        gradient_bytes=param_bytes,
        optimizer_bytes=2 * param_bytes,
        activation_bytes=2,
        weight_grad_bytes=2,
        output_bytes=1,
    )


def context(
    *,
    dp: int,
    pp: int,
    share: int = 4,
    layers: tuple[LayerCost, ...] | None = None,
    hosts: int = 1,
    spares: int = 0,
    memory_bytes: int | None = None,
    link: Link | None = None,
    split_backward: bool = False,
    effort: int | None = 300,
) -> DecisionContext:
    """Return a context of `dp` pipelines of `pp` stages without a loss, on `hosts` hosts of equal size."""
    layers = layers if layers is not None else (layer(10),) * (2 * pp)
    plan = data_pipeline_plan(
        layer_costs=[cost.total_s for cost in layers],
        dp=dp,
        pp=pp,
        micro_batches=dp * share,
        split_backward=split_backward,
    )
    count = dp * pp + spares
    workers = tuple(
        Worker(number, f"host {number * hosts // count}", memory_bytes=memory_bytes) for number in range(count)
    )
    link = Link(0.0, 100.0) if link is None else link
    return DecisionContext(
        plan=plan,
        in_flight_limits=uniform_limits(range(count), pp),
        costs=CostModel(Workload(layers, dp * share, 2), Cluster(workers, link, Link(link.latency_s, 40.0))),
        phases=PHASES,
        repeat_s=2.0,
        restart_cost_s=100.0,
        effort=effort,
    )


def after(before: DecisionContext, *lost: int) -> DecisionContext:
    """Return the context after the loss of these workers."""
    costs = before.costs
    return replace(before, costs=CostModel(costs.workload, costs.cluster.without(lost)))


def rate_of(horizon_s: float, now: DecisionContext, *, host_failure_fraction: float = 0.0) -> FailureModel:
    """The rate with which the next failure is expected in so many seconds; that share of them takes a host."""
    return FailureModel(
        worker_mtbf_s=horizon_s * len(now.live), prior_failures=1.0, prior_host_failure_fraction=host_failure_fraction
    )


def arrived(before: Placement, messages: tuple[Message, ...]) -> dict[int, list[int]]:
    """Layers by worker when every message has arrived, each as often as it is there; sources must hold theirs."""
    found = {worker: [number for own in ranges for number in own] for worker, ranges in before.ranges.items()}
    for message in messages:
        assert before.holds(message.source, message.layers)
        found.setdefault(message.destination, []).extend(message.layers)
    return found


@st.composite
def contexts(draw: st.DrawFn, *, intact: bool = False) -> DecisionContext:
    """Two or three pipelines, with up to two spares; up to two workers are lost, and layers may have no holder then."""
    dp, pp = draw(st.integers(2, 3)), draw(st.integers(1, 3))
    count = draw(st.integers(pp, 6))
    layers = tuple(
        layer(draw(st.sampled_from([10, 10, 40])), draw(st.sampled_from([1.0, 1.0, 0.5]))) for _ in range(count)
    )
    state = sum(4 * cost.param_bytes for cost in layers)
    before = context(
        dp=dp,
        pp=pp,
        share=draw(st.integers(1, 4)),
        layers=layers,
        hosts=draw(st.integers(1, 2)),
        spares=draw(st.integers(0, 2)),
        memory_bytes=draw(st.sampled_from([None, state // pp + 60, 2 * state])),
        link=Link(draw(st.sampled_from([0.0, 0.1])), draw(st.sampled_from([10.0, 1000.0]))),
        split_backward=draw(st.booleans()),
    )
    lost = [] if intact else draw(st.lists(st.integers(0, dp * pp - 1), unique=True, max_size=min(2, dp * pp - 1)))
    return after(before, *lost)
