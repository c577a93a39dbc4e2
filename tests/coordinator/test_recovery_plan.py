"""Recovery plans after a loss, for every state of the survivors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from chameleon_ft import recovery
from chameleon_ft.cluster import Cluster
from chameleon_ft.coordinator.decisions.cluster_state import ClusterState
from chameleon_ft.coordinator.decisions.recovery_plan import decide
from chameleon_ft.cost.transition import StallModel
from chameleon_ft.errors import ControlError, NoHolderError
from chameleon_ft.plan import Plan, data_pipeline_plan
from chameleon_ft.plan.vote import Vote
from chameleon_ft.protocol.messages import Quiesced
from chameleon_ft.recovery import FailureModel
from chameleon_ft.recovery.generation import GenerationSpec
from chameleon_ft.schedule import CostModel
from chameleon_ft.search import find_plan
from tests.golden import refused
from tests.strategies import Shape, equal_costs, losses, pipelines, shapes, survivable

LAYERS = 4
MICRO_BATCHES = 6
COSTS = equal_costs(layers=LAYERS, micro_batches=MICRO_BATCHES, workers=6)
# Workers 0 2 4 hold layers 0-1, workers 1 3 5 hold layers 2-3.
PLAN = data_pipeline_plan(layer_costs=[1.0] * LAYERS, dp=3, pp=2, micro_batches=MICRO_BATCHES)


def vote(step: int) -> Vote:
    return Vote(grad_square_sum=1.0, loss_sum=float(step), terms=12, samples=12, finish=False)


def quiesced(committed: int, *, reduced: bool = False) -> Quiesced:
    return Quiesced(
        generation=2,
        committed=committed,
        reduced=reduced,
        last_vote=vote(committed - 1) if committed else None,
        placed=1,
        layers=(),  # set by `cluster_state`
    )


def cluster_state(
    states: Mapping[int, Quiesced], *, plan: Plan = PLAN, committed: int = 7, checkpoints: Sequence[int] = ()
) -> ClusterState:
    return ClusterState(
        plan=plan,
        live=sorted(states),
        quiesced={worker: holding(state, plan, worker) for worker, state in states.items()},
        committed=committed,
        last_vote=vote(committed - 1) if committed else None,
        checkpoints=checkpoints,
    )


def holding(state: Quiesced, plan: Plan, worker: int) -> Quiesced:
    return state.model_copy(update={"layers": plan.placement.layers_of(worker)})


RATE = FailureModel(worker_mtbf_s=1e6, prior_failures=1.0)


def context_of(found: ClusterState, costs: CostModel = COSTS) -> recovery.DecisionContext:
    cluster = costs.cluster
    live = tuple(worker for worker in cluster.workers if worker.id in found.live)
    return recovery.DecisionContext(
        plan=found.plan,
        in_flight_limits={},
        costs=CostModel(costs.workload, Cluster(live, cluster.intra_host, cluster.inter_host)),
        phases=StallModel(detect_s=0.0, stop_s=0.0, decide_s=0.0, regroup_s=0.1),
        repeat_s=0.0,
        restart_cost_s=300.0,
    )


def decided(found: ClusterState, *, policy: str = "reroute", costs: CostModel = COSTS) -> GenerationSpec:
    return decide(found, context_of(found, costs), policy=policy, rate=RATE)[0]


def choice(found: ClusterState, *, policy: str) -> recovery.Decision:
    """Return the decision that leads to the next generation."""
    _, decision = decide(found, context_of(found), policy=policy, rate=RATE)
    assert decision is not None
    return decision


def all_but(*lost: int, state: Quiesced) -> dict[int, Quiesced]:
    return {worker: state for worker in range(6) if worker not in lost}


def test_peers_do_the_share_of_a_lost_worker() -> None:
    decision = decided(cluster_state(all_but(3, state=quiesced(7))))
    assert decision.plan.workers == (0, 1, 2, 4, 5)
    assert (decision.first_step, decision.load, decision.roll_forward) == (7, "keep", None)
    assert decision.policy == "reroute"
    assert decision.action == (
        "2 micro-batches of worker 3 go through workers 1, 5; no weights move; resumes at step 7"
    )


def test_without_a_loss_the_same_plan_is_tried_again() -> None:
    decision = decided(cluster_state(all_but(state=quiesced(7))))
    assert decision.plan == PLAN
    assert decision.action == "resumes at step 7 with the same routes"


def test_the_words_for_several_lost_workers() -> None:
    decision = decided(cluster_state(all_but(1, 3, state=quiesced(7, reduced=True)), committed=8))
    assert decision.action == (
        "step 7 applied, 4 micro-batches of workers 1, 3 go through worker 5; no weights move; resumes at step 8"
    )


def test_a_step_that_a_survivor_has_applied_is_applied_by_all() -> None:
    states = all_but(3, state=quiesced(7, reduced=True)) | {4: quiesced(8)}
    decision = decided(cluster_state(states))
    assert decision.first_step == 8
    assert decision.roll_forward == vote(7)


def test_a_step_that_only_the_lost_worker_has_applied_counts_if_it_has_said_so() -> None:
    decision = decided(cluster_state(all_but(3, state=quiesced(7, reduced=True)), committed=8))
    assert decision.first_step == 8
    assert decision.roll_forward == vote(7)


def test_a_step_that_no_worker_has_applied_is_run_again() -> None:
    states = all_but(3, state=quiesced(7, reduced=True)) | {0: quiesced(7)}
    decision = decided(cluster_state(states))
    assert (decision.first_step, decision.roll_forward) == (7, None)


def test_the_vote_of_a_resumed_step_is_not_needed() -> None:
    # After a resume no worker has a vote, and none lags behind.
    states = all_but(3, state=quiesced(7).model_copy(update={"last_vote": None}))
    decision = decided(dataclasses.replace(cluster_state(states), last_vote=None))
    assert (decision.first_step, decision.roll_forward) == (7, None)


@pytest.mark.parametrize(
    "behind",
    [
        quiesced(7),  # it holds no reduced gradient
        quiesced(6, reduced=True),  # it is two steps behind
    ],
)
def test_states_that_the_commit_protocol_rules_out_are_not_patched_up(behind: Quiesced) -> None:
    with refused(ControlError):
        decided(cluster_state(all_but(3, state=quiesced(8)) | {0: behind}, committed=8))


def test_a_step_cannot_be_applied_without_its_vote() -> None:
    states = all_but(3, state=quiesced(7, reduced=True)) | {0: quiesced(8).model_copy(update={"last_vote": None})}
    with refused(ControlError):
        decided(dataclasses.replace(cluster_state(states), last_vote=None))


def test_without_a_last_holder_all_go_back_to_the_newest_checkpoint() -> None:
    decision = decided(cluster_state(all_but(1, 3, 5, state=quiesced(7)), checkpoints=[2, 5]))
    assert (decision.policy, decision.first_step, decision.load, decision.roll_forward) == ("checkpoint", 5, 5, None)
    assert decision.lost_layers == (2, 3)
    assert decision.plan.workers == (0, 2, 4)
    assert decision.action == (
        "no worker holds layers 2-3 any more: back to the checkpoint of step 5, 3 pipelines of 1 stage; "
        "2 steps repeated"
    )


def test_chameleon_reads_it_into_the_fastest_plan() -> None:
    found = cluster_state(all_but(1, 3, 5, state=quiesced(7)), checkpoints=[2, 5])
    decision = decided(found, policy="chameleon")
    assert (decision.policy, decision.first_step, decision.load, decision.transition) == ("checkpoint", 5, 5, None)
    assert decision.lost_layers == (2, 3)
    assert decision.plan == find_plan(context_of(found).costs).best.plan
    chosen = choice(found, policy="chameleon")
    assert chosen.course is not None
    assert decision.program == chosen.course.program
    again = decide(found, context_of(found), policy="chameleon", rate=RATE, prepared=chosen)
    assert again == (decision, chosen)
    with refused(NoHolderError):
        decided(dataclasses.replace(found, checkpoints=()), policy="chameleon")


def test_the_checkpoint_is_read_in_the_largest_layout_and_spares_stay_spare() -> None:
    # Five survivors: 3 pipelines of 1, 2 of 2 or 1 of 4 stages; five pipelines would not divide 6 micro-batches.
    plan = data_pipeline_plan(layer_costs=[1.0] * LAYERS, dp=1, pp=1, micro_batches=MICRO_BATCHES, workers=[5])
    decision = decided(
        cluster_state({worker: quiesced(0) for worker in range(5)}, plan=plan, committed=0, checkpoints=[0])
    )
    assert decision.plan.workers == (0, 1, 2, 3)
    assert {len(route.hops) for route in decision.plan.routes} == {2}


def test_a_split_backward_stays_split_after_a_checkpoint() -> None:
    plan = data_pipeline_plan(layer_costs=[1.0] * 4, dp=3, pp=2, micro_batches=6, split_backward=True)
    decision = decided(cluster_state(all_but(1, 3, 5, state=quiesced(7)), plan=plan, checkpoints=[7]))
    assert decision.plan.split_backward
    assert decision.action.endswith("0 steps repeated")


def test_without_a_last_holder_and_without_a_checkpoint_there_is_no_way_on() -> None:
    with pytest.raises(NoHolderError) as caught:
        decided(cluster_state(all_but(0, 2, 4, state=quiesced(7))))
    assert caught.value.layers == (0, 1)


@given(st.data(), shapes)
def test_any_loss_has_a_way_on_that_every_survivor_can_take(data: st.DataObject, shape: Shape) -> None:
    plan = pipelines(shape)
    lost = data.draw(losses(plan))
    live = [worker for worker in plan.workers if worker not in lost]
    assume(live)
    # The commit protocol allows this: some workers have applied step k, all others hold its reduced gradient.
    step = data.draw(st.integers(1, 50))
    anyone_applied = data.draw(st.booleans())
    states = {
        worker: data.draw(
            st.sampled_from([quiesced(step), quiesced(step - 1, reduced=True)])
            if anyone_applied
            else st.sampled_from([quiesced(step - 1, reduced=True), quiesced(step - 1)])
        )
        for worker in live
    }
    applied = max(state.committed for state in states.values())
    found = ClusterState(
        plan=plan,
        live=live,
        quiesced={worker: holding(state, plan, worker) for worker, state in states.items()},
        committed=data.draw(st.sampled_from([applied, step - 1])),
        last_vote=vote(applied - 1) if applied else None,
        checkpoints=[0],
    )
    costs = equal_costs(layers=shape.pp, micro_batches=shape.dp * shape.share, workers=shape.dp * shape.pp)
    decision = decided(found, costs=costs)
    assert set(decision.plan.workers) <= set(live)
    if survivable(plan, lost):
        assert decision.load == "keep"
        assert decision.first_step == applied
        for worker in decision.plan.workers:
            assert states[worker].committed == applied or decision.roll_forward == vote(applied - 1)
    else:
        assert (decision.load, decision.first_step) == (0, 0)


# --- another placement -----------------------------------------------------------------------------------------------


def test_a_re_partition_says_what_moves_and_rolls_forward_first() -> None:
    states = all_but(3, state=quiesced(7, reduced=True)) | {4: quiesced(8)}
    decision = decided(cluster_state(states), policy="repartition")
    assert decision.policy.startswith("repartition")
    assert (decision.first_step, decision.load, decision.roll_forward) == (8, "keep", vote(7))
    assert decision.transition is not None
    assert decision.transition.transfer.placement == decision.plan.placement
    assert decision.participants == (0, 1, 2, 4, 5)
    assert decision.action.startswith("step 7 applied, ")
    assert decision.action.endswith("; resumes at step 8")
    assert " to " in decision.action
    assert choice(cluster_state(states), policy="repartition").to_json()["chosen"] == decision.policy


def test_layers_that_were_received_already_do_not_move_again() -> None:
    states = all_but(3, state=quiesced(7))
    first = decided(cluster_state(states), policy="repartition").transition
    assert first is not None
    message = first.transfer.messages[0]
    found = cluster_state(states)
    receiver = found.quiesced[message.destination]
    more = receiver.model_copy(update={"layers": tuple(sorted({*receiver.layers, *message.layers}))})
    again = decided(
        dataclasses.replace(found, quiesced={**found.quiesced, message.destination: more}), policy="repartition"
    )
    assert again.transition is not None
    assert again.transition.transfer.total_bytes == first.transfer.total_bytes - message.num_bytes


def test_layers_of_a_shadow_holder_outside_the_plan_count_if_they_are_of_the_same_step() -> None:
    states = all_but(3, state=quiesced(7))
    found = cluster_state(states)
    for committed, reduced, held in [(7, False, (2, 3)), (6, True, (2, 3)), (6, False, ()), (5, True, ())]:
        shadow = quiesced(committed, reduced=reduced).model_copy(update={"layers": (2, 3)})
        live, reports = [*found.live, 6], {**found.quiesced, 6: shadow}
        joined = dataclasses.replace(found, live=live, quiesced=reports, shadows=(*PLAN.workers, 6))
        assert joined.held == {**found.held, 6: held}
        assert dataclasses.replace(joined, shadows=()).held[6] == ()


def test_a_policy_that_goes_back_to_a_checkpoint_needs_one() -> None:
    states = all_but(3, state=quiesced(7))
    with pytest.raises(ControlError):
        decided(cluster_state(states), policy="restart")
    decision = decided(cluster_state(states, checkpoints=[4]), policy="restart")
    assert (decision.policy, decision.load, decision.first_step) == ("restart", 4, 4)
    assert decision.action.startswith("back to the checkpoint of step 4, ")
    assert decision.lost_layers == ()


def test_what_begins_anew_waits_for_a_complete_checkpoint() -> None:
    states = all_but(3, state=quiesced(7))
    found_before = recovery.decide(context_of(cluster_state(states)), "restart", RATE)
    for checkpoints, load in (([], "keep"), ([4], 4)):
        found = cluster_state(states, checkpoints=checkpoints)
        spec, _ = decide(found, context_of(found), policy="chameleon", rate=RATE, prepared=found_before)
        assert spec.load == load


def test_without_a_loss_there_is_nothing_to_decide() -> None:
    found = cluster_state(all_but(state=quiesced(7)))
    spec, decision = decide(found, context_of(found), policy="repartition", rate=RATE)
    assert (spec.plan, spec.transition, decision) == (PLAN, None, None)


def test_layers_whose_holders_are_all_lost_come_from_whoever_has_received_them() -> None:
    # A transition that failed had brought layers 2 and 3 to workers 0 and 4, before their last holders were lost.
    found = cluster_state(all_but(1, 3, 5, state=quiesced(7)))
    got = {0: (0, 1, 2), 2: (0, 1), 4: (0, 1, 3)}
    states = {w: state.model_copy(update={"layers": got[w]}) for w, state in found.quiesced.items()}
    decision = decided(dataclasses.replace(found, quiesced=states))
    assert (decision.policy, decision.load, decision.first_step, decision.lost_layers) == ("from-copies", "keep", 7, ())
    assert decision.plan.workers == (0, 2, 4)
    assert decision.transition is not None
    assert decision.transition.keep == got
    assert decision.action.endswith("; resumes at step 7")


def test_a_layer_that_no_worker_has_received_is_lost() -> None:
    found = cluster_state(all_but(1, 3, 5, state=quiesced(7)))
    states = {**found.quiesced, 0: found.quiesced[0].model_copy(update={"layers": (0, 1, 2)})}
    with pytest.raises(NoHolderError) as caught:
        decided(dataclasses.replace(found, quiesced=states))
    assert caught.value.layers == (2, 3)


# --- newcomers -------------------------------------------------------------------------------------------------------


# Workers 0 and 1 hold everything.
TWO = data_pipeline_plan(layer_costs=[1.0] * LAYERS, dp=2, pp=1, micro_batches=MICRO_BATCHES)


def with_newcomer(*lost: int) -> ClusterState:
    """Worker 2 has come, and nothing of the model is with it."""
    live = {worker: quiesced(7) for worker in TWO.workers if worker not in lost}
    before = cluster_state(live, plan=TWO)
    states = {**before.quiesced, 2: quiesced(0).model_copy(update={"placed": 0})}
    return dataclasses.replace(before, live=[*live, 2], quiesced=states, newcomers={2})


def test_a_newcomer_is_considered_without_a_loss() -> None:
    decision = decided(with_newcomer())
    assert (decision.plan, decision.policy, decision.transition) == (TWO, recovery.STAY, None)
    assert [each.policy for each in choice(with_newcomer(), policy="reroute").candidates] == [recovery.STAY]
    assert decision.action == "resumes at step 7 with the same routes"


def test_a_newcomer_gets_a_place_where_that_pays() -> None:
    decision = decided(with_newcomer(), policy="repartition")
    assert decision.policy.startswith("repartition")
    assert (decision.first_step, decision.load) == (7, "keep")
    assert decision.transition is not None
    assert decision.transition.keep[2] == ()
    assert decision.plan.workers == (0, 1, 2)


@pytest.mark.parametrize("policy", sorted(recovery.POLICIES))
def test_every_policy_can_do_something_with_a_newcomer(policy: str) -> None:
    decision = decided(with_newcomer(), policy=policy)
    assert decision.load == "keep"
    assert decision.lost_layers == ()


def test_what_was_prepared_is_done_if_it_still_is_for_the_same() -> None:
    context = context_of(with_newcomer())
    found_before = recovery.decide(context, "repartition", RATE)
    # By the policy of this decision it could not have been chosen.
    found = with_newcomer()
    _, decision = decide(found, context_of(found), policy="reroute", rate=RATE, prepared=found_before)
    assert decision is found_before


def test_a_run_of_which_nothing_is_trained_begins_again_if_some_workers_have_not_loaded_their_layers() -> None:
    found = cluster_state({worker: quiesced(0) for worker in range(6)}, committed=0)
    plan = decided(dataclasses.replace(found, is_unloaded=True))
    assert (plan.load, plan.first_step, plan.plan) == ("initial", 0, PLAN)
