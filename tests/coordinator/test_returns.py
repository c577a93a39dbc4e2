"""Steps that a run goes on from after a loss: the next one, or that of a checkpoint."""

from __future__ import annotations

from chameleon_ft.config import Checkpoint
from chameleon_ft.protocol.messages import CheckpointSaved, CheckpointUnreadable
from chameleon_ft.storage.checkpoints import complete_checkpoints
from tests.coordinator.stage import Stage, scene
from tests.stored import layer_directory


@scene()
async def test_without_a_last_holder_all_return_to_the_checkpoint(stage: Stage) -> None:
    stage.train(steps=5)
    stage.save(2, 0, 0, 1, 2, 3)
    stage.save(4, 0, 0, 1)  # of this one only a part is there
    stage.reap(1)
    stage.reap(3)
    stage.quiesce(2, 5)
    order = stage.order()
    assert (order.first_step, order.load, order.members) == (2, 2, (0, 2))
    stage.start()
    assert {failure.policy for failure in stage.failures} == {"checkpoint"}
    assert {failure.lost_layers for failure in stage.failures} == {(2, 3)}
    assert [(failure.step, failure.resume_step) for failure in stage.failures] == [(5, 2), (5, 2)]
    stage.commit(2)
    assert [record.step for record in stage.run.steps()] == [0, 1, 2, 3, 4, 2]
    # Parts of a state that was given up complete no checkpoint, not even together with parts of the new state.
    stage.save(4, 0, 0, 1)
    stage.say(stage.ranks[2], CheckpointSaved(generation=1, step=4, layers=(2, 3)))
    assert [event["step"] for event in stage.events("checkpoint")] == [2]
    stage.save(4, 2, 2, 3)
    assert [event["step"] for event in stage.events("checkpoint")] == [2, 4]


@scene(checkpoint=Checkpoint(every=2, keep=100))
async def test_a_return_leaves_out_checkpoints_with_visible_damage(stage: Stage) -> None:
    stage.train(steps=7)
    for step in (2, 4, 6):
        stage.save(step, 0, 0, 1, 2, 3)
    (layer_directory(stage.run.checkpoints, 6, 1) / "tensors").unlink()
    (layer_directory(stage.run.checkpoints, 4, 2) / "tensors").write_text("cut")
    stage.reap(1)
    stage.reap(3)
    stage.quiesce(2, 7)
    assert (stage.order().first_step, stage.order().load) == (2, 2)
    first, second = stage.events("checkpoint_unreadable")
    assert first["message"].startswith("that of step 6 cannot be read and is not used again: ")
    assert first["message"].endswith("step-00000006/layer-0001/tensors is missing")
    assert second["message"].endswith("step-00000004/layer-0002/tensors has 3 bytes instead of 7")
    assert complete_checkpoints(stage.run.checkpoints) == [2]


def read_in_vain(stage: Stage, worker: int) -> None:
    order = stage.order()
    assert isinstance(order.load, int)
    message = CheckpointUnreadable(
        generation=order.generation, step=order.load, error="layer 3: a file is not as it was written", is_damaged=True
    )
    stage.say(stage.ranks[worker], message)


@scene(checkpoint=Checkpoint(every=2, keep=100))
async def test_all_go_back_to_an_older_checkpoint_if_one_worker_cannot_read_the_newest(stage: Stage) -> None:
    stage.train(steps=7)
    for step in (2, 4, 6):
        stage.save(step, 0, 0, 1, 2, 3)
    stage.reap(1)
    stage.reap(3)
    stage.quiesce(2, 7)
    assert (stage.order().load, stage.order().members) == (6, (0, 2))
    read_in_vain(stage, 2)
    stage.quiesce(3, 6, 0, layers=(0, 1, 2, 3))  # this one has read its layers
    stage.quiesce(3, 0, 2, layers=())
    assert (stage.order().load, stage.order().first_step, stage.order().members) == (4, 4, (0, 2))
    read_in_vain(stage, 0)
    stage.reap(2)
    stage.quiesce(4, 0, 0, layers=())
    assert (stage.order().load, stage.order().first_step, stage.order().members) == (2, 2, (0,))
    stage.start()
    stage.commit(2)
    assert stage.ended is None
    assert {failure.policy for failure in stage.failures} == {"checkpoint"}


@scene(checkpoint=Checkpoint(every=2, keep=100))
async def test_without_a_checkpoint_that_can_be_read_the_run_ends(stage: Stage) -> None:
    stage.train()
    stage.save(2, 0, 0, 1, 2, 3)
    stage.reap(1)
    stage.reap(3)
    stage.quiesce(2, 3)
    read_in_vain(stage, 2)
    stage.quiesce(3, 0, layers=())
    assert stage.ended == (
        "failed",
        "no checkpoint is left that can be read; that of step 2 cannot be read and is not used again: worker 2: "
        "layer 3: a file is not as it was written",
    )


@scene(steps=40)
async def test_a_fall_back_to_a_checkpoint_has_no_prediction(stage: Stage) -> None:
    stage.train()
    stage.save(2, 0, 0, 1)
    stage.save(2, 1, 2, 3)
    stage.reap(1)
    stage.reap(3)
    stage.recover(2)
    stage.commit(2, step_s=0.3)
    stage.coordinator.end("interrupted", "enough")
    assert await stage.coordinator.wait() == "interrupted"
    (outcome,) = stage.events("outcome")
    (decision,) = stage.events("decision")
    assert (decision["chosen"], outcome["policy"], outcome["predicted_stall_s"]) == (None, "checkpoint", None)
    assert (outcome["steps"], outcome["measured_step_s"]) == (1, 0.3)
    assert outcome["measured_stall_s"] >= 0.1, "the step that is run again is lost"


@scene()
async def test_without_a_last_holder_and_without_a_checkpoint_the_run_ends(stage: Stage) -> None:
    stage.train()
    stage.reap(1)
    stage.reap(3)
    stage.quiesce(2, 3)
    assert stage.ended is not None
    assert stage.ended[0] == "failed"
    assert stage.ended[1].startswith("no live worker holds layers 2-3;")
    assert stage.ended[1].endswith("there is no complete checkpoint in this run")
    assert {failure.policy for failure in stage.failures} == {"stop"}
