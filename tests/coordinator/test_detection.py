"""Every way in which the loss of a worker is noticed."""

from __future__ import annotations

import asyncio

import pytest

from chameleon_ft.errors import ControlError
from chameleon_ft.protocol.messages import Crashed, Kill, PeerFailed, Probe, ProcessState, Quiesced, Stop, WorkerExited
from chameleon_ft.protocol.parts import Member
from chameleon_ft.storage.files import FaultLog
from tests.coordinator.stage import THREE_PIPELINES, Puppet, Stage, scene
from tests.golden import refused


def lost(stage: Stage) -> list[tuple[int, str, str]]:
    return [(failure.worker, failure.noticed_by, failure.cause) for failure in stage.failures]


def probe_of(stage: Stage) -> int:
    return stage.host.last(Probe).probe


@scene()
async def test_a_reaped_process(stage: Stage) -> None:
    stage.train()
    stage.reap(1)
    assert stage.ranks[1].dropped
    assert stage.host.last(Kill).worker == 1
    assert {worker for worker, rank in stage.ranks.items() if rank.count(Stop)} == {0, 2, 3}
    stage.quiesce(2, 3, 0, 2)
    assert stage.ranks[0].begun.generation == 1, "not before all survivors have quiesced"
    stage.quiesce(2, 3, 3)
    order = stage.ranks[0].begun
    assert (order.generation, order.members, order.first_step, order.load) == (2, (0, 2, 3), 3, "keep")
    assert stage.failures == [], "the incident is not over"
    stage.start([2])
    (failure,) = stage.failures
    assert (failure.worker, failure.noticed_by, failure.cause, failure.policy) == (1, "child", "SIGKILL", "reroute")
    assert (failure.step, failure.resume_step, failure.generation) == (3, 3, 2)
    stage.commit(3)
    assert stage.run.steps()[-1].workers == 3


@scene()
async def test_the_cause_is_the_best_known_at_the_end(stage: Stage) -> None:
    stage.train()
    stage.depart(stage.ranks[1])
    stage.reap(1, -6)
    stage.recover(2)
    assert lost(stage) == [(1, "connection", "SIGABRT")]


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
            stage.say(stage.host, ProcessState(probe=probe_of(stage), member=Member(each, 1), stopped=each == worker))
        if stage.coordinator.state.members[worker].lost:
            return
    raise AssertionError(f"worker {worker} is not found")


@scene()
async def test_a_worker_that_does_not_regroup_is_looked_for(stage: Stage) -> None:
    watching = asyncio.create_task(stage.coordinator.wait())
    stage.train()
    stage.reap(1)
    stage.quiesce(2, 3)
    await find_stopped(stage, 0)
    assert stage.ranks[3].last(Stop).generation == 3
    stage.recover(3)
    assert [failure.worker for failure in stage.failures] == [1, 0]
    watching.cancel()


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


@scene()
async def test_an_error_in_one_worker_is_its_loss(stage: Stage) -> None:
    stage.train()
    stage.say(stage.ranks[1], Crashed(error="RuntimeError: bad memory"))
    stage.reap(1, 1)
    stage.recover(2)
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


@scene()
async def test_the_time_to_detect_is_counted_from_the_moment_that_was_noted(stage: Stage) -> None:
    stage.train()
    FaultLog(stage.run.faults_file).append(worker=1, kind="kill", phase="sync", step=3)
    stage.reap(1)
    failure = stage.recover(2)
    assert failure.detect_s is not None
    parts = failure.detect_s + failure.stop_s + failure.decide_s + failure.regroup_s
    assert failure.stall_s == pytest.approx(parts, abs=1e-3)


@scene()
async def test_an_agent_speaks_for_its_own_workers_only(stage: Stage) -> None:
    stage.train()
    for message in (
        WorkerExited(member=Member(17, 1), exit_code=1),
        ProcessState(probe=1, member=Member(17, 1), stopped=True),
    ):
        with refused(ControlError):
            stage.say(stage.host, message)
    with refused(ControlError):
        stage.say(Puppet("stranger"), WorkerExited(member=Member(1, 1), exit_code=1))
    assert stage.live() == [0, 1, 2, 3]


@scene()
async def test_a_quiesce_report_does_not_answer_a_later_stop(stage: Stage) -> None:
    stage.train()
    stage.say(
        stage.ranks[0], Quiesced(generation=7, committed=3, reduced=False, last_vote=None, placed=6, layers=(0, 1))
    )
    assert stage.ended is None
    assert not stage.ranks[0].count(Stop)
