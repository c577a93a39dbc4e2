"""A loss in the middle of a step, for the coordinator: the step is completed, and a better plan is sought later."""

from __future__ import annotations

import asyncio

import pytest

from chameleon_ft.config import Batch, Parallel, Recovery
from chameleon_ft.coordinator.decisions.calibration import Calibration
from chameleon_ft.plan import LayerRange
from chameleon_ft.plan.rest import StepProgress
from chameleon_ft.protocol.messages import Migrate, PeerFailed, Quiesced
from chameleon_ft.schedule import OperationKind
from tests.coordinator.stage import Stage, scene, vote

LOWER, UPPER = LayerRange(0, 2), LayerRange(2, 4)
# Worker 1 is lost at the end of micro-batch 0, whose lower half has not run its backward.
HELD = {
    0: StepProgress(saved=frozenset({(0, LOWER)}), activations=frozenset({(0, 1)})),
    2: StepProgress(contributed=frozenset({(3, LOWER)})),
    3: StepProgress(contributed=frozenset({(3, UPPER)}), counted=frozenset({3})),
}


def report(stage: Stage, generation: int, committed: int, held: dict[int, StepProgress]) -> None:
    """Have workers report what they hold of the interrupted step."""
    for worker, own in held.items():
        stage.say(
            stage.ranks[worker],
            Quiesced(
                generation=generation,
                committed=committed,
                reduced=False,
                last_vote=vote(committed - 1),
                placed=generation - 1,
                layers=stage.layers_of(worker),
                progress=own,
            ),
        )


def lose_worker_1(stage: Stage, *, steps: int = 3) -> None:
    stage.train(steps=steps)
    stage.depart(stage.ranks[1])
    report(stage, 2, steps, HELD)


@scene()
async def test_the_step_is_completed_from_what_the_survivors_hold(stage: Stage) -> None:
    lose_worker_1(stage)
    order = stage.order()
    assert (order.generation, order.first_step, order.load, order.members) == (2, 3, "keep", (0, 2, 3))
    rests = {worker: stage.ranks[worker].begun.rest for worker in order.members}
    run = {
        worker: {(each.kind, each.micro_batch) for each in rest.program.of(worker)}
        for worker, rest in rests.items()
        if rest is not None
    }
    assert run.keys() == {0, 2, 3}
    # Worker 0 continues micro-batch 0 where it was, and worker 3 takes its upper half.
    assert (OperationKind.FORWARD, 0) not in run[0]
    assert {(OperationKind.BACKWARD, 0)} <= run[0]
    assert {(OperationKind.FORWARD, 0), (OperationKind.BACKWARD, 0)} <= run[3]
    assert rests[0] is not None
    assert (0, 1, True, 3) in rests[0].resends
    # Micro-batch 3 is complete.
    assert not any(micro_batch == 3 for own in run.values() for _, micro_batch in own)


@scene()
async def test_the_record_says_what_is_repeated_and_what_the_failure_cost(stage: Stage) -> None:
    lose_worker_1(stage)
    stage.start()
    (failure,) = stage.failures
    assert failure.is_salvaged
    assert failure.repeated_s == 0.0
    assert failure.failure_cost_steps is None
    stage.commit(3, step_s=0.05)
    (failure,) = stage.failures
    (cost,) = stage.events("failure_cost")
    assert (cost["incident_generations"], cost["step"]) == ([2], 3)
    assert failure.failure_cost_steps == cost["failure_cost_steps"]
    (decision,) = stage.events("decision")
    assert decision["trigger"] == "loss"
    assert decision["chosen"] == "reroute"
    assert decision["salvaged"]["repeated_share"] == 0.0


@scene()
async def test_the_time_of_a_step_that_no_operation_explains_comes_after_the_rest_too(stage: Stage) -> None:
    stage.train(steps=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Calibration, "unexplained", lambda *_: 1e6)
        stage.depart(stage.ranks[1])
        report(stage, 2, 3, HELD)
    (decision,) = stage.events("decision")
    rest_s = decision["salvaged"]["rest_s"]
    usual_s = stage.coordinator.state.detectors.watchdog.step_s
    assert rest_s > 0
    assert decision["stall"]["repeat_s"] >= rest_s - usual_s / 1e6, "and the time before the loss"


@scene()
async def test_the_rest_of_a_step_is_no_measure_of_a_step(stage: Stage) -> None:
    lose_worker_1(stage)
    stage.start()
    before = stage.coordinator.state.outcomes.recent_s
    stage.commit(3, step_s=0.001)
    assert stage.coordinator.state.outcomes.recent_s == before
    stage.commit(4, step_s=0.2)
    assert stage.coordinator.state.outcomes.recent_s == (*before, 0.2)


@scene(recovery=Recovery(policy="reroute", salvage=False))
async def test_without_salvage_the_step_is_repeated(stage: Stage) -> None:
    lose_worker_1(stage)
    assert stage.order().rest is None
    stage.start()
    assert not stage.failures[0].is_salvaged


