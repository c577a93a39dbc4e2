"""Losses of several workers, of spares, and at the end of a run; and what is predicted of the next one."""

from __future__ import annotations

from chameleon_ft.config import Batch, Parallel
from chameleon_ft.protocol.messages import Finished, PeerFailed, Started, Stop
from tests.coordinator.stage import THREE_PIPELINES, Stage, scene


@scene(**THREE_PIPELINES)
async def test_what_belongs_to_a_generation_that_is_over_is_passed_over(stage: Stage) -> None:
    stage.train(workers=6)
    stage.reap(0)
    stage.quiesce(2, 3)
    stage.reap(3)
    stage.quiesce(2, 3)  # the answers to the stop before
    stage.say(stage.ranks[1], Started(generation=2))
    stage.say(stage.ranks[1], PeerFailed(generation=2, peer=5, error="reset"))
    assert stage.order().generation == 2
    assert stage.failures == []
    stage.quiesce(3, 3)
    assert stage.order().members == (1, 2, 4, 5)


@scene(steps=3)
async def test_a_loss_while_the_last_checkpoint_is_written(stage: Stage) -> None:
    stage.train(steps=3)
    stage.reap(1)
    stage.quiesce(2, 3)
    order = stage.order()
    assert (order.first_step, order.members) == (3, (0, 2, 3))
    stage.start()
    stage.finish(3)
    assert stage.ended == ("finished", "all steps are trained")
    assert [failure.worker for failure in stage.failures] == [1]


@scene(steps=3)
async def test_a_worker_may_go_once_it_has_finished(stage: Stage) -> None:
    stage.train(steps=3)
    stage.say(stage.ranks[1], Finished(generation=1))
    stage.reap(1)
    assert not stage.ranks[0].count(Stop)
    for worker in (0, 2, 3):
        stage.say(stage.ranks[worker], Finished(generation=1))
    assert stage.ended == ("finished", "all steps are trained")
    assert stage.failures == []
    assert [(event["worker"], event["cause"]) for event in stage.events("left")] == [(1, "SIGKILL")]


@scene(steps=3)
async def test_workers_that_are_all_lost_before_the_last_checkpoint_have_trained_all_steps(stage: Stage) -> None:
    stage.train(steps=3)
    for worker in range(4):
        stage.reap(worker)
    assert stage.ended is not None
    status, reason = stage.ended
    assert status == "failed"
    assert reason.startswith("no worker is left; all steps are trained")


# Of five survivors only four can be used: two micro-batches go through one or two pipelines, of four layers at most.
WITH_A_SPARE = {"workers": 8, "parallel": Parallel(dp=2, pp=4), "batch": Batch(micro_batches=2, micro_batch_size=1)}


def leave_a_spare(stage: Stage) -> None:
    """Lose both holders of stage 0 and one more: 2, 3, 5 and 6 are to go on from the checkpoint, and 7 is spare."""
    stage.train(workers=8)
    stage.save(2, 0, 0, 1, 2, 3)
    for worker in (0, 4, 1):
        stage.reap(worker)
    stage.quiesce(2, 3)
    assert stage.order().members == (2, 3, 5, 6)


@scene(**WITH_A_SPARE)
async def test_a_spare_that_is_lost_in_an_incident_is_recorded_with_it(stage: Stage) -> None:
    leave_a_spare(stage)
    stage.reap(7)
    assert stage.failures == [], "the incident is not over"
    stage.start()
    assert [failure.worker for failure in stage.failures] == [0, 4, 1, 7]
    assert len({failure.generation for failure in stage.failures}) == 1


@scene(**WITH_A_SPARE)
async def test_a_spare_is_used_by_the_next_layout(stage: Stage) -> None:
    leave_a_spare(stage)
    stage.start()
    stage.commit(2)
    stage.reap(2)
    stage.reap(5)
    stage.quiesce(3, 3)
    assert stage.order().members == (3, 6, 7)
    assert stage.order().load == 2
    stage.start()
    assert stage.failures[-1].policy == "checkpoint"


@scene(steps=40)
async def test_what_came_of_a_decision_is_recorded_after_ten_steps(stage: Stage) -> None:
    stage.train()
    stage.reap(1)
    failure = stage.recover(2)
    for step in range(3, 12):
        stage.commit(step, step_s=0.2)
    assert stage.events("outcome") == []
    stage.commit(12, step_s=0.2)
    (outcome,) = stage.events("outcome")
    (decision,) = stage.events("decision")
    (chosen,) = decision["candidates"]
    assert (outcome["generation"], outcome["policy"], outcome["steps"]) == (2, "reroute", 10)
    assert (outcome["predicted_step_s"], outcome["predicted_stall_s"]) == (chosen["step_s"], chosen["stall_s"])
    assert outcome["measured_step_s"] == 0.2
    assert outcome["measured_stall_s"] >= failure.stall_s - 1e-3
    assert (decision["step"], decision["lost"], decision["live"]) == (3, [1], 3)
    past_s = decision["stall"]["repeat_s"] + decision["stall"]["detect_s"] + decision["stall"]["stop_s"]
    assert past_s <= chosen["stall_s"]


@scene(steps=40)
async def test_what_steps_take_corrects_the_next_prediction(stage: Stage) -> None:
    stage.train()
    stage.reap(1)
    stage.recover(2)
    for step in range(3, 8):
        stage.commit(step, step_s=100.0)
    stage.reap(0)
    stage.recover(3, 8)
    first, second = stage.events("decision")
    assert first["corrections"] == {
        "operations": 1.0,
        "step": 1.0,
        "transfer": 1.0,
        "migration": 1.0,
        "slow": {},
        "slow_links": {},
    }
    assert second["corrections"]["step"] > 100
    assert second["candidates"][0]["step_s"] > 100
    assert [outcome["steps"] for outcome in stage.events("outcome")] == [5], "the first one has ended early"
