"""The planner's predictions, and what comes back to them of what was observed."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from chameleon_ft.cluster import Link
from chameleon_ft.config import Batch, Parallel, Recovery, RunConfig
from chameleon_ft.coordinator.decisions.cluster_state import ClusterState
from chameleon_ft.coordinator.decisions.planner import ChosenGeneration, Planner
from chameleon_ft.cost.profile import Fingerprint, Profile
from chameleon_ft.cost.transition import StallModel
from chameleon_ft.plan import LayerRange, Plan, data_pipeline_plan
from chameleon_ft.protocol.messages import Quiesced
from chameleon_ft.protocol.parts import OperationTimes
from chameleon_ft.recovery import FailureModel, complete_step, decide
from chameleon_ft.recovery.generation import GenerationSpec, PlannedRest
from chameleon_ft.schedule import CostModel, OperationKind, default_limits, list_schedule, replay
from chameleon_ft.transfer import Message, Transfer
from chameleon_ft.workload import LayerCost
from tests.coordinator.stage import JOB, LAYERS
from tests.progress import progress_at
from tests.strategies import equal_costs, recomputing

HOSTS = dict.fromkeys(range(6), "a host")
PHASES = StallModel(detect_s=0.25, stop_s=0.25, decide_s=0.0, regroup_s=0.5)
PROFILE = Profile(
    name="four layers",
    fingerprint=Fingerprint(model="four", micro_batch_size=2, dtype="", device="", threads=1, versions={}),
    source="derived",
    provenance="by hand",
    layers=(LayerCost("layer", 0.01, 0.015, 0.005, param_bytes=64, gradient_bytes=64, output_bytes=64),) * LAYERS,
    intra_host=Link(1e-5, 1e9),
)


def planner(
    *, profile: Profile | None = None, plan: Plan | None = None, policy: str = "chameleon", every: int = 0
) -> Planner:
    config = RunConfig.model_validate(
        {
            "job": "a.job:job",
            "workers": 6,
            "parallel": Parallel(dp=3, pp=2),
            "batch": Batch(micro_batches=12, micro_batch_size=2),
            "recovery": Recovery.model_validate({"policy": policy}),
            "checkpoint": {"every": every},
        }
    )
    return Planner(config, JOB, profile=profile, plan=plan)


def begin(by: Planner) -> GenerationSpec:
    spec = by.start(range(6), HOSTS, checkpoint=None)
    by.begin(spec, HOSTS)
    return spec


def lose(by: Planner, decision: GenerationSpec, worker: int) -> ChosenGeneration:
    """Return the generation after the loss of a worker."""
    live = [each for each in range(6) if each != worker]
    quiesced = {
        each: Quiesced(
            generation=2,
            committed=7,
            reduced=False,
            last_vote=None,
            placed=1,
            layers=decision.plan.placement.layers_of(each),
        )
        for each in live
    }
    cluster = ClusterState(
        plan=decision.plan, live=live, quiesced=quiesced, committed=7, last_vote=None, checkpoints=(), hosts=HOSTS
    )
    context = by.context(decision, live, HOSTS, phases=PHASES, repeat_s=0.5)
    rate = FailureModel(worker_mtbf_s=3600.0, prior_failures=1.0, failures=1, worker_s=60.0)
    return by.recover(cluster, context, rate, prepared=None)


def report(by: Planner, factors: Mapping[int, float], *, steps: int, forward_s: float, backward_s: float) -> None:
    """Have workers 0 to 5 report operations that took so many times what is given."""
    for _ in range(steps):
        for worker in range(6):
            factor = factors.get(worker, 1.0)
            by.calibration.operations(
                worker, OperationTimes(forward_s=factor * forward_s, backward_s=factor * backward_s, longest_s=1.0)
            )


def corrections(decision: ChosenGeneration) -> dict[str, float]:
    """The factors by which its predictions were corrected."""
    found = decision.inputs["corrections"]
    assert isinstance(found, dict)
    return {name: factor for name, factor in found.items() if name not in ("slow", "slow_links")}


def predictions(decision: ChosenGeneration) -> dict[str, float]:
    assert decision.decision is not None
    return {each.policy: each.step_s for each in decision.decision.candidates if each.step_s is not None}


def test_what_a_recomputing_worker_runs_again_is_not_counted_twice() -> None:
    plan = data_pipeline_plan(layer_costs=[1.0] * LAYERS, dp=3, pp=2, micro_batches=12)
    plain, again = planner(plan=plan), planner(plan=recomputing(plan, range(6)))
    for by, again_s in ((plain, 0.0), (again, 0.01)):
        begin(by)
        # Two layers each, of 10 ms and 20 ms; of these one is run again, for the first and the last layer are not.
        report(by, {}, steps=3, forward_s=0.02, backward_s=0.04 + again_s)
        planned = begin(by)
        assert planned.costs_from == "measured"
        for layer in planned.costs.workload.layers:
            assert (layer.forward_s, layer.backward_s) == pytest.approx((0.01, 0.02))
        operation = next(each for each in planned.program.of(0) if each.kind is OperationKind.BACKWARD)
        assert planned.costs.operation_s(0, operation) == pytest.approx(0.04 + again_s)


def test_with_a_profile_observed_operations_correct_every_prediction() -> None:
    before = planner(profile=PROFILE)
    uncorrected = predictions(lose(before, begin(before), 1))
    by = planner(profile=PROFILE)
    decision = begin(by)
    report(by, {}, steps=4, forward_s=3 * 0.02, backward_s=3 * 0.04)
    lost = lose(by, decision, 1)
    assert corrections(lost) == pytest.approx({"operations": 3.0, "step": 1.0, "transfer": 1.0, "migration": 1.0})
    corrected = predictions(lost)
    assert corrected.keys() == uncorrected.keys()
    for policy, step_s in corrected.items():
        assert step_s == pytest.approx(3 * uncorrected[policy], rel=0.02), "all but the messages"
    assert lost.spec.costs_from == "corrected"
    # Corrected costs are not the reference of the next comparison.
    report(by, {}, steps=12, forward_s=3 * 0.02, backward_s=3 * 0.04)
    assert corrections(lose(by, decision, 1))["operations"] == pytest.approx(3.0)


@pytest.mark.parametrize("profile", [None, PROFILE], ids=["measured", "profile"])
def test_what_operations_do_not_explain_makes_all_steps_longer(profile: Profile | None) -> None:
    by = planner(profile=profile)
    decision = begin(by)
    report(by, {}, steps=4, forward_s=0.02, backward_s=0.04)
    before = predictions(lose(by, decision, 1))
    for _ in range(6):
        by.calibration.step(1.0)
    lost = lose(by, decision, 1)
    after = predictions(lost)
    assert corrections(lost)["step"] > 1
    for policy, step_s in after.items():
        assert step_s == pytest.approx(corrections(lost)["step"] * before[policy])


@pytest.mark.parametrize("profile", [None, PROFILE], ids=["measured", "profile"])
def test_decisions_go_round_a_worker_that_is_persistently_slower(profile: Profile | None) -> None:
    by = planner(profile=profile, policy="repartition")
    decision = begin(by)
    report(by, {}, steps=11, forward_s=0.02, backward_s=0.04)
    fair = shares(lose(by, decision, 1).spec.plan)
    by.calibration.slow = {3: 0.25}
    lost = lose(by, decision, 1)
    assert lost.inputs["corrections"] == {**corrections(lost), "slow": {"3": 0.25}, "slow_links": {}}
    found = shares(lost.spec.plan)
    assert found[3] < 0.75 * fair[3]
    assert found[3] < min(found[worker] for worker in (0, 2, 4, 5))


def shares(plan: Plan) -> dict[int, int]:
    """Layers that pass through each worker in a step, all micro-batches together."""
    found = dict.fromkeys(range(6), 0)
    for route in plan.routes:
        for hop in route.hops:
            found[hop.worker] += len(hop.layers)
    return found


def test_transfers_that_took_longer_make_stalls_longer_where_something_moves() -> None:
    by = planner(profile=PROFILE)
    decision = begin(by)
    before = lose(by, decision, 1)
    moved = Transfer(
        placement=decision.plan.placement,
        roles={},
        rounds=((Message(0, 1, LayerRange(0, 1), 10**9),),),
    )
    by.transferred(moved, 5 * PROFILE.intra_host.message_s(10**9), HOSTS)
    after = lose(by, decision, 1)
    assert before.decision is not None
    assert after.decision is not None
    pairs = list(zip(before.decision.candidates, after.decision.candidates, strict=True))
    assert any(old.moved_bytes for old, _ in pairs)
    for old, new in pairs:
        assert old.transfer_s is not None
        assert new.transfer_s == pytest.approx(5 * old.transfer_s)
        assert old.stall_s is not None
        assert new.stall_s == pytest.approx(old.stall_s + 4 * old.transfer_s)


def test_a_return_to_a_checkpoint_costs_the_steps_since_it() -> None:
    by = planner(profile=PROFILE, every=10)
    decision = begin(by)
    report(by, {}, steps=3, forward_s=0.02, backward_s=0.04)
    context = by.context(decision, range(6), HOSTS, phases=PHASES, repeat_s=0.5, unsaved=5)
    stays = decide(context, "reroute", FailureModel(worker_mtbf_s=3600.0, prior_failures=1.0)).chosen
    assert stays is not None
    assert stays.step_s is not None
    assert context.return_s == pytest.approx(context.restart_cost_s + 5 * stays.step_s)
    assert context.checkpoints.longest_s == pytest.approx(10 * stays.step_s)


def test_what_was_known_is_told() -> None:
    by = planner(profile=PROFILE)
    event = lose(by, begin(by), 1).to_json()
    assert json.loads(json.dumps(event)) == event
    assert (event["step"], event["lost"], event["live"], event["plan"]) == (7, [1], 5, "3 pipelines of 2 stages")
    # All are on one host.
    assert event["rate"] == {
        "failures": 1,
        "incidents": 1,
        "together": {},
        "bursts": 0,
        "worker_s": 60.0,
        "prior_failures": 1.0,
        "worker_mtbf_s": 3600.0,
        "host_failure_fraction": None,
    }
    phases = {"detect_s": 0.25, "stop_s": 0.25, "decide_s": 0.0, "regroup_s": 0.5}
    assert event["stall"] == {"repeat_s": 0.5, **phases, "restart_cost_s": 300.0}
    assert event["horizon_s"] == pytest.approx(156.55, abs=0.01)
    rerouted = planner(policy="reroute")
    decision = lose(rerouted, begin(rerouted), 1).spec
    assert lose(rerouted, decision, 2).inputs["plan"] == "2 pipelines of 2 stages; 2 detours"


def test_a_worker_knows_which_gradients_it_is_sent_again() -> None:
    plan = data_pipeline_plan(
        layer_costs=[1.0] * 6, dp=3, pp=3, micro_batches=12, workers=range(9), split_backward=True
    )
    costs = equal_costs(layers=6, micro_batches=12, workers=9)
    timeline = replay(list_schedule(plan, costs), costs)
    left = CostModel(costs.workload, costs.cluster.without([4]))
    seen = 0
    for tenth in range(1, 10):
        progress = progress_at(plan, timeline, tenth / 10 * timeline.step_s, lost={4})
        step = complete_step(plan, progress, left, default_limits(plan))
        assert step is not None
        sent = [each for own in step.scheduled.resends.values() for each in own if not each.forward]
        scheduled = step.scheduled
        rest = PlannedRest(
            remaining=step.rest, program=scheduled.program, resends=scheduled.resends, rest_s=step.rest_s
        )
        rests = rest.orders(progress)
        for worker in progress:
            known = rests[worker].resent_gradients
            assert sorted(known) == sorted((each.micro_batch, each.layer) for each in sent if each.receiver == worker)
        seen += len(sent)
    assert seen
