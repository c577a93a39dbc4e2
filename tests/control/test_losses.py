"""Losses of workers: every detection path, in every phase, and the orders that follow."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from chameleon_ft.config import Batch, Checkpoint, Parallel
from chameleon_ft.control.wire.messages import (
    CheckpointSaved,
    CheckpointUnreadable,
    Crashed,
    Finish,
    Finished,
    Kill,
    PeerFailed,
    Position,
    Probe,
    ProcessState,
    Quiesced,
    Started,
    StartGeneration,
    Stop,
    WorkerExited,
)
from chameleon_ft.errors import ControlError
from chameleon_ft.observe import FailureRecord, FaultLog, complete_checkpoints, layer_directory
from tests.control.stage import Puppet, Stage, scene, vote

THREE_PIPELINES: dict[str, Any] = {"workers": 6, "parallel": Parallel(dp=3, pp=2)}


def lost(stage: Stage) -> list[tuple[int, str, str]]:
    return [(failure.worker, failure.noticed_by, failure.cause) for failure in stage.failures]


def go_on(stage: Stage, generation: int, committed: int = 3) -> FailureRecord:
    """Have the survivors of a loss quiesce and begin again; return the newest record."""
    stage.quiesce(generation, committed)
    stage.start()
    return stage.failures[-1]


def probe_of(stage: Stage) -> int:
    return stage.host.last(Probe).probe


# --- the ways to notice it -------------------------------------------------------------------------------------------


@scene()
async def test_a_reaped_process(stage: Stage) -> None:
    stage.train()
    stage.reap(1)
    assert stage.ranks[1].dropped
    assert stage.host.last(Kill).worker == 1
    assert {worker for worker, rank in stage.ranks.items() if rank.count(Stop)} == {0, 2, 3}
    stage.quiesce(2, 3, 0, 2)
    assert stage.ranks[0].last(StartGeneration).generation == 1, "not before all survivors have quiesced"
    stage.quiesce(2, 3, 3)
    order = stage.ranks[0].last(StartGeneration)
    assert (order.generation, order.members, order.first_step, order.load) == (2, (0, 2, 3), 3, "keep")
    assert stage.failures == [], "the outage is not over"
    stage.start([2])
    (failure,) = stage.failures
    assert (failure.worker, failure.noticed_by, failure.cause, failure.policy) == (1, "child", "SIGKILL", "reroute")
    assert (failure.step, failure.resume_step, failure.generation) == (3, 3, 2)
    stage.commit(3)
    assert stage.run.steps()[-1].workers == 3


@scene()
async def test_a_closed_connection(stage: Stage) -> None:
    stage.train()
    stage.depart(stage.ranks[1])
    assert stage.host.last(Kill).worker == 1, "whatever is left of it is ended"
    assert go_on(stage, 2).cause == "control connection closed"


@scene()
async def test_the_cause_is_the_best_known_at_the_end(stage: Stage) -> None:
    stage.train()
    stage.depart(stage.ranks[1])
    stage.reap(1, -6)
    go_on(stage, 2)
    assert lost(stage) == [(1, "connection", "SIGABRT")]


@scene()
async def test_a_lost_heartbeat(stage: Stage) -> None:
    stage.train()
    stage.silence(stage.ranks[1])
    assert stage.host.last(Probe) == Probe(probe=0, worker=1)
    stage.say(stage.host, ProcessState(probe=0, worker=1, stopped=True))
    stage.silence(stage.ranks[1])
    stage.say(stage.host, ProcessState(probe=0, worker=1, stopped=True))
    stage.reap(1)  # fenced, and that is not why it is lost
    go_on(stage, 2)
    assert lost(stage) == [(1, "heartbeat", "no heartbeat, because its process is stopped")]


@scene()
async def test_a_lost_host_is_the_loss_of_its_workers(stage: Stage) -> None:
    stage.train()
    for worker in (2, 3):
        stage.silence(stage.ranks[worker])  # as yet, the agent may know that they live
    stage.silence(stage.host)
    assert stage.ended is None
    assert [event["host"] for event in stage.events("host_lost")] == ["a host"]
    assert not stage.ranks[2].dropped
    for worker in (2, 3):
        stage.silence(stage.ranks[worker])
    stage.quiesce(2, 3, 0, 1)
    assert stage.ended is None
    assert stage.order().members == (0, 1)


async def find_stopped(stage: Stage, worker: int) -> None:
    """Have the agent answer probes: the process of a worker is stopped, and those of the others run."""
    for _ in range(20):
        before = stage.host.count(Probe)
        while stage.host.count(Probe) == before:
            await asyncio.sleep(0.05)
        for each in stage.live():
            stage.say(stage.host, ProcessState(probe=probe_of(stage), worker=each, stopped=each == worker))
        if stage.coordinator.state.members[worker].lost:
            return
    raise AssertionError(f"worker {worker} is not found")


@scene()
async def test_a_stopped_process(stage: Stage) -> None:
    watching = asyncio.create_task(stage.coordinator.wait())
    stage.train()
    await find_stopped(stage, 1)
    assert go_on(stage, 2).cause == "hung: its process is stopped"
    assert lost(stage)[0][:2] == (1, "watchdog")
    watching.cancel()


@scene()
async def test_a_worker_stuck_in_an_operation(stage: Stage) -> None:
    watching = asyncio.create_task(stage.coordinator.wait())
    stage.train()
    while not stage.ranks[1].count(Probe):
        await asyncio.sleep(0.05)
    for worker in range(4):
        stage.say(
            stage.ranks[worker],
            Position(
                probe=stage.ranks[worker].last(Probe).probe,
                doing="B3",
                waiting=worker != 1,
                since_s=60.0,
            ),
        )
    assert go_on(stage, 2).cause == "hung: in B3 for 60.0 s"
    watching.cancel()


@scene()
async def test_no_worker_is_probed_while_steps_are_committed(stage: Stage) -> None:
    watching = asyncio.create_task(stage.coordinator.wait())
    stage.train(steps=0)
    for step in range(10):
        stage.commit(step, step_s=1.0)
        await asyncio.sleep(1.0)
    assert not stage.host.count(Probe)
    watching.cancel()


@scene()
async def test_a_worker_that_does_not_come_to_rest_is_looked_for(stage: Stage) -> None:
    watching = asyncio.create_task(stage.coordinator.wait())
    stage.train()
    stage.reap(1)
    stage.quiesce(2, 3, 0, 2)
    await find_stopped(stage, 3)
    assert stage.ended is not None, "1 and 3 were the holders of stage 1"
    assert [failure.worker for failure in stage.failures] == [1, 3]
    watching.cancel()


@scene(**THREE_PIPELINES)
async def test_workers_that_never_come_to_rest_are_given_up(stage: Stage) -> None:
    watching = asyncio.create_task(stage.coordinator.wait())
    stage.train(workers=6)
    stage.reap(1)
    stage.quiesce(2, 3, 0, 2, 5)
    while stage.order().generation == 1:  # 3 and 4 answer whatever they are asked, and never leave their operation
        await asyncio.sleep(1.0)
    assert stage.order().members == (0, 2, 5)
    stage.start()
    assert [(failure.worker, failure.cause) for failure in stage.failures] == [
        (1, "SIGKILL"),
        (3, "hung: it does not leave its operation"),
        (4, "hung: it does not leave its operation"),
    ]
    watching.cancel()


@scene()
async def test_a_worker_that_does_not_regroup_is_looked_for(stage: Stage) -> None:
    watching = asyncio.create_task(stage.coordinator.wait())
    stage.train()
    stage.reap(1)
    stage.quiesce(2, 3)
    await find_stopped(stage, 0)
    assert stage.ranks[3].last(Stop).generation == 3
    go_on(stage, 3)
    assert [failure.worker for failure in stage.failures] == [1, 0]
    watching.cancel()


@scene()
async def test_the_peer_that_most_messages_failed_with(stage: Stage) -> None:
    stage.train()
    for worker, peer in [(2, 3), (1, 2), (0, 1), (3, 1)]:
        stage.say(stage.ranks[worker], PeerFailed(generation=1, peer=peer, error="reset"))
    stage.quiesce(2, 3)
    assert stage.ranks[1].dropped
    assert stage.order().members == (0, 2, 3)
    stage.start()
    assert lost(stage) == [(1, "peer", "messages with it failed: reset")]


@scene()
async def test_a_peer_report_is_explained_by_a_loss_that_is_noticed_otherwise(stage: Stage) -> None:
    stage.train()
    stage.say(stage.ranks[0], PeerFailed(generation=1, peer=3, error="reset"))
    stage.reap(1)
    go_on(stage, 2)
    assert lost(stage) == [(1, "child", "SIGKILL")]
    assert not stage.ranks[3].dropped


@scene()
async def test_a_report_about_a_peer_that_takes_no_part_blames_no_worker(stage: Stage) -> None:
    stage.train()
    stage.say(stage.ranks[0], PeerFailed(generation=1, peer=99, error="reset"))
    stage.quiesce(2, 3)
    assert stage.order().generation == 2
    assert stage.live() == [0, 1, 2, 3]


@scene()
async def test_messages_that_fail_without_a_culprit_are_tried_again_a_few_times(stage: Stage) -> None:
    stage.train()
    for generation in range(1, 4):
        stage.say(stage.ranks[0], PeerFailed(generation=generation, peer=None, error="a collective"))
        stage.quiesce(generation + 1, 3)
        assert stage.order().members == (0, 1, 2, 3)
        stage.start()
    assert stage.failures == []
    stage.say(stage.ranks[0], PeerFailed(generation=4, peer=None, error="a collective"))
    stage.quiesce(5, 3)
    assert stage.ended is not None
    status, reason = stage.ended
    assert status == "failed"
    assert "messages failed 4 times in a row though no worker is lost, at last because a collective" in reason
    reports = [event["reports"] for event in stage.events("messages_failed")]
    assert reports == [[{"reporter": 0, "peer": None, "error": "a collective"}]] * 4


@scene(steps=50)
async def test_a_step_in_between_makes_up_for_messages_that_failed(stage: Stage) -> None:
    stage.train(steps=0)
    for generation in range(1, 9):
        stage.commit(generation - 1)
        stage.say(stage.ranks[0], PeerFailed(generation=generation, peer=None, error="a collective"))
        stage.quiesce(generation + 1, generation)
        stage.start()
    assert stage.ended is None


# --- several losses --------------------------------------------------------------------------------------------------


@scene(**THREE_PIPELINES)
async def test_two_at_once(stage: Stage) -> None:
    stage.train(workers=6)
    stage.reap(0)
    stage.reap(3)
    stage.quiesce(2, 3)
    assert stage.order().members == (1, 2, 4, 5)
    stage.start()
    assert [(failure.worker, failure.generation) for failure in stage.failures] == [(0, 2), (3, 2)]


@scene(**THREE_PIPELINES)
async def test_a_loss_while_the_others_come_to_rest(stage: Stage) -> None:
    stage.train(workers=6)
    stage.reap(0)
    stage.quiesce(2, 3, 1, 2, 3)
    stage.reap(3)  # it has quiesced
    stage.quiesce(2, 3, 4)
    assert stage.order().generation == 1
    stage.reap(5)  # and this was the last that had not
    assert stage.order().members == (1, 2, 4)
    assert stage.order().generation == 2, "one stop was enough"
    stage.start()
    assert [failure.worker for failure in stage.failures] == [0, 3, 5]


@scene(**THREE_PIPELINES)
async def test_a_loss_while_the_others_regroup(stage: Stage) -> None:
    stage.train(workers=6)
    stage.reap(0)
    stage.quiesce(2, 3)
    stage.reap(3)
    assert stage.ranks[1].last(Stop).generation == 3
    stage.quiesce(3, 3)
    assert stage.order().members == (1, 2, 4, 5)
    stage.start()
    assert [(failure.worker, failure.generation) for failure in stage.failures] == [(0, 3), (3, 3)]


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


@scene(**THREE_PIPELINES)
async def test_messages_of_a_lost_worker_are_ignored(stage: Stage) -> None:
    stage.train(workers=6)
    stage.reap(3)
    stage.commit(3, worker=3)  # was on its way when it was fenced
    stage.quiesce(2, 3, 3)
    assert len(stage.run.steps()) == 3
    assert stage.events("refused") == []
    stage.depart(stage.ranks[3])
    stage.reap(3)
    go_on(stage, 2)
    assert [failure.worker for failure in stage.failures] == [3]


@scene()
async def test_an_interrupt_in_an_outage_is_remembered(stage: Stage) -> None:
    stage.train()
    stage.reap(1)
    stage.coordinator.interrupt()
    assert [worker for worker, rank in stage.ranks.items() if rank.count(Finish)] == [0, 2, 3]
    stage.quiesce(2, 3)
    stage.start()
    stage.finish(3)
    assert stage.ended == ("interrupted", "interrupted by the user, with a checkpoint")


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


# --- where it goes on ------------------------------------------------------------------------------------------------


@scene()
async def test_a_step_that_one_worker_applied_is_applied_by_all(stage: Stage) -> None:
    stage.train()
    stage.commit(3, worker=1)
    stage.reap(1)
    stage.quiesce(2, 3, reduced=True)
    order = stage.order()
    assert (order.first_step, order.roll_forward) == (4, vote(3))


@scene()
async def test_states_that_do_not_fit_together_end_the_run(stage: Stage) -> None:
    stage.train()
    stage.reap(1)
    stage.quiesce(2, 3, 0, 2)
    stage.quiesce(2, 1, 3)
    assert stage.ended is not None
    assert stage.ended[0] == "failed"
    assert "cannot follow the others to step 3" in stage.ended[1]
    assert stage.failures[0].policy == "stop"


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


@scene(checkpoint=Checkpoint(every=1))
async def test_when_no_worker_is_left_the_run_ends(stage: Stage) -> None:
    stage.train()
    stage.save(2, 0, 0, 1, 2, 3)
    for worker in range(4):
        stage.reap(worker)
    assert stage.ended == ("failed", "no worker is left")
    assert len(stage.failures) == 4


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
async def test_a_spare_that_is_lost_disturbs_no_other(stage: Stage) -> None:
    leave_a_spare(stage)
    stage.start()
    stage.reap(7)
    assert [failure.worker for failure in stage.failures] == [0, 4, 1, 7]
    assert stage.ranks[2].count(Stop) == 1
    stage.commit(2)
    assert stage.ended is None


@scene(**WITH_A_SPARE)
async def test_a_spare_that_is_lost_in_an_outage_is_recorded_with_it(stage: Stage) -> None:
    leave_a_spare(stage)
    stage.reap(7)
    assert stage.failures == [], "the outage is not over"
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


# --- errors of a rank's own code -------------------------------------------------------------------------------------


@scene()
async def test_an_error_in_one_worker_is_its_loss(stage: Stage) -> None:
    stage.train()
    stage.say(stage.ranks[1], Crashed(error="RuntimeError: bad memory"))
    stage.reap(1, 1)
    go_on(stage, 2)
    assert lost(stage) == [(1, "self", "RuntimeError: bad memory")]


@scene(**THREE_PIPELINES)
async def test_the_same_error_in_the_same_step_of_another_worker_is_the_jobs(stage: Stage) -> None:
    stage.train(workers=6)
    stage.say(stage.ranks[1], Crashed(error="ValueError: a bug"))
    stage.say(stage.ranks[2], Crashed(error="ValueError: a bug"))
    assert stage.ended is not None
    assert stage.ended[1].startswith("worker 2 failed in step 3: ValueError: a bug; see ")
    assert stage.ended[1].endswith("worker-2.log")
    assert stage.failures == [], "worker 1 has not failed either"


@scene(**THREE_PIPELINES)
async def test_another_error_or_another_step_is_another_loss(stage: Stage) -> None:
    stage.train(workers=6)
    stage.say(stage.ranks[1], Crashed(error="ValueError: a bug"))
    stage.say(stage.ranks[2], Crashed(error="ValueError: another bug"))
    stage.quiesce(2, 3)
    stage.start()
    stage.commit(3)
    stage.say(stage.ranks[0], Crashed(error="ValueError: another bug"))
    go_on(stage, 3, 4)
    assert stage.ended is None
    assert [failure.worker for failure in stage.failures] == [1, 2, 0]


@scene()
async def test_an_error_in_the_first_step_is_the_jobs(stage: Stage) -> None:
    stage.train(steps=0)
    stage.say(stage.ranks[3], Crashed(error="ValueError: a bug"))
    assert stage.ended is not None
    assert stage.ended[1].startswith("worker 3 failed in step 0: ValueError: a bug")


# --- what the numbers mean, and what an agent may say ------------------------------------------------------------


@scene()
async def test_the_time_to_detect_is_counted_from_the_moment_that_was_noted(stage: Stage) -> None:
    stage.train()
    FaultLog(stage.run.faults_file).append(worker=1, kind="kill", phase="sync", step=3)
    stage.reap(1)
    failure = go_on(stage, 2)
    assert failure.detect_s is not None
    parts = failure.detect_s + failure.stop_s + failure.decide_s + failure.regroup_s
    assert failure.stall_s == pytest.approx(parts, abs=1e-3)


@scene()
async def test_an_agent_speaks_for_its_own_workers_only(stage: Stage) -> None:
    stage.train()
    for message in (
        WorkerExited(worker=17, exit_code=1),
        ProcessState(probe=1, worker=17, stopped=True),
    ):
        with pytest.raises(ControlError, match="worker 17 was not started by this agent"):
            stage.say(stage.host, message)
    with pytest.raises(ControlError, match="from a peer that has not joined"):
        stage.say(Puppet("stranger"), WorkerExited(worker=1, exit_code=1))
    assert stage.live() == [0, 1, 2, 3]


@scene()
async def test_a_message_that_a_rank_may_not_send_costs_no_other_worker(stage: Stage) -> None:
    stage.train()
    with pytest.raises(ControlError, match="a rank does not say 'start_generation'"):
        stage.say(stage.ranks[1], stage.ranks[1].last(StartGeneration))
    stage.depart(stage.ranks[1])  # as the server does then
    go_on(stage, 2)
    assert [failure.worker for failure in stage.failures] == [1]


@scene()
async def test_a_quiesce_report_does_not_answer_a_later_stop(stage: Stage) -> None:
    stage.train()
    stage.say(
        stage.ranks[0], Quiesced(generation=7, committed=3, reduced=False, last_vote=None, placed=6, layers=(0, 1))
    )
    assert stage.ended is None
    assert not stage.ranks[0].count(Stop)


# --- what comes of decisions -----------------------------------------------------------------------------------------


@scene(steps=40)
async def test_what_came_of_a_decision_is_recorded_after_ten_steps(stage: Stage) -> None:
    stage.train()
    stage.reap(1)
    failure = go_on(stage, 2)
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
    go_on(stage, 2)
    for step in range(3, 8):
        stage.commit(step, step_s=100.0)
    stage.reap(0)
    go_on(stage, 3, 8)
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


@scene(steps=40)
async def test_a_fall_back_to_a_checkpoint_has_no_prediction(stage: Stage) -> None:
    stage.train()
    stage.save(2, 0, 0, 1)
    stage.save(2, 1, 2, 3)
    stage.reap(1)
    stage.reap(3)
    go_on(stage, 2)
    stage.commit(2, step_s=0.3)
    stage.coordinator.end("interrupted", "enough")
    assert await stage.coordinator.wait() == "interrupted"
    (outcome,) = stage.events("outcome")
    (decision,) = stage.events("decision")
    assert (decision["chosen"], outcome["policy"], outcome["predicted_stall_s"]) == (None, "checkpoint", None)
    assert (outcome["steps"], outcome["measured_step_s"]) == (1, 0.3)
    assert outcome["measured_stall_s"] >= 0.1, "the step that is run again is lost"
