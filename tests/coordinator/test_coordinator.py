"""A run from its first worker to its end, as the coordinator sees it when nothing fails."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from chameleon_ft.config import Checkpoint, Parallel, RunConfig
from chameleon_ft.errors import ControlError
from chameleon_ft.protocol.messages import (
    LEFT_OUT,
    BadStep,
    CheckpointSaved,
    CheckpointState,
    Exit,
    Hello,
    HostHello,
    Inject,
    Kill,
    Refused,
    SlowIO,
    Spawn,
    StartGeneration,
    Welcome,
)
from chameleon_ft.protocol.parts import Member
from chameleon_ft.storage.checkpoints import complete_checkpoints
from tests.coordinator.stage import Puppet, Stage, scene
from tests.golden import refused
from tests.stored import layer_directory

# --- gathering -------------------------------------------------------------------------------------------------------


@scene()
async def test_the_last_worker_to_join_sets_the_run_going(stage: Stage) -> None:
    for worker in (2, 0, 3):
        rank = stage.join(worker)
        assert rank.count(Welcome) == 1
        assert rank.count(StartGeneration) == 0
    assert stage.join(1).begun.members == (0, 1, 2, 3)
    for rank in stage.ranks.values():
        order = rank.begun
        assert (order.generation, order.first_step, order.load) == (1, 0, "initial")
        assert order.operations
    (event,) = stage.events("started")
    assert event["pipelines"] == [[0, 1], [2, 3]]
    assert event["stages"] == ["0-1", "2-3"]


@scene()
async def test_hosts_get_workers_in_the_order_they_come(stage: Stage) -> None:
    first, second, third = Puppet("first"), Puppet("second"), Puppet("third")
    stage.say(first, HostHello(host="a", slots=1))
    stage.say(second, HostHello(host="b", slots=8))
    assert first.last(Spawn).workers == (0,)
    assert second.last(Spawn).workers == (1, 2, 3)
    with refused(ControlError):
        stage.say(third, HostHello(host="c", slots=1))


@scene()
async def test_a_refused_worker_receives_the_reason(stage: Stage) -> None:
    stage.join(1)
    for worker in (4, -1, 1):
        with refused(ControlError):
            stage.say(Puppet("stranger"), Hello(member=Member(worker, 0), host="h"))
    assert stage.ended is None


@scene()
async def test_another_host_takes_the_places_of_one_that_leaves_before_the_run_has_begun(stage: Stage) -> None:
    stage.say(stage.host, HostHello(host="a", slots=4))
    stage.depart(stage.host)
    assert stage.ended is None
    (lost,) = stage.events("host_lost")
    assert lost["message"] == "a was lost before the run began; its places are open for 120.0 s"
    stage.host = Puppet("another host")
    stage.gather(4)
    stage.start()
    stage.commit(0)
    assert [record.workers for record in stage.run.steps()] == [4]


@scene()
async def test_an_interrupt_before_the_run_has_begun_ends_it_at_once(stage: Stage) -> None:
    stage.join(0)
    stage.coordinator.interrupt()
    assert stage.ended == ("interrupted", "interrupted by the user")


@scene()
async def test_an_interrupt_while_the_weights_are_loaded_ends_the_run_at_once(stage: Stage) -> None:
    stage.gather(4)
    assert all(rank.count(StartGeneration) == 1 for rank in stage.ranks.values())
    stage.coordinator.interrupt()
    assert stage.ended == ("interrupted", "interrupted by the user")


# --- training --------------------------------------------------------------------------------------------------------


@scene()
async def test_a_step_is_recorded_once_for_any_first_reporter(stage: Stage) -> None:
    stage.gather(4)
    stage.start()
    stage.commit(0, worker=2)
    stage.commit(0)
    stage.commit(1)
    records = stage.run.steps()
    assert [record.step for record in records] == [0, 1]
    assert (records[0].loss, records[0].samples, records[0].workers, records[0].generation) == (1.0, 12, 4, 1)


@scene(steps=3)
async def test_the_run_ends_when_every_member_has_finished(stage: Stage) -> None:
    stage.train(steps=3)
    stage.finish(3)
    assert stage.ended == ("finished", "all steps are trained")
    assert await stage.coordinator.wait() == "finished"
    assert stage.told_to_exit() == [0, 1, 2, 3]
    assert stage.host.count(Exit) == 1
    assert stage.run.summary_file.exists()


@scene(checkpoint=Checkpoint(every=2, keep=2))
async def test_old_checkpoints_are_removed_also_those_that_were_never_completed(stage: Stage) -> None:
    stage.train()
    stage.save(1, 0, 0)
    for step in (2, 3, 4):
        stage.save(step, 0, 0, 1, 2, 3)
    # They are removed in a thread; should they not be, the test's time limit says so.
    while sorted(path.name for path in stage.run.checkpoints.iterdir()) != ["step-00000003", "step-00000004"]:
        await asyncio.to_thread(time.sleep, 0.001)
    assert complete_checkpoints(stage.run.checkpoints) == [3, 4]


@scene()
async def test_a_checkpoint_that_cannot_be_written_does_not_end_the_run(stage: Stage) -> None:
    stage.train()
    for worker in (1, 3):
        stage.say(stage.ranks[worker], CheckpointSaved(generation=1, step=2, layers=(2, 3), error="OSError: disk full"))
    stage.save(2, 0, 0, 1)
    first, second = stage.events("checkpoint_failed")
    assert first["error"] == second["error"] == "OSError: disk full"
    assert first["message"].startswith(f"no complete one of step 2 in {stage.run.checkpoints}: OSError: disk full; ")
    assert "message" not in second, "people are told once"
    assert list(stage.run.checkpoints.iterdir()) == [], "nothing is left of it, whatever is written late"
    assert stage.ended is None
    command = Puppet("command")
    for committed in (2, 3):
        stage.say(command, CheckpointState(committed=committed))
    failed = CheckpointState(committed=2, failed=(2, "OSError: disk full"))
    assert command.sent == [failed, CheckpointState(committed=3)], "a command that waits is told"


@scene()
async def test_checkpoints_that_are_left_out_are_one_line_with_their_number(stage: Stage) -> None:
    stage.train()
    stage.save(2, 0, 0, 1)
    for step in (3, 4, 5):
        for worker in (1, 3):
            stage.say(stage.ranks[worker], CheckpointSaved(generation=1, step=step, layers=(), error=LEFT_OUT))
    assert not any("message" in event for event in stage.events("checkpoint_failed"))
    stage.save(2, 1, 2, 3)
    (event,) = stage.events("checkpoints_left_out")
    assert (event["step"], event["steps"]) == (2, [3, 4, 5])
    assert event["message"].startswith("3 ")
    stage.save(6, 0, 0, 1, 2, 3)
    assert len(stage.events("checkpoints_left_out")) == 1


@scene()
async def test_a_rank_that_waits_for_the_disk_is_named_once_and_not_given_up(stage: Stage) -> None:
    stage.train()
    for worker, since_s in ((1, 10.0), (3, 10.0), (3, 20.0), (1, 20.0)):
        stage.say(stage.ranks[worker], SlowIO(generation=1, doing="loading layers", since_s=since_s))
    told = stage.events("waiting")
    assert [(event["worker"], event["since_s"]) for event in told] == [(1, 10.0), (3, 20.0)]
    assert "worker 1 has been loading layers for 10.00 s" in told[0]["message"]
    assert str(stage.run.checkpoints) in told[0]["message"]
    assert stage.live() == [0, 1, 2, 3]


# --- interrupts ------------------------------------------------------------------------------------------------------


@scene()
async def test_a_second_interrupt_ends_the_run_at_once(stage: Stage) -> None:
    stage.train()
    stage.coordinator.interrupt()
    stage.coordinator.interrupt()
    assert stage.ended == ("interrupted", "interrupted by the user")


@scene(steps=3)
async def test_an_interrupt_in_the_last_step_is_an_ordinary_end(stage: Stage) -> None:
    stage.train(steps=2)
    stage.coordinator.interrupt()
    stage.commit(2)
    stage.finish(3)
    assert stage.ended == ("finished", "all steps are trained")


# --- injection -------------------------------------------------------------------------------------------------------


@scene()
async def test_a_kill_is_left_to_the_agent(stage: Stage) -> None:
    stage.train()
    user = Puppet("user")
    stage.say(user, Inject(worker=1, kind="kill"))
    assert stage.host.last(Kill).worker == 1
    assert user.count(Inject) == 1, "what was asked for comes back as the answer"
    stage.reap(1)
    stage.quiesce(2, 3)
    stage.start()
    (failure,) = stage.failures
    assert failure.detect_s is not None, "the moment of the kill was noted"


@scene()
async def test_a_worker_without_an_agent_kills_itself(stage: Stage) -> None:
    stage.gather(4, with_agent=False)
    message = Inject(worker=1, kind="kill")
    stage.say(Puppet("user"), message)
    assert stage.ranks[1].sent[-1] == message


@scene()
async def test_other_failures_are_left_to_the_worker(stage: Stage) -> None:
    stage.train()
    for message in (
        Inject(worker=1, kind="hang"),
        Inject(worker=1, kind="kill", phase="vote", step=5),
        Inject(worker=1, kind="disconnect", phase="sync"),
    ):
        stage.say(Puppet("user"), message)
        assert stage.ranks[1].sent[-1] == message
    assert stage.host.count(Kill) == 0


@scene()
async def test_a_worker_that_is_not_live_cannot_be_made_to_fail(stage: Stage) -> None:
    stage.train()
    stage.reap(1)
    for worker in (1, 7):
        user = Puppet("user")
        stage.say(user, Inject(worker=worker, kind="kill"))
        assert user.last(Refused).reason == f"worker {worker} is not live; live are [0, 2, 3]"


# --- resuming, and mistakes of its own -------------------------------------------------------------------------------


def test_a_resumed_run_begins_at_its_newest_checkpoint(tmp_path: Path) -> None:
    @scene()
    async def first(stage: Stage) -> None:
        stage.train(steps=5)
        stage.save(2, 0, 0, 1, 2, 3)
        stage.save(4, 0, 0, 1, 2, 3)

    @scene(resume=True, workers=2, parallel=Parallel(dp=1, pp=2))
    async def second(stage: Stage) -> None:
        stage.gather(2)
        assert (stage.order().first_step, stage.order().load) == (4, 4)
        stage.start()
        stage.commit(4)
        assert [record.step for record in stage.run.steps()] == [0, 1, 2, 3, 4, 4]
        before, after = stage.events("started")
        assert (before["first_step"], before["checkpoint"]) == (0, None)
        assert (after["first_step"], after["checkpoint"]) == (4, 4)

    first(tmp_path)
    second(tmp_path)


@pytest.mark.parametrize("unreadable", [(4,), (2, 4)])
def test_checkpoints_that_this_host_cannot_read_keep_their_marks_unless_all_begin_with_an_older_one(
    tmp_path: Path, unreadable: tuple[int, ...]
) -> None:
    @scene()
    async def first(stage: Stage) -> None:
        stage.train(steps=5)
        stage.save(2, 0, 0, 1, 2, 3)
        stage.save(4, 0, 0, 1, 2, 3)

    @scene(resume=True)
    async def second(stage: Stage) -> None:
        for step in unreadable:
            checksums = layer_directory(stage.run.checkpoints, step, 1) / "checksums.json"
            checksums.unlink()
            checksums.symlink_to(checksums.name)
        stage.gather(4)
        told = stage.events("checkpoint_unreadable")
        assert [event["step"] for event in told] == [*reversed(unreadable)]
        assert told[0]["message"].startswith("that of step 4 cannot be read here and is not used: [Errno 40] Too many")
        if len(unreadable) == 1:
            assert (stage.order().first_step, stage.order().load) == (2, 2)
            stage.start()
            assert complete_checkpoints(stage.run.checkpoints) == [2, 4], "others may not have read theirs yet"
            stage.commit(2)
            assert complete_checkpoints(stage.run.checkpoints) == [2], "that of step 4 is to be written again"
        else:
            assert stage.ended is not None
            assert stage.ended[1].startswith("there is no checkpoint that can be read; that of step 2 cannot be read")
            assert complete_checkpoints(stage.run.checkpoints) == [2, 4], "they may be read elsewhere, or later"

    first(tmp_path)
    second(tmp_path)


def test_bad_steps_are_left_out_after_a_resume_too(tmp_path: Path) -> None:
    @scene()
    async def first(stage: Stage) -> None:
        stage.train(steps=5)
        stage.save(4, 0, 0, 1, 2, 3)
        generation = stage.order().generation
        for step, is_bad_again in ((5, True), (6, False)):
            bad = BadStep(
                generation=generation, step=step, why="w", is_bad_again=is_bad_again, has_changed=False, origins=()
            )
            for puppet in stage.ranks.values():
                stage.say(puppet, bad)

    @scene(resume=True)
    async def second(stage: Stage) -> None:
        stage.gather(4)
        assert stage.order().skipped == (5,)

    first(tmp_path)
    second(tmp_path)


@scene()
async def test_a_mistake_of_the_coordinator_is_logged_and_ends_the_run(stage: Stage) -> None:
    stage.train()
    stage.coordinator.broken(ZeroDivisionError("a mistake"))
    assert stage.ended is not None
    assert stage.ended[1].startswith("the coordinator failed: ZeroDivisionError: a mistake; see ")
    assert "ZeroDivisionError" in (stage.run.logs / "coordinator.log").read_text()


@scene()
async def test_strangers_are_recorded(stage: Stage) -> None:
    stage.train()
    stage.coordinator.refused("10.0.0.9:1234", "wrong join token")
    (event,) = stage.events("refused")
    assert (event["address"], event["reason"]) == ("10.0.0.9:1234", "wrong join token")


@scene()
async def test_a_scanner_does_not_fill_the_disk(stage: Stage) -> None:
    for _ in range(1000):
        stage.coordinator.refused("10.0.0.9:1234", "does not speak this protocol")
    assert [event["count"] for event in stage.events("refused")] == [*range(1, 101), 128, 256, 512]


@scene()
async def test_what_a_rank_is_sent_holds_the_whole_configuration(stage: Stage) -> None:
    welcome = stage.join(0).last(Welcome)
    assert welcome.run == str(stage.run.path)
    config = stage.run.config()
    assert isinstance(config, RunConfig)
    assert 'job = "a.job:job"' in welcome.config
    assert [leaf.shape for boundary in welcome.layers.boundaries for leaf in boundary.leaves] == [(2, 8)] * 4


@scene()
async def test_the_first_report_of_a_step_counts_also_if_it_is_late(stage: Stage) -> None:
    stage.train(steps=3)
    stage.reap(0)
    # Worker 1 had applied step 3 before it was told to stop, and its report was on the way.
    stage.commit(3, worker=1)
    assert [record.step for record in stage.run.steps()] == [0, 1, 2, 3]
    stage.quiesce(2, 4, 1)
    stage.quiesce(2, 3, 2, 3, reduced=True)
    assert stage.order().first_step == 4
    assert stage.order().roll_forward is not None