@scene(recovery=Recovery(policy="recycle"))
async def test_a_baseline_repeats_the_step(stage: Stage) -> None:
    lose_worker_1(stage)
    assert stage.order().rest is None


@scene(workers=6, parallel=Parallel(dp=3, pp=2), batch=Batch(micro_batches=6, micro_batch_size=2))
async def test_a_loss_during_the_rest_leads_to_another_rest(stage: Stage) -> None:
    stage.train(workers=6)
    stage.depart(stage.ranks[1])
    held = {worker: StepProgress() for worker in (0, 2, 3, 4, 5)}
    held[0] = HELD[0]
    report(stage, 2, 3, held)
    stage.start()
    stage.depart(stage.ranks[3])
    del held[3]
    held[5] = StepProgress(contributed=frozenset({(0, UPPER)}), counted=frozenset({0}), gradients=frozenset({(0, 2)}))
    report(stage, 3, 3, held)
    order = stage.order()
    assert (order.generation, order.first_step, order.members) == (3, 3, (0, 2, 4, 5))
    rest = stage.ranks[0].begun.rest
    assert rest is not None
    (backward,) = (each for each in rest.program.of(0) if each.micro_batch == 0)
    assert (backward.kind, backward.receive_from) == (OperationKind.BACKWARD, 5)
    stage.start()
    stage.commit(3)
    (cost,) = stage.events("failure_cost")
    assert cost["incident_generations"] == [2, 3]
    assert {failure.failure_cost_steps for failure in stage.failures} == {cost["failure_cost_steps"]}


@scene()
async def test_a_step_that_some_worker_has_applied_is_not_completed_again(stage: Stage) -> None:
    stage.train()
    stage.depart(stage.ranks[1])
    report(stage, 2, 4, {0: StepProgress()})
    for worker in (2, 3):
        stage.quiesce(2, 3, worker, reduced=True)
    order = stage.order()
    assert order.first_step == 4
    assert order.roll_forward is not None
    assert order.rest is None


@scene(recovery=Recovery(policy="chameleon"), batch=Batch(micro_batches=60, micro_batch_size=1))
async def test_a_better_plan_is_found_while_the_next_steps_run(stage: Stage) -> None:
    watching = asyncio.create_task(stage.coordinator.wait())
    lose_worker_1(stage)
    stage.start()
    assert stage.order().transition is None
    stage.commit(3)
    while stage.coordinator.state.switches.next is None:
        await asyncio.sleep(0.05)
    moved = stage.ranks[0].last(Migrate)
    assert (moved.generation, {move.destination for move in moved.moves}) == (2, {0, 2, 3})
    assert stage.switch_to_the_end(4) == 5, "layers move in the generation that completes the step"
    order = stage.order()
    assert (order.generation, order.load, order.rest, order.transition) == (3, "keep", None, None)
    assert stage.layers_of(0) == (0, 1, 2, 3)
    first, second = stage.events("decision")
    assert (first["trigger"], first["chosen"]) == ("loss", "reroute")
    assert (second["trigger"], second["generation"]) == ("review", 3)
    (migration,) = stage.events("migration")
    assert (migration["generation"], migration["step"], migration["layers"]) == (2, 4, len(moved.moves))
    assert [event["policy"] for event in stage.events("plan")] == ["start", "reroute", second["chosen"]]
    assert second["prepared"]
    watching.cancel()


@scene(recovery=Recovery(policy="chameleon"), batch=Batch(micro_batches=60, micro_batch_size=1))
async def test_a_failed_message_without_a_loss_does_not_end_the_search_for_a_better_plan(stage: Stage) -> None:
    lose_worker_1(stage)
    stage.start()
    stage.commit(3)
    stage.say(stage.ranks[0], PeerFailed(generation=2, peer=None, error="a message failed"))
    stage.quiesce(3, 4)
    assert stage.order().generation == 3
    stage.start()
    assert stage.coordinator.state.scale_up.provisional_since_s is not None


@scene()
async def test_the_rest_of_a_step_without_a_loss_is_no_measure_either(stage: Stage) -> None:
    stage.train()
    stage.say(stage.ranks[0], PeerFailed(generation=1, peer=None, error="a message failed"))
    report(stage, 2, 3, {worker: HELD.get(worker, StepProgress()) for worker in range(4)})
    assert stage.order().rest is not None
    stage.start()
    stage.commit(3, step_s=0.001)
    stage.commit(4, step_s=0.2)
    assert stage.coordinator.state.outcomes.recent_s == (0.2,)
    *_, before, rest, _ = steps = stage.run.steps()
    assert [step.is_rest for step in steps] == [False, False, False, True, False]
    assert rest.step_s == pytest.approx(max(0.001, rest.time - before.time)), "it includes the stall"
