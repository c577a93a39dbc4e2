"""Workers that join while the run goes on, as the coordinator sees them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from chameleon_ft.cluster import Link
from chameleon_ft.config import Batch, Parallel, PolicyName, Recovery, Snapshots
from chameleon_ft.control.wire.messages import (
    Begin,
    Crashed,
    Discard,
    Drain,
    Exit,
    Hello,
    HostHello,
    Message,
    Migrate,
    PeerFailed,
    Prepare,
    Quiesced,
    Ready,
    Spawn,
    StartGeneration,
    Stop,
    Switch,
    Switched,
    Welcome,
    WorkerExited,
)
from chameleon_ft.errors import ControlError
from chameleon_ft.observe import read_generation_plans
from chameleon_ft.plan.shards import UNITS
from chameleon_ft.plan.snapshots import SnapshotShare
from chameleon_ft.profiles import Fingerprint, Profile
from chameleon_ft.workload import LayerCost
from tests.control.stage import Puppet, Stage, play, scene

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


def orders_of(stage: Stage, generation: int) -> dict[int, StartGeneration]:
    """Order of each worker to prepare a generation."""
    sent = {worker: [m.order for m in puppet.sent if isinstance(m, Prepare)] for worker, puppet in stage.ranks.items()}
    return {worker: order for worker, own in sent.items() for order in own if order.generation == generation}


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


async def considered(stage: Stage) -> StartGeneration:
    """Wait until a better plan is prepared; return an order of its generation."""
    await until(stage.ahead)
    order = stage.ahead()
    assert order is not None
    return order


async def come_back(stage: Stage, worker: int = 1) -> Puppet:
    """Lose a worker, have it come back, and wait until the generation is prepared in which layers move to it."""
    await lose_and_respawn(stage, worker)
    rank = come(stage, worker)
    await considered(stage)
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
        first = await considered(stage)
        assert (first.generation, first.members, first.first_step, first.load) == (3, (0, 1, 2, 3), 4, "keep")
        order = rank.last(Migrate)
        assert order.generation == 3
        assert {(destination, num_bytes) for _, destination, _, num_bytes in order.moves} == {(1, 772)}
        assert stage.ranks[0].count(Migrate) == 0, "it has no memory for more layers yet"
        assert orders_of(stage, 3)[1].operations == "", "it has no operations until it holds its layers"
        stage.commit(3)
        stage.switch(4)
        assert rank.last(Begin) == Begin(generation=3, first_step=5)
        assert {puppet.last(Migrate) for puppet in stage.ranks.values()} == {order}, "it is that of all"
        assert rank.count(Migrate) == 1
        stage.commit(5)
        second = stage.ahead()
        assert second is not None
        assert (second.generation, second.members, second.transition) == (4, (0, 1, 2, 3), None)
        stage.switch(6)
        assert stage.order().generation == 4
        assert orders_of(stage, 4)[1].operations
        assert stage.ranks[0].last(Stop).generation == 2, "no worker was stopped for it"
        assert rank.count(Begin) == 1, "it has switched like the others"
    loss, join = stage.events("decision")
    assert (loss["trigger"], loss["generation"]) == ("loss", 2)
    assert (join["trigger"], join["generation"]) == ("join", 4)
    assert join["chosen"] != "stay"
    assert join["candidates"][0]["policy"] == "stay"
    (record,) = stage.events("join")
    assert (record["workers"], record["spares"], record["generation"], record["resume_step"]) == ([1], [], 4, 7)
    assert record["moved_bytes"] == 772 * len(order.moves)
    assert (record["stop_s"], record["decide_s"], record["transfer_s"]) == (0.0, 0.0, 0.0)
    assert record["policy"] == join["chosen"]
    plans = [(event["generation"], event["policy"]) for event in stage.events("plan")]
    assert plans[2:] == [(3, "migration"), (4, join["chosen"])]
    recorded = read_generation_plans(stage.run.plans)
    assert [recorded[generation].first_step for generation in (3, 4)] == [5, 7]
    assert len(stage.failures) == 1
    assert stage.events("messages_failed") == []
    assert stage.ended is None


@scene(**RESPAWNING, parallel=Parallel(dp=2, pp=2, optimizer_redundancy="auto"))
async def test_slices_of_the_optimizer_move_to_a_worker_that_comes_back_while_all_train(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        rank = await come_back(stage)
        order = rank.last(Migrate)
        left = orders_of(stage, 3)[1].unpack_shards()
        assert left is not None
        assert left.owned_by(1) == {}, "it owns nothing before the switch"
        assert {num_bytes for *_, num_bytes in order.moves} == {256}, "parameters move with the layer"
        stage.commit(3)
        stage.switch(4)
        stage.commit(5)
        second = stage.ahead()
        assert second is not None
        assert second.transition is None
        after = second.unpack_shards()
        assert after is not None
        assert after.copies == 2
        assert after.owned_by(1).keys() == {layer for _, _, layer, _ in order.moves}
        moves = after.moves_from(left)
        assert [(m.source, m.destination, m.layer, m.start, m.stop) for m in moves] == [m[:5] for m in order.slices]
        assert all(num_bytes == 516 * (stop - start) // UNITS for *_, start, stop, num_bytes in order.slices)
        stage.switch(6)
    (moved,) = stage.events("migration")
    assert (moved["layers"], moved["slices"]) == (len(order.moves), len(order.slices))
    assert len(stage.failures) == 1


@scene(**RESPAWNING, snapshots=Snapshots(every=3))
async def test_a_worker_whose_layers_are_still_arriving_votes_for_snapshots_too(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await come_back(stage)
        orders = orders_of(stage, 3)
        assert orders[1].snapshots == SnapshotShare()
        assert all(orders[worker].snapshots not in (None, SnapshotShare()) for worker in orders if worker != 1)


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
    assert stage.ranks[0].count(Prepare) == 0
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
        await considered(stage)
        stage.switch_to_the_end(3)
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
        await considered(stage)
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
        await considered(stage)
        stage.switch_to_the_end(3)
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
        assert (await considered(stage)).generation == 4


# --- failures on the way ---------------------------------------------------------------------------------------------


class _Gone(Executor):
    """Its process has been killed."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        raise BrokenProcessPool("a process was terminated abruptly")


