"""Workers that join while the run goes on, as the coordinator sees them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from chameleon_ft.cluster import Link
from chameleon_ft.config import Batch, Parallel, Recovery
from chameleon_ft.control.wire.messages import (
    Committed,
    Crashed,
    Exit,
    Hello,
    HostHello,
    OperationTimes,
    Pause,
    PeerFailed,
    Preallocate,
    Preallocated,
    Quiesced,
    Ready,
    Spawn,
    StartGeneration,
    Stop,
    Switched,
    Welcome,
    WorkerExited,
)
from chameleon_ft.errors import ControlError
from chameleon_ft.profiles import Fingerprint, Profile
from chameleon_ft.workload import LayerCost
from tests.control.stage import Puppet, Stage, scene, vote

RESPAWNING: dict[str, Any] = {
    "recovery": Recovery(policy="chameleon", salvage=False, respawn=True, respawn_delay_s=4.0, max_respawns=2),
    "batch": Batch(micro_batches=12, micro_batch_size=1),
}
STEADY: dict[str, Any] = {
    **RESPAWNING,
    "recovery": Recovery(policy="reroute", salvage=False, respawn=True, respawn_delay_s=4.0),
}


@asynccontextmanager
async def watched(stage: Stage) -> AsyncIterator[None]:
    """With the coordinator's clock going on."""
    watching = asyncio.create_task(stage.coordinator.wait())
    yield
    watching.cancel()


async def until(condition: Callable[[], object]) -> None:
    """Wait; should it never be so, the test's time limit says it."""
    while not condition():
        await asyncio.sleep(0.05)


def messages(stage: Stage, name: str) -> list[str]:
    return [event["message"] for event in stage.events(name)]


async def lose_and_respawn(stage: Stage, worker: int = 1, committed: int = 3) -> None:
    """Lose a worker, go on without it, and wait until it is restarted."""
    incarnations = stage.host.count(Spawn)
    stage.reap(worker)
    stage.quiesce(stage.order().generation + 1, committed)
    stage.start()
    await until(lambda: stage.host.count(Spawn) > incarnations)
    assert stage.host.last(Spawn).workers == (worker,)


def come(stage: Stage, worker: int) -> Puppet:
    """Have a worker that was started join and load."""
    rank = stage.join(worker)
    stage.say(rank, Ready())
    return rank


def pause(stage: Stage, step: int, *, generation: int | None = None) -> None:
    """Have all take a step after which they pause, of the newest generation or an earlier one."""
    order = stage.order()
    for worker in order.members:
        stage.say(
            stage.ranks[worker],
            Committed(
                generation=generation or order.generation,
                step=step,
                vote=vote(step).model_copy(update={"pause": True}),
                grad_norm=0.5,
                lr=0.1,
                step_s=0.1,
                times=OperationTimes(forward_s=0.01, backward_s=0.01, longest_s=0.01),
            ),
        )


async def come_back(stage: Stage, worker: int = 1) -> None:
    """Lose a worker, have it come back, and stop for it; what is decided then takes it in."""
    await lose_and_respawn(stage, worker)
    come(stage, worker)
    await until(lambda: stage.ranks[0].count(Pause))
    pause(stage, 3)
    stage.quiesce(3, 4)


async def expecting(stage: Stage, worker: int = 1) -> Puppet:
    """Lose a worker, have it come back, and wait until it is told what comes to it."""
    await lose_and_respawn(stage, worker)
    rank = come(stage, worker)
    await until(lambda: rank.count(Preallocate))
    return rank


# --- one that comes back ---------------------------------------------------------------------------------------------


