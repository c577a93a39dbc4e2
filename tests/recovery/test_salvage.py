"""The rest of an interrupted step, from what the survivors hold of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, Route, data_pipeline_plan
from chameleon_ft.plan.rest import PartialHop, RestOfStep, StepProgress
from chameleon_ft.recovery.salvage import Salvage, limits_by_memory, salvage
from chameleon_ft.schedule import CostModel, InFlightLimit, list_schedule, replay
from chameleon_ft.workload import LayerCost, Workload
from tests.progress import progress_at
from tests.strategies import Planned, equal_costs, planned


def interrupted(plan: Plan, costs: CostModel, at: float, *, lost: set[int]) -> dict[int, StepProgress]:
    """Return what the survivors hold after a share of the step."""
    timeline = replay(list_schedule(plan, costs), costs)
    return progress_at(plan, timeline, at * timeline.step_s, lost=lost)


def survivors(costs: CostModel, lost: set[int]) -> CostModel:
    return CostModel(costs.workload, costs.cluster.without(lost))


def two_pipelines(*, split_backward: bool = False, dp: int = 2) -> tuple[Plan, CostModel]:
    costs = equal_costs(layers=4, micro_batches=4 * dp, workers=2 * dp)
    plan = data_pipeline_plan(layer_costs=[1.0] * 4, dp=dp, pp=2, micro_batches=4 * dp, split_backward=split_backward)
    return plan, costs


def hop_of(rest: RestOfStep, micro_batch: int, layer: int) -> PartialHop:
    (route,) = (route for route in rest.routes if route.micro_batch == micro_batch)
    return next(hop for hop in route.hops if layer in hop.layers)


def contributions(rest: RestOfStep, progress: Mapping[int, StepProgress]) -> Counter[tuple[int, int]]:
    """How often each (micro-batch, layer) is in the sum that is applied, where no total is known."""
    found: Counter[tuple[int, int]] = Counter()
    for own in progress.values():
        found.update((number, layer) for number, layers in own.contributed for layer in layers)
    for route in rest.routes:
        found.update((route.micro_batch, layer) for hop in route.hops if hop.weight_grad for layer in hop.layers)
    return found


def check_inputs(rest: RestOfStep, progress: Mapping[int, StepProgress]) -> None:
    """Check that each operation that remains finds what it needs on its worker, or is sent it."""
    for route in rest.routes:
        for hop in route.hops:
            own, key = progress[hop.worker], (route.micro_batch, hop.layers)
            assert hop.forward or not hop.backward or key in own.saved
            assert hop.backward or not hop.weight_grad or key in own.deferred
            assert not hop.sends_activation or (route.micro_batch, hop.layers.stop - 1) in own.activations
            assert not hop.sends_gradient or (route.micro_batch, hop.layers.start) in own.gradients
        counted = sum(route.micro_batch in own.counted for own in progress.values())
        assert counted + (not route.is_counted) == 1
        assert route.is_counted or route.hops[-1].forward


def first_salvage(plan: Plan, progress: Mapping[int, StepProgress], costs: CostModel, **more: Any) -> Salvage | None:
    """The rest in which peers share lost hops as wholes."""
    return next(iter(salvage(plan, progress, costs, **more)), None)


def check(found: Salvage | None, plan: Plan, progress: Mapping[int, StepProgress]) -> None:
    assert found is not None
    layers = plan.placement.num_layers
    every = {(number, layer): 1 for number in range(plan.micro_batches) for layer in range(layers)}
    assert contributions(found.rest, progress) == every
    check_inputs(found.rest, progress)
    remaining = {route.micro_batch for route in found.rest.routes}
    counted = {number for own in progress.values() for number in own.counted}
    assert remaining | counted == set(range(plan.micro_batches))


@given(planned(), st.floats(0.0, 1.0), st.data())
def test_every_contribution_and_loss_is_there_once(case: Planned, at: float, data: st.DataObject) -> None:
    plan, costs = case.plan, case.costs
    lost = data.draw(st.sets(st.sampled_from(plan.workers), max_size=2))
    assume(not plan.placement.without(lost).unheld_layers)
    progress = interrupted(plan, costs, at, lost=lost)
    found = salvage(plan, progress, survivors(costs, lost))
    assert found
    for each in found:
        check(each, plan, progress)


@given(planned(), st.floats(0.0, 1.0))
def test_an_interruption_without_a_loss_repeats_nothing(case: Planned, at: float) -> None:
    progress = interrupted(case.plan, case.costs, at, lost=set())
    found = first_salvage(case.plan, progress, case.costs)
    check(found, case.plan, progress)
    assert found is not None
    assert found.repeated_s == 0.0


def test_pipelines_without_a_lost_worker_continue_on_their_routes() -> None:
    plan, costs = two_pipelines()
    progress = interrupted(plan, costs, 0.5, lost={0})
    found = first_salvage(plan, progress, survivors(costs, {0}))
    assert found is not None
    for route in found.rest.routes:
        before = plan.routes[route.micro_batch].hops
        if 0 not in {hop.worker for hop in before}:
            assert tuple(Hop(hop.worker, hop.layers) for hop in route.hops) == before


def test_a_micro_batch_that_ended_on_the_lost_worker_runs_again_without_other_weight_gradients() -> None:
    plan, costs = two_pipelines()
    progress = interrupted(plan, costs, 1.0, lost={0})
    progress[1] = replace(progress[1], gradients=frozenset())
    found = first_salvage(plan, progress, survivors(costs, {0}))
    assert found is not None
    # Worker 1 has added the weight gradients of layers 2 and 3 to its own; only the input gradient is needed again.
    below, above = (hop_of(found.rest, 0, layer) for layer in (0, 2))
    assert (below.forward, below.backward, below.weight_grad) == (True, True, True)
    assert (above.forward, above.backward, above.weight_grad) == (True, True, False)
    assert {route.micro_batch for route in found.rest.routes} == {0, 1, 2, 3}
    # F and I of the stage above, and F of the lost stage; no survivor knows whether its B had run.
    assert found.repeated_share == (4 * (4 + 2)) / (8 * 12)


def test_layers_below_the_lowest_missing_one_run_no_backward() -> None:
    plan, costs = two_pipelines()
    progress = interrupted(plan, costs, 1.0, lost={1})
    found = first_salvage(plan, progress, survivors(costs, {1}))
    assert found is not None
    below, above = (hop_of(found.rest, 0, layer) for layer in (0, 2))
    assert (below.forward, below.backward, below.weight_grad) == (True, False, False)
    assert (above.forward, above.backward, above.weight_grad) == (True, True, True)
    assert above.worker == 3
    assert not any(route.is_counted for route in found.rest.routes)  # the lost worker had their losses


def test_a_peer_takes_over_where_the_activation_can_be_sent_again() -> None:
    plan, costs = two_pipelines()
    progress = {worker: StepProgress() for worker in (0, 2, 3)}
    layers = plan.routes[0].hops[0].layers
    progress[0] = StepProgress(saved=frozenset({(0, layers)}), activations=frozenset({(0, layers.stop - 1)}))
    found = first_salvage(plan, progress, survivors(costs, {1}))
    assert found is not None
    below, above = (hop_of(found.rest, 0, layer) for layer in (0, 2))
    assert below == PartialHop(worker=0, layers=layers, backward=True, weight_grad=True, sends_activation=True)
    assert above == PartialHop(worker=3, layers=above.layers, forward=True, backward=True, weight_grad=True)
    assert found.repeated_s == 0.0


def test_a_known_total_needs_no_contribution_of_the_lost_worker() -> None:
    plan, costs = two_pipelines()
    progress = interrupted(plan, costs, 1.0, lost={0})
    held = frozenset({(0,), (1,)})
    progress[2] = replace(progress[2], totals=held)
    found = first_salvage(plan, progress, survivors(costs, {0}))
    assert found is not None
    assert not found.rest.routes
    assert dict(found.rest.sources) == {(0,): 2, (1,): 2}


def test_a_loss_that_only_the_lost_worker_counted_takes_the_forward_alone() -> None:
    plan, costs = two_pipelines()
    progress = interrupted(plan, costs, 1.0, lost={1})
    progress[3] = replace(progress[3], totals=frozenset({(2,), (3,)}))
    found = first_salvage(plan, progress, survivors(costs, {1}))
    assert found is not None
    for number in range(4):
        hops = [hop_of(found.rest, number, layer) for layer in (0, 2)]
        assert [(hop.forward, hop.backward, hop.weight_grad) for hop in hops] == [(True, False, False)] * 2


def test_tied_parameters_without_a_total_need_the_contributions_of_all_their_layers() -> None:
    plan, costs = two_pipelines()
    progress = interrupted(plan, costs, 1.0, lost={0})
    progress[2] = replace(progress[2], totals=frozenset({(0,), (1,)}))
    found = first_salvage(plan, progress, survivors(costs, {0}), tied=[(0, 3)])
    assert found is not None
    hops = next(route.hops for route in found.rest.routes if route.micro_batch == 0)
    assert [layer for hop in hops if hop.weight_grad for layer in hop.layers] == [0]


def test_the_work_of_a_lost_worker_is_spread_over_its_peers() -> None:
    plan, costs = two_pipelines(dp=4)
    progress = interrupted(plan, costs, 0.0, lost={0})
    found = first_salvage(plan, progress, survivors(costs, {0}))
    assert found is not None
    busy = Counter(hop.worker for route in found.rest.routes for hop in route.hops)
    assert sorted(busy[worker] for worker in (2, 4, 6)) == [5, 5, 6]


def test_a_deferred_weight_gradient_remains_where_it_is() -> None:
    plan, costs = two_pipelines(split_backward=True)
    layers = plan.routes[0].hops[1].layers
    progress = {worker: StepProgress() for worker in (0, 1, 2)}
    progress[1] = StepProgress(
        deferred=frozenset({(0, layers)}), counted=frozenset({0}), gradients=frozenset({(0, layers.start)})
    )
    below_layers = plan.routes[0].hops[0].layers
    progress[0] = StepProgress(saved=frozenset({(0, below_layers)}))
    found = first_salvage(plan, progress, survivors(costs, {3}))
    assert found is not None
    assert hop_of(found.rest, 0, 2) == PartialHop(worker=1, layers=layers, weight_grad=True, sends_gradient=True)
    assert hop_of(found.rest, 0, 0) == PartialHop(worker=0, layers=below_layers, backward=True, weight_grad=True)


@given(planned(), st.floats(0.0, 1.0), st.data())
def test_a_second_loss_before_the_rest_has_begun(case: Planned, at: float, data: st.DataObject) -> None:
    plan, costs = case.plan, case.costs
    first = data.draw(st.sampled_from(plan.workers))
    second = data.draw(st.sampled_from(plan.workers))
    assume(first != second and not plan.placement.without([first, second]).unheld_layers)
    progress = interrupted(plan, costs, at, lost={first})
    before = first_salvage(plan, progress, survivors(costs, {first}))
    assert before is not None
    left = {worker: own for worker, own in progress.items() if worker != second}
    found = first_salvage(plan, left, survivors(costs, {first, second}), before=before.rest)
    check(found, plan, left)


def test_a_layer_without_a_live_holder_cannot_be_completed() -> None:
    plan, costs = two_pipelines()
    progress = interrupted(plan, costs, 0.5, lost={0, 2})
    assert first_salvage(plan, progress, survivors(costs, {0, 2})) is None
    # Unless nothing of it is missing.
    ended = interrupted(plan, costs, 1.0, lost=set())
    held = {
        worker: replace(ended[worker], totals=frozenset({(0,), (1,)}), contributed=ended[worker].contributed)
        for worker in (1, 3)
    }
    found = first_salvage(plan, held, survivors(costs, {0, 2}))
    assert found is not None
    assert not found.rest.routes


def test_peers_share_lost_hops_as_wholes_and_in_parts() -> None:
    """Seven of eight pipelines take over the sixteen micro-batches of a worker: two or three each, or less at most."""
    plan = data_pipeline_plan(layer_costs=[1.0] * 14, dp=8, pp=2, micro_batches=128, workers=range(16))
    costs = equal_costs(layers=14, micro_batches=128, workers=16)
    progress = {worker: StepProgress() for worker in range(1, 16)}
    whole, parts = salvage(plan, progress, survivors(costs, {0}))

    def extra(found: Salvage) -> list[int]:
        """Layers that peers of worker 0 run in addition, of one micro-batch each."""
        own = Counter(hop.worker for route in found.rest.routes for hop in route.hops for _ in hop.layers)
        return [own[worker] - 16 * 7 for worker in range(2, 16, 2)]

    assert sorted(extra(whole)) == [14] * 5 + [21] * 2
    assert sum(extra(parts)) == 16 * 7
    assert max(extra(parts)) <= 21
    assert {len(route.hops) for route in whole.rest.routes} == {2}
    assert {len(route.hops) for route in parts.rest.routes} == {2, 3}


def test_holders_of_parts_of_a_lost_hop_share_it() -> None:
    """Of layers 2 to 5, worker 4 holds all, and workers 6 and 7 half each."""
    ranges = {0: (0, 2), 1: (2, 6), 2: (6, 8), 3: (0, 2), 4: (2, 6), 5: (6, 8), 6: (0, 4), 7: (4, 8)}
    held = {worker: LayerRange(*own) for worker, own in ranges.items()}
    pipelines = [tuple(Hop(worker, held[worker]) for worker in own) for own in ((0, 1, 2), (3, 4, 5), (6, 7))]
    placement = Placement(8, {worker: (own,) for worker, own in held.items()})
    plan = Plan(placement, tuple(Route(number, pipelines[number % 3]) for number in range(36)))
    progress = {worker: StepProgress() for worker in plan.workers if worker != 1}
    found = salvage(plan, progress, survivors(equal_costs(layers=8, micro_batches=36, workers=8), {1}))

    whole, parts = ({tuple((h.worker, h.layers) for h in r.hops) for r in each.rest.routes} for each in found)
    both = tuple((worker, LayerRange(*own)) for worker, own in ((0, (0, 2)), (6, (2, 4)), (7, (4, 6)), (2, (6, 8))))
    assert both in parts
    assert both not in whole
    most = [max(Counter(h.worker for r in e.rest.routes for h in r.hops for _ in h.layers).values()) for e in found]
    assert most[1] < most[0]


def test_memory_that_is_known_lets_a_worker_keep_more_micro_batches() -> None:
    plan = data_pipeline_plan(layer_costs=[1.0] * 2, dp=2, pp=2, micro_batches=8, workers=range(4))
    layer = LayerCost("layer", 1.0, 1.0, 1.0, param_bytes=10, activation_bytes=30, weight_grad_bytes=20, output_bytes=5)
    link = Link(0.0, math.inf)
    memory = {0: None, 1: 10 + 35 * 6, 2: 10 + 35 * 6 - 1, 3: 20}
    cluster = Cluster(tuple(Worker(w, "host", memory_bytes=own) for w, own in memory.items()), link, link)
    costs = CostModel(Workload((layer, layer), 8, 1), cluster)
    limits = dict.fromkeys(range(4), InFlightLimit(2, 3, 2))
    found = limits_by_memory(plan, costs, limits)
    assert found == {0: limits[0], 1: InFlightLimit(5, 5, 5), 2: InFlightLimit(4, 4, 4), 3: limits[3]}