@scene(**RESPAWNING)
async def test_a_newcomer_stays_a_spare_if_the_decision_fails(stage: Stage) -> None:
    decisions: Any = stage.coordinator._commands.decisions
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
        assert stage.ranks[0].count(Prepare) == 0
        # It is there when the next one is lost.
        stage.reap(0)
        stage.quiesce(3, 4)
        assert 1 in stage.order().members
    assert [event["trigger"] for event in stage.events("decision")] == ["loss", "loss"]


@scene(**RESPAWNING)
async def test_a_decision_on_newcomers_that_fails_after_a_loss_is_ignored(stage: Stage) -> None:
    decisions: Any = stage.coordinator._commands.decisions
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
        await considered(stage)


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
    # A better plan for the others may be found meanwhile.
    prepared = [message.order.members for message in stage.ranks[0].sent if isinstance(message, Prepare)]
    assert all(1 not in members for members in prepared)
    assert [failure.action for failure in stage.failures][1:] == ["it was a spare: nothing changes"]


@scene(**RESPAWNING)
async def test_a_newcomer_that_is_lost_while_its_generation_is_prepared(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await come_back(stage)
        stage.prepare(0, 2, 3)
        stage.say(stage.host, WorkerExited(worker=1, incarnation=2, exit_code=-9))
        assert stage.ranks[0].last(Discard) == Discard(generation=3)
        assert stage.ahead() is None
        stage.commit(3)
        assert (stage.order().generation, stage.order().members) == (2, (0, 2, 3))
    assert stage.ranks[0].count(Switch) == 0
    assert [event["trigger"] for event in stage.events("decision")] == ["loss"]
    assert [event["generation"] for event in stage.events("plan")] == [1, 2], "it has never been in force"
    assert stage.events("join") == []


@scene(**RESPAWNING)
async def test_one_of_two_newcomers_is_lost_while_their_generation_is_prepared(stage: Stage) -> None:
    late = Puppet("late host")
    async with watched(stage):
        stage.train()
        stage.say(late, HostHello(host="b", slots=2))
        for worker in (4, 5):
            rank = stage.ranks[worker] = Puppet(f"worker {worker}")
            stage.say(rank, Hello(worker=worker, host="10.0.0.2", incarnation=1))
            stage.say(rank, Ready())
        await considered(stage)
        stage.prepare(4)
        stage.say(late, WorkerExited(worker=5, incarnation=1, exit_code=-9))
        assert stage.ahead() is None
        assert (await considered(stage)).generation == 3
        stage.switch_to_the_end(3)
    (decision,) = stage.events("decision")
    assert (decision["trigger"], decision["lost"], decision["live"]) == ("join", [], 5)
    assert decision["candidates"][0]["policy"] == "stay"


@scene(**RESPAWNING)
async def test_a_loss_while_a_generation_is_prepared_does_not_hide_what_became_of_a_newcomer(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await come_back(stage)
        stage.reap(2)
        assert {stage.ranks[worker].last(Stop).generation for worker in (0, 1, 3)} == {4}, "above that one, too"
        stage.quiesce(4, 3, 0, 1, 3)
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
async def test_a_message_that_fails_before_the_switch_does_not_hide_what_became_of_a_newcomer(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await come_back(stage)
        stage.say(stage.ranks[0], PeerFailed(generation=2, peer=None, error="a collective failed"))
        stage.quiesce(4, 3)
        assert 1 in stage.order().members
        stage.start()
        stage.commit(3)
        stage.reap(0)
        stage.quiesce(5, 4)
        stage.start()
    (record,) = stage.events("join")
    assert (record["workers"], record["spares"], record["generation"]) == ([1], [], 4)
    assert len(stage.failures) == 2


@scene(**RESPAWNING)
async def test_a_newcomer_that_dies_while_its_layers_arrive(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await come_back(stage)
        before = {worker: stage.layers_of(worker) for worker in (0, 2, 3)}
        stage.switch(3)
        stage.say(stage.host, WorkerExited(worker=1, incarnation=2, exit_code=-9))
        stage.quiesce(5, 4, 0, 2, 3)
        order = stage.order()
        assert (order.generation, order.members, order.first_step) == (5, (0, 2, 3), 4)
        assert order.transition is None, "the placement is that from before"
        assert {worker: stage.layers_of(worker) for worker in (0, 2, 3)} == before
        stage.start()
        stage.commit(4)
    assert [(failure.worker, failure.policy) for failure in stage.failures][1:] == [(1, "again")]
    assert stage.events("join") == []
    assert stage.ended is None


@scene(**RESPAWNING)
async def test_what_a_newcomer_has_received_is_not_sent_again(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await come_back(stage)
        before = {worker: stage.layers_of(worker) for worker in (0, 2, 3)}
        stage.switch(3)
        got = stage.layers_of(1)
        assert got
        stage.say(stage.ranks[0], PeerFailed(generation=3, peer=None, error="a collective failed"))
        for worker in range(4):
            layers = got[:1] if worker == 1 else before[worker]
            stage.quiesce(5, 4, worker, placed=2, layers=layers)
        order = orders_to(stage, 1)[-1]
        assert (order.generation, 1 in order.members) == (5, True)
        assert order.transition is not None
        assert order.transition.keep == got[:1]
        assert got[0] not in {layer for _, _, to, layer, _ in order.transition.moves if to == 1}
        stage.start()
    assert [record["workers"] for record in stage.events("join")] == [[1]]


def orders_to(stage: Stage, worker: int) -> list[StartGeneration]:
    """The orders of a worker that were not prepared."""
    return [message for message in stage.ranks[worker].sent if isinstance(message, StartGeneration)]


@scene(**RESPAWNING)
async def test_what_a_newcomer_has_received_counts_only_if_it_is_of_the_same_step(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await come_back(stage)
        before = {worker: stage.layers_of(worker) for worker in (0, 2, 3)}
        stage.switch(3)
        stage.commit(4)
        stage.say(stage.ranks[0], PeerFailed(generation=3, peer=None, error="a collective failed"))
        for worker in (0, 2, 3):
            stage.quiesce(5, 5, worker, placed=2, layers=before[worker])
        stage.quiesce(5, 4, 1, placed=2, layers=(0,))
        transition = orders_to(stage, 1)[-1].transition
        assert transition is not None
        assert transition.keep == ()


@scene(**RESPAWNING)
async def test_a_worker_is_lost_before_all_have_switched(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await come_back(stage)
        stage.prepare()
        stage.commit(3, 0, switch=True)
        assert stage.order().generation == 3
        stage.reap(3)
        assert stage.ranks[0].last(Stop).generation == 5
        stage.quiesce(5, 4, 0, 1, placed=2)
        stage.quiesce(5, 3, 2, placed=2, reduced=True)
        order = stage.order()
        assert (order.first_step, order.roll_forward is not None) == (4, True)
        assert 3 not in order.members
        stage.start()
        stage.commit(3)  # late
        assert stage.ranks[0].last(Stop).generation == 5


@scene(**RESPAWNING)
async def test_the_last_step_is_not_switched_after(stage: Stage) -> None:
    async with watched(stage):
        stage.train(steps=9)
        await lose_and_respawn(stage, committed=9)
        come(stage, 1)
        await considered(stage)
        stage.prepare()
        stage.commit(9, switch=True)
        assert stage.order().generation == 2
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


@scene(**RESPAWNING, device="cuda", backend="nccl")
async def test_with_nccl_layers_move_before_the_generation_trains(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await come_back(stage)
        first = stage.ahead()
        assert first is not None
        assert first.transition is not None
        stage.prepare()
        stage.commit(3, switch=True)
        assert stage.ahead() is None, "there is one switch"
        assert stage.ranks[0].count(Migrate) == 0
        stage.say(stage.ranks[0], Switched(generation=3, moved_bytes=700, transfer_s=0.25))
        stage.start()
    (record,) = stage.events("join")
    assert (record["moved_bytes"], record["transfer_s"], record["migrate_s"]) == (700, 0.25, 0.0)
    assert record["rounds"] == stage.events("transition")[-1]["rounds"] > 0
    assert record["stall_s"] >= 0


@scene(**RESPAWNING, steps=30)
async def test_the_outcome_of_a_better_plan_begins_with_it(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await come_back(stage)
        stage.switch(3)
        for step in range(4, 8):
            stage.commit(step, step_s=5.0)
        assert [event["generation"] for event in stage.events("outcome")] == [2], "of the plan before: it has ended"
        stage.switch(8)
        for step in range(9, 19):
            stage.commit(step, step_s=0.2)
    outcome = stage.events("outcome")[-1]
    assert (outcome["generation"], outcome["steps"], outcome["measured_step_s"]) == (4, 10, 0.2)
    assert (outcome["predicted_stall_s"], outcome["policy"]) == (0.0, stage.events("decision")[-1]["chosen"])


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
        await until(lambda: stage.events("decision") or stage.ahead())
        stage.reap(1)
        stage.quiesce(stage.ranks[0].last(Stop).generation, 3)
        assert stage.order().members
    assert stage.ended is None


# --- workers that leave ----------------------------------------------------------------------------------------------


def drained(stage: Stage, *workers: int) -> Message:
    """Ask for workers to leave; return the answer."""
    user = Puppet("user")
    stage.say(user, Drain(workers=workers))
    return user.sent[-1]


@pytest.mark.parametrize(
    "policy",
    ["chameleon", "repair", "repartition", "oobleck", "paper", "drop-replica", "restart", "reroute", "recycle"],
)
def test_a_worker_leaves_under_any_policy(tmp_path: Path, policy: PolicyName) -> None:
    async def leave(stage: Stage) -> None:
        async with watched(stage):
            stage.train()
            assert drained(stage, 1) == Drain(workers=(1,))
            await considered(stage)
            next_step = stage.switch_to_the_end(3)
            assert 1 not in stage.order().members
            assert stage.ranks[1].count(Exit) == 0
            stage.commit(next_step)
            await until(lambda: stage.ranks[1].count(Exit))
            stage.depart(stage.ranks[1])
            stage.reap(1, 0)
            await asyncio.sleep(20.0)
            stage.commit(next_step + 1)
        (decision,) = stage.events("decision")
        assert (decision["trigger"], decision["lost"], decision["leaving"]) == ("drain", [], [1])
        (record,) = stage.events("join")
        assert (record["workers"], record["drained"]) == ([], [1])
        assert [event["worker"] for event in stage.events("drained")] == [1]
        assert (stage.failures, stage.ended, stage.host.count(Spawn)) == ([], None, 1)

    play(tmp_path, leave, **{**RESPAWNING, "recovery": Recovery(policy=policy, respawn=True)})


@scene(**RESPAWNING)
async def test_asking_again_does_not_begin_anew(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        drained(stage, 1)
        await considered(stage)
        generation = stage.order().generation
        assert drained(stage, 1) == Drain(workers=(1,))
        assert stage.ranks[0].count(Discard) == 0
        assert stage.order().generation == generation


@scene(**RESPAWNING)
async def test_what_a_worker_writes_of_a_checkpoint_after_it_has_left_counts(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        drained(stage, 1)
        await considered(stage)
        next_step = stage.switch_to_the_end(3)
        stage.commit(next_step)
        await until(lambda: stage.ranks[1].count(Exit))
        stage.save(3, 0, 0, 1)
        assert not stage.events("checkpoint")
        stage.save(3, 1, 2, 3)
        assert [event["step"] for event in stage.events("checkpoint")] == [3]


@scene(**{**RESPAWNING, "parallel": Parallel(dp=1, pp=4)})
async def test_layers_of_which_only_a_drained_worker_has_any_move_from_it(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        drained(stage, 1)
        order = await considered(stage)
        assert 1 not in order.members
        moves = stage.ranks[1].last(Migrate).moves
        assert {layer for source, _, layer, _ in moves if source == 1} == set(stage.layers_of(1))
        stage.switch_to_the_end(3)
    assert stage.events("drain_failed") == []


@pytest.mark.parametrize("policy", ["chameleon", "repartition", "restart"])
def test_layers_of_a_drained_worker_do_not_migrate_with_nccl(tmp_path: Path, policy: PolicyName) -> None:
    async def leave(stage: Stage) -> None:
        async with watched(stage):
            stage.train()
            drained(stage, 1)
            order = await considered(stage)
            assert 1 not in order.members
            assert stage.ranks[1].count(Migrate) == 0
            assert order.transition is not None
            assert 1 in order.transition.participants

    changes = {
        "backend": "nccl",
        "device": "cuda",
        "parallel": Parallel(dp=1, pp=4),
        "recovery": Recovery(policy=policy),
    }
    play(tmp_path, leave, **{**RESPAWNING, **changes})


@scene(**{**STEADY, "parallel": Parallel(dp=1, pp=4)})
async def test_a_worker_that_is_needed_stays(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        drained(stage, 1)
        await until(lambda: stage.events("drain_failed"))
        stage.commit(3)
    (event,) = stage.events("drain_failed")
    assert event["workers"] == [1]
    assert "reroute: " in event["message"]
    (decision,) = stage.events("decision")
    assert (decision["trigger"], decision["chosen"]) == ("drain", None)
    assert stage.ranks[0].count(Prepare) == 0