@scene(**RESPAWNING)
async def test_a_lost_worker_comes_back_and_takes_part(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await lose_and_respawn(stage)
        assert stage.host.last(Spawn).incarnations == (2,)
        rank = stage.join(1)
        assert rank.last(Welcome).incarnation == 2
        assert stage.events("joined") == [], "it is still loading"
        stage.say(rank, Ready())
        assert messages(stage, "joined") == ["worker 1 has joined as a spare"]
        await until(lambda: stage.ranks[0].count(Pause))
        assert stage.ranks[0].last(Pause).generation == 2
        assert stage.ranks[0].last(Stop).generation == 2, "no worker is stopped in a step"
        stage.commit(3)
        assert stage.ranks[0].last(Stop).generation == 2, "this step has voted before all had heard of it"
        pause(stage, 4)
        assert {stage.ranks[worker].last(Stop).generation for worker in range(4)} == {3}
        stage.quiesce(3, 5)
        order = stage.order()
        assert (order.generation, order.members, order.first_step, order.load) == (3, (0, 1, 2, 3), 5, "keep")
        transition = rank.last(StartGeneration).transition
        assert transition is not None
        assert transition.keep == ()
        stage.start()
    loss, join = stage.events("decision")
    assert (loss["trigger"], loss["generation"]) == ("loss", 2)
    assert (join["trigger"], join["generation"]) == ("join", 3)
    assert join["chosen"] != "stay"
    assert join["candidates"][0]["policy"] == "stay"
    (record,) = stage.events("join")
    assert (record["workers"], record["spares"], record["generation"], record["resume_step"]) == ([1], [], 3, 5)
    assert record["policy"] == join["chosen"]
    assert len(stage.failures) == 1
    assert stage.events("messages_failed") == []
    assert stage.ended is None


@scene(**STEADY)
async def test_a_newcomer_without_a_place_stays_a_spare_and_no_worker_is_stopped(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await lose_and_respawn(stage)
        come(stage, 1)
        await until(lambda: len(stage.events("decision")) == 2)
        stage.commit(3)
    decision = stage.events("decision")[-1]
    assert (decision["trigger"], decision["chosen"], decision["generation"]) == ("join", "stay", 2)
    assert [each["policy"] for each in decision["candidates"]] == ["stay"]
    assert stage.ranks[0].count(Pause) == 0
    assert stage.ranks[0].last(Stop).generation == 2
    # It is there when the next one is lost.
    stage.reap(2)
    stage.quiesce(3, 4)
    assert {*stage.order().members} <= {0, 1, 3}
    assert stage.ended is None


@scene(**RESPAWNING)
async def test_newcomers_of_the_same_moment_are_considered_together(stage: Stage) -> None:
    late = Puppet("late host")
    async with watched(stage):
        stage.train()
        stage.say(late, HostHello(host="b", slots=3))
        assert late.last(Spawn) == Spawn(workers=(4, 5, 6), incarnations=(1, 1, 1))
        for worker in (4, 5, 6):
            rank = stage.ranks[worker] = Puppet(f"worker {worker}")
            stage.say(rank, Hello(worker=worker, host="10.0.0.2", incarnation=1))
            await asyncio.sleep(1.0)
            stage.say(rank, Ready())
        await until(lambda: stage.ranks[0].count(Pause))
        pause(stage, 3)
        stage.quiesce(2, 4)
        stage.start()
    (decision,) = stage.events("decision")
    assert decision["trigger"] == "join"
    (record,) = stage.events("join")
    assert sorted(record["workers"] + record["spares"]) == [4, 5, 6]
    assert messages(stage, "host_joined") == ["b starts workers 4, 5, 6"]


@scene(**RESPAWNING)
async def test_those_that_are_slow_are_not_waited_for_without_end(stage: Stage) -> None:
    late = Puppet("late host")
    async with watched(stage):
        stage.train()
        stage.say(late, HostHello(host="b", slots=3))
        for worker in (4, 5):
            rank = stage.ranks[worker] = Puppet(f"worker {worker}")
            stage.say(rank, Hello(worker=worker, host="10.0.0.2", incarnation=1))
            stage.say(rank, Ready())
        await until(lambda: stage.ranks[0].count(Pause))
    assert stage.ended is None


@scene(**RESPAWNING)
async def test_a_cluster_may_start_a_lost_worker_again(stage: Stage) -> None:
    async with watched(stage):
        stage.gather(4, with_agent=False)
        stage.start()
        for step in range(3):
            stage.commit(step)
        stage.depart(stage.ranks[2])
        stage.quiesce(2, 3)
        stage.start()
        assert come(stage, 2).last(Welcome).incarnation == 2
        await until(lambda: stage.ranks[0].count(Pause))
        pause(stage, 3)
        stage.quiesce(3, 4)
        assert 2 in stage.order().members


@scene(**RESPAWNING)
async def test_who_comes_while_others_regroup_is_held_back(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await lose_and_respawn(stage)
        rank = stage.join(1)
        stage.reap(2)
        stage.say(rank, Ready())
        stage.quiesce(3, 3, 0, 3)
        order = stage.order()
        assert 1 not in order.participants
        stage.start(order.members)
        assert rank.count(Stop) == 0
        await until(lambda: stage.ranks[0].count(Pause))
        assert stage.ranks[0].last(Pause).generation == 3


# --- failures on the way ---------------------------------------------------------------------------------------------


class _Gone(Executor):
    """Its process has been killed."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        raise BrokenProcessPool("a process was terminated abruptly")


@scene(**RESPAWNING)
async def test_a_newcomer_stays_a_spare_if_the_decision_fails(stage: Stage) -> None:
    decisions: Any = stage.coordinator._decisions
    decisions._executor = _Gone()
    async with watched(stage):
        stage.train()
        await lose_and_respawn(stage)
        come(stage, 1)
        await until(lambda: stage.events("decision_failed"))
        await asyncio.sleep(100.0)
        stage.commit(3)
        assert messages(stage, "decision_failed") == [
            "worker 1 stays a spare: the decision on it failed: BrokenProcessPool: a process was terminated abruptly"
        ]
        assert stage.ended is None
        assert stage.ranks[0].count(Pause) == 0
        # It is there when the next one is lost.
        stage.reap(0)
        stage.quiesce(3, 4)
        assert 1 in stage.order().members
    assert [event["trigger"] for event in stage.events("decision")] == ["loss", "loss"]


@scene(**RESPAWNING)
async def test_a_decision_on_newcomers_that_fails_after_a_loss_is_ignored(stage: Stage) -> None:
    decisions: Any = stage.coordinator._decisions
    gone = asyncio.Event()

    async def consider(*_: object) -> None:
        await gone.wait()
        raise BrokenProcessPool("a process was terminated abruptly")

    async with watched(stage):
        stage.train()
        await lose_and_respawn(stage)
        decisions.consider = consider
        come(stage, 1)
        await until(lambda: stage.coordinator.state.scale_up.considering is not None)
        stage.reap(2)
        stage.quiesce(3, 3)
        stage.start()
        gone.set()
        await until(lambda: stage.coordinator.state.scale_up.considering is None)
        stage.commit(3)
    assert stage.events("decision_failed") == []
    assert stage.ended is None


@scene(**RESPAWNING)
async def test_a_spare_that_is_lost_in_the_stop_does_not_make_it_one_for_a_loss(stage: Stage) -> None:
    late = Puppet("late host")
    async with watched(stage):
        stage.train()
        stage.say(late, HostHello(host="b", slots=2))
        for worker in (4, 5):
            rank = stage.ranks[worker] = Puppet(f"worker {worker}")
            stage.say(rank, Hello(worker=worker, host="10.0.0.2", incarnation=1))
            stage.say(rank, Ready())
        await until(lambda: stage.ranks[0].count(Pause))
        pause(stage, 3)
        stage.quiesce(2, 4, 0, 1, 2, 3, 4)
        stage.say(late, WorkerExited(worker=5, incarnation=1, exit_code=-9))
    (decision,) = stage.events("decision")
    assert (decision["trigger"], decision["lost"], decision["live"]) == ("join", [], 5)
    assert decision["candidates"][0]["policy"] == "stay"


@scene(**RESPAWNING)
async def test_who_dies_before_it_takes_part_changes_nothing(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await lose_and_respawn(stage)
        stage.say(stage.host, WorkerExited(worker=1, incarnation=2, exit_code=1))  # before it has joined
        await until(lambda: stage.host.last(Spawn).incarnations == (3,))
        rank = stage.join(1)
        stage.say(rank, Crashed(error="ConfigError: there is no such device"))
        stage.commit(3)
        assert messages(stage, "join_failed") == [
            "worker 1 was lost before it took part: exit code 1",
            "worker 1 was lost before it took part: ConfigError: there is no such device",
        ]
        assert stage.order().generation == 2
    assert len(stage.failures) == 1
    assert stage.ended is None


@scene(**RESPAWNING)
async def test_a_worker_that_keeps_dying_is_not_restarted(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await lose_and_respawn(stage)
        times = [asyncio.get_running_loop().time()]
        stage.say(stage.host, WorkerExited(worker=1, incarnation=2, exit_code=1))
        await until(lambda: stage.host.last(Spawn).incarnations == (3,))
        times.append(asyncio.get_running_loop().time())
        assert times[1] - times[0] >= 8.0, "twice as long as the first time"
        stage.say(stage.host, WorkerExited(worker=1, incarnation=3, exit_code=1))
        assert messages(stage, "blocklisted") == [
            "worker 1 was lost 3 times and is not taken again; see recovery.max_respawns"
        ]
        await asyncio.sleep(100.0)
        assert stage.host.last(Spawn).incarnations == (3,)
        with pytest.raises(ControlError, match="worker 1 was lost too often and is not taken again"):
            stage.say(Puppet("again"), Hello(worker=1, host="h"))
        stage.depart(stage.host)
        late = Puppet("late host")
        stage.say(late, HostHello(host="b", slots=1))
        assert late.last(Spawn).workers == (4,)
    assert [event["incarnation"] for event in stage.events("respawn")] == [2, 3]


@scene(**RESPAWNING)
async def test_the_end_of_an_earlier_life_is_not_that_of_a_later_one(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        before = stage.ranks[1]
        await lose_and_respawn(stage)
        rank = come(stage, 1)
        stage.say(stage.host, WorkerExited(worker=1, incarnation=1, exit_code=-9))
        stage.depart(before)
        stage.say(before, PeerFailed(generation=2, peer=0, error="from the past"))
        stage.say(before, Quiesced(generation=2, committed=9, reduced=False, last_vote=None, placed=0, layers=()))
        assert not rank.dropped
        assert stage.events("join_failed") == []
        assert len(stage.failures) == 1
        await until(lambda: stage.ranks[0].count(Pause))


@scene(**RESPAWNING)
async def test_a_spare_that_is_lost_while_it_is_considered_is_not_stopped_for(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await lose_and_respawn(stage)
        come(stage, 1)
        await until(lambda: stage.coordinator.state.scale_up.considering is not None)
        stage.say(stage.host, WorkerExited(worker=1, incarnation=2, exit_code=-9))
        await until(lambda: stage.coordinator.state.scale_up.considering is None)
        stage.commit(3)
    assert stage.ranks[0].count(Pause) == 0
    assert [failure.action for failure in stage.failures][1:] == ["it was a spare: nothing changes"]


@scene(**RESPAWNING)
async def test_a_spare_that_is_lost_before_the_step_for_it_is_over(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await lose_and_respawn(stage)
        come(stage, 1)
        await until(lambda: stage.ranks[0].count(Pause))
        stage.say(stage.host, WorkerExited(worker=1, incarnation=2, exit_code=-9))
        pause(stage, 3)
        stage.quiesce(3, 4, 0, 2, 3)
        order = stage.order()
        assert (order.generation, order.members, order.first_step) == (3, (0, 2, 3), 4)
        stage.start()
    assert stage.events("messages_failed") == []
    assert [event["trigger"] for event in stage.events("decision")] == ["loss"]
    assert [(record["workers"], record["policy"]) for record in stage.events("join")] == [([], "again")]


@scene(**RESPAWNING)
async def test_a_loss_in_the_stop_for_a_newcomer_does_not_hide_what_became_of_it(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await lose_and_respawn(stage)
        come(stage, 1)
        await until(lambda: stage.ranks[0].count(Pause))
        pause(stage, 3)
        stage.quiesce(3, 4, 0, 1, 3)
        stage.reap(2)
        order = stage.order()
        assert 2 not in order.participants
        stage.start()
    (record,) = stage.events("join")
    placed, spare = ([1], []) if 1 in order.members else ([], [1])
    assert (record["workers"], record["spares"], record["generation"]) == (placed, spare, order.generation)
    loss = stage.events("failure")[-1]
    assert (loss["worker"], loss["generation"]) == (2, order.generation)
    assert record["policy"] == loss["policy"] == stage.events("decision")[-1]["chosen"]
    assert 0.0 <= record["stop_s"] <= record["stall_s"]


@scene(**RESPAWNING)
async def test_a_message_that_fails_before_the_pause_does_not_hide_what_became_of_a_newcomer(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await lose_and_respawn(stage)
        come(stage, 1)
        await until(lambda: stage.ranks[0].count(Pause))
        stage.say(stage.ranks[0], PeerFailed(generation=2, peer=None, error="a collective failed"))
        stage.quiesce(3, 3)
        assert 1 in stage.order().members
        stage.start()
        stage.commit(3)
        stage.reap(0)
        stage.quiesce(4, 4)
        stage.start()
    (record,) = stage.events("join")
    assert (record["workers"], record["spares"], record["generation"]) == ([1], [], 3)
    assert len(stage.failures) == 2


@scene(**RESPAWNING)
async def test_a_newcomer_that_dies_in_its_transition(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await come_back(stage)
        assert 1 in stage.order().participants
        stage.say(stage.host, WorkerExited(worker=1, incarnation=2, exit_code=-9))
        old = {worker: stage.layers_of(worker) for worker in (0, 2, 3)}
        for worker in (0, 2, 3):
            stage.quiesce(4, 4, worker, placed=2, layers=(0, 1, 2, 3))
        assert set(old) == {0, 2, 3}
        order = stage.order()
        assert (order.generation, order.members, order.first_step) == (4, (0, 2, 3), 4)
        assert order.transition is None, "the placement is that from before"
        stage.start()
        stage.commit(4)
    assert [(failure.worker, failure.policy) for failure in stage.failures][1:] == [(1, "again")]
    assert stage.events("join") == []
    assert stage.ended is None


@scene(**RESPAWNING)
async def test_a_failed_message_does_not_leave_the_newcomer_out(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await come_back(stage)
        before = stage.order()
        stage.say(stage.ranks[0], PeerFailed(generation=3, peer=None, error="a collective failed"))
        for worker in range(4):
            stage.quiesce(4, 4, worker, placed=2, layers=(0, 1, 2, 3) if worker != 1 else ())
        assert (stage.order().generation, stage.order().members) == (4, before.members)
        stage.start()
    assert [record["workers"] for record in stage.events("join")] == [[1]]


@scene(**RESPAWNING)
async def test_a_worker_is_lost_between_the_decision_and_the_end_of_the_step(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await lose_and_respawn(stage)
        come(stage, 1)
        await until(lambda: stage.ranks[0].count(Pause))
        stage.reap(3)
        assert stage.ranks[0].last(Stop).generation == 3
        stage.quiesce(3, 3, 0, 1, 2)
        assert stage.order().members == (0, 1, 2)
        stage.start()
        # A pause that some had been told of is one of a generation that is over.
        pause(stage, 3, generation=2)
        assert stage.ranks[0].last(Stop).generation == 3
    assert [event["trigger"] for event in stage.events("decision")] == ["loss", "loss"]


@scene(**RESPAWNING)
async def test_after_the_last_step_no_worker_is_stopped_for_newcomers(stage: Stage) -> None:
    async with watched(stage):
        stage.train(steps=9)
        await lose_and_respawn(stage, committed=9)
        come(stage, 1)
        await until(lambda: stage.ranks[0].count(Pause))
        pause(stage, 9)
        assert stage.ranks[0].last(Stop).generation == 2
        stage.finish(10)
    assert stage.ended == ("finished", "all steps are trained")


@scene(**RESPAWNING)
async def test_a_loading_worker_is_told_that_the_run_has_ended(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await lose_and_respawn(stage)
        rank = stage.join(1)
        stage.coordinator.end("interrupted", "enough")
        await asyncio.sleep(1.0)
        assert rank.count(Exit) == 1


@scene(**{**RESPAWNING, "recovery": Recovery(policy="chameleon", salvage=False)})
async def test_no_worker_is_started_again_unless_configured(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        stage.reap(1)
        stage.quiesce(2, 3)
        stage.start()
        await asyncio.sleep(100.0)
    assert stage.host.count(Spawn) == 1


def switched(stage: Stage, worker: int) -> None:
    stage.say(stage.ranks[worker], Switched(generation=stage.order().generation, moved_bytes=700, transfer_s=0.25))


@scene(**RESPAWNING)
async def test_what_moves_for_a_newcomer_is_recorded(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await come_back(stage)
        switched(stage, 0)
        stage.start()
    (record,) = stage.events("join")
    assert (record["moved_bytes"], record["transfer_s"]) == (700, 0.25)
    assert record["rounds"] == stage.events("transition")[-1]["rounds"] > 0
    assert record["stall_s"] >= 0


@scene(**{**RESPAWNING, "parallel": Parallel(dp=1, pp=4)})
async def test_a_number_that_no_worker_has_can_be_refused(stage: Stage) -> None:
    stage.train()
    for worker, match in [(2, "worker 2 has joined already"), (9, "worker 9 does not exist"), (-1, "does not exist")]:
        with pytest.raises(ControlError, match=match):
            stage.say(Puppet("late"), Hello(worker=worker, host="h"))
    stage.commit(3)
    assert len(stage.run.steps()) == 4


ONE_HOST = Profile(
    name="one host",
    fingerprint=Fingerprint(model="m", micro_batch_size=1, dtype="float32", device="d", threads=1, versions={}),
    source="derived",
    provenance="by hand",
    layers=(LayerCost("layer", 1.0, 1.0, 1.0, param_bytes=8, output_bytes=8),) * 4,
    intra_host=Link(1e-5, 1e9),
)


@scene(**RESPAWNING, measured=ONE_HOST)
async def test_a_host_with_unknown_links_is_not_admitted(stage: Stage) -> None:
    near, far = Puppet("near"), Puppet("far")
    async with watched(stage):
        stage.train()
        for host in (near, far):
            stage.say(host, HostHello(host="late", slots=1))
        with pytest.raises(ControlError, match="worker 5 cannot take part: the profile of one host has no link betw"):
            stage.say(Puppet("worker 5"), Hello(worker=5, host="10.0.0.2", incarnation=1))
        stage.ranks[4] = Puppet("worker 4")
        stage.say(stage.ranks[4], Hello(worker=4, host="10.0.0.1", incarnation=1))
        stage.say(far, WorkerExited(worker=5, incarnation=1, exit_code=1))
        stage.say(stage.ranks[4], Ready())
        await until(lambda: stage.events("decision") or stage.ranks[0].count(Pause))
        stage.reap(1)
        stage.quiesce(stage.ranks[0].last(Stop).generation, 3)
        assert stage.order().members
    assert stage.ended is None


# --- preallocation ---------------------------------------------------------------------------------------------------


@scene(**RESPAWNING)
async def test_all_workers_stop_when_the_newcomer_has_preallocated(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        rank = await expecting(stage)
        assert {each: stage.ranks[each].count(Pause) for each in range(4)} == dict.fromkeys(range(4), 0)
        assert all(stage.ranks[each].count(Preallocate) == 0 for each in (0, 2, 3)), (
            "workers that train have no memory to spare"
        )
        stage.commit(3)
        stage.say(rank, Preallocated(layers=rank.last(Preallocate).layers))
        await until(lambda: stage.ranks[0].count(Pause))
        pause(stage, 4)
        stage.quiesce(3, 5)
        transition = rank.last(StartGeneration).transition
        assert transition is not None
        told = tuple((layer, num_bytes) for *_, to, layer, num_bytes in transition.moves if to == 1)
        assert told
        assert rank.last(Preallocate).layers == told
        stage.start()
    assert rank.count(Preallocate) == 1


@scene(**RESPAWNING)
async def test_room_is_not_waited_for_without_end(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await expecting(stage)
        told_at = asyncio.get_running_loop().time()
        await until(lambda: stage.ranks[0].count(Pause))
        assert 9.9 < asyncio.get_running_loop().time() - told_at < 10.5


@scene(**RESPAWNING)
async def test_a_newcomer_that_is_lost_while_it_preallocates_is_not_stopped_for(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        rank = await expecting(stage)
        stage.reap(1)
        await asyncio.sleep(15.0)
    assert rank.count(Preallocate) == 1
    assert stage.ranks[0].count(Pause) == 0
    assert stage.ended is None


@scene(**RESPAWNING)
async def test_one_of_two_newcomers_is_lost_while_they_preallocate(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await lose_and_respawn(stage, 1)
        stage.reap(2)
        stage.quiesce(3, 3)
        stage.start()
        await until(lambda: stage.host.last(Spawn).workers == (2,))
        one, other = come(stage, 1), come(stage, 2)
        await until(lambda: one.count(Preallocate))
        assert one.last(Preallocate).layers
        assert other.last(Preallocate).layers
        stage.say(one, Preallocated(layers=one.last(Preallocate).layers))
        stage.reap(2)
        await until(lambda: one.count(Preallocate) == 2)
        assert one.last(Preallocate).layers == (), "the change is void"
        await until(lambda: one.count(Preallocate) == 3)
        assert one.last(Preallocate).layers, "but something else is"
        stage.say(one, Preallocated(layers=()))
        await asyncio.sleep(1.0)
        assert stage.ranks[0].count(Pause) == 0, "that was its answer to what it was told before"
        stage.say(one, Preallocated(layers=one.last(Preallocate).layers))
        await until(lambda: stage.ranks[0].count(Pause))


@scene(**STEADY)
async def test_who_expects_layers_and_gets_no_orders_is_told_that_nothing_comes(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await lose_and_respawn(stage)
        rank = come(stage, 1)
        await until(lambda: 1 in stage.coordinator.state.scale_up.newcomers)
        state = stage.coordinator.state
        scale_up = replace(state.scale_up, expecting=frozenset({0, 1}))
        stage.coordinator.state = replace(state, scale_up=scale_up)
        stage.say(stage.ranks[0], PeerFailed(generation=2, peer=None, error="a collective failed"))
        stage.quiesce(3, 3)
        assert 1 not in stage.order().participants
        assert rank.last(Preallocate).layers == ()
        assert stage.ranks[0].count(Preallocate) == 0, "this one has orders"
        stage.start()
