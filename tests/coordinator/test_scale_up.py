"""Workers that join while the run trains, as the coordinator sees them."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from chameleon_ft.cluster import Link
from chameleon_ft.config import Batch, Parallel, Recovery, Snapshots
from chameleon_ft.coordinator.decisions import redundancy as completion
from chameleon_ft.coordinator.decisions import redundancy as keepers
from chameleon_ft.cost.profile import Fingerprint, Profile
from chameleon_ft.errors import ControlError
from chameleon_ft.plan.shards import UNITS
from chameleon_ft.plan.snapshots import SnapshotShare
from chameleon_ft.protocol.messages import (
    Begin,
    Hello,
    HostHello,
    Migrate,
    Ready,
    Spawn,
    Stop,
    Switched,
    Welcome,
    WorkerExited,
)
from chameleon_ft.protocol.parts import Member
from chameleon_ft.recovery import generation
from chameleon_ft.recovery.generation import GenerationSpec
from chameleon_ft.storage.plans import read_generation_plans
from chameleon_ft.workload import LayerCost
from tests.coordinator.newcomers import (
    RESPAWNING,
    come_back,
    considered,
    join_from_late_host,
    lose_and_respawn,
    messages,
    orders_of,
    until,
    watched,
)
from tests.coordinator.stage import Puppet, Stage, scene
from tests.golden import refused


@scene(**RESPAWNING)
async def test_a_lost_worker_comes_back_and_takes_part(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await lose_and_respawn(stage)
        assert stage.host.last(Spawn).members[0].incarnation == 2
        rank = stage.join(1)
        assert rank.last(Welcome).incarnation == 2
        assert stage.events("joined") == [], "it is still loading"
        stage.say(rank, Ready())
        assert messages(stage, "joined") == ["worker 1 has joined as a spare"]
        first = await considered(stage)
        assert (first.generation, first.members, first.first_step, first.load) == (3, (0, 1, 2, 3), 4, "keep")
        order = rank.last(Migrate)
        assert order.generation == 3
        assert {(move.destination, move.num_bytes) for move in order.moves} == {(1, 772)}
        assert stage.ranks[0].count(Migrate) == 0, "it has no memory for more layers yet"
        assert orders_of(stage, 3)[1].operations == (), "it has no operations until it holds its layers"
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
        left = orders_of(stage, 3)[1].sharding
        assert left is not None
        assert left.owned_by(1) == {}, "it owns nothing before the switch"
        assert {move.num_bytes for move in order.moves} == {256}, "parameters move with the layer"
        stage.commit(3)
        stage.switch(4)
        stage.commit(5)
        second = stage.ahead()
        assert second is not None
        assert second.transition is None
        after = second.sharding
        assert after is not None
        assert after.copies == 2
        assert after.owned_by(1).keys() == {move.layer for move in order.moves}
        moves = after.moves_from(left)
        assert [(m.source, m.destination, m.layer, m.start, m.stop) for m in moves] == [m[:5] for m in order.slices]
        assert all(num_bytes == 516 * (stop - start) // UNITS for *_, start, stop, num_bytes in order.slices)
        stage.switch(6)
    (moved,) = stage.events("migration")
    assert (moved["layers"], moved["slices"]) == (len(order.moves), len(order.slices))
    assert len(stage.failures) == 1


@scene(
    workers=6,
    parallel=Parallel(dp=3, pp=2, optimizer_redundancy="auto"),
    batch=Batch(micro_batches=12, micro_batch_size=1),
    recovery=Recovery(policy="reroute", salvage=False),
)
async def test_no_program_is_looked_for_when_only_owners_change(stage: Stage) -> None:
    async with watched(stage):
        stage.train(workers=6)
        stage.reap(1)
        stage.quiesce(2, 3)
        stage.start()
        threads: set[threading.Thread] = set()
        with_keepers = keepers.with_keepers

        def noting(*arguments: Any) -> GenerationSpec:
            threads.add(threading.current_thread())
            return with_keepers(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(completion, "with_keepers", noting)
            patch.setattr(generation, "best_program", no_search)
            patch.setattr(generation, "check_program", no_search)
            before, after = stage.order(), await considered(stage)
        assert threads, "it has keepers"
        assert threading.main_thread() not in threads, "the event loop goes on meanwhile"
        sharding = after.sharding
        assert sharding is not None
        assert sharding.copies == 2
        assert after.operations == before.operations
        stage.switch(3)
    plans = [(event["generation"], event["policy"]) for event in stage.events("plan")]
    assert plans[-1] == (3, "redundancy")


def no_search(*_: object, **__: object) -> None:
    raise AssertionError("the program in force is known")


@scene(**RESPAWNING, snapshots=Snapshots(every=3))
async def test_a_worker_whose_layers_are_still_arriving_votes_for_snapshots_too(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        await come_back(stage)
        orders = orders_of(stage, 3)
        assert orders[1].snapshots == SnapshotShare()
        assert all(orders[worker].snapshots not in (None, SnapshotShare()) for worker in orders if worker != 1)


@scene(**RESPAWNING)
async def test_newcomers_of_the_same_moment_are_considered_together(stage: Stage) -> None:
    late = Puppet("late host")
    async with watched(stage):
        stage.train()
        stage.say(late, HostHello(host="b", slots=3))
        assert late.last(Spawn) == Spawn(members=(Member(4, 1), Member(5, 1), Member(6, 1)))
        for worker in (4, 5, 6):
            rank = join_from_late_host(stage, worker)
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
async def test_slow_newcomers_are_not_waited_for_without_end(stage: Stage) -> None:
    late = Puppet("late host")
    async with watched(stage):
        stage.train()
        stage.say(late, HostHello(host="b", slots=3))
        for worker in (4, 5):
            stage.say(join_from_late_host(stage, worker), Ready())
        await considered(stage)
    assert stage.ended is None


@scene(**{**RESPAWNING, "recovery": Recovery(policy="chameleon", salvage=False)})
async def test_no_worker_is_started_again_unless_configured(stage: Stage) -> None:
    async with watched(stage):
        stage.train()
        stage.reap(1)
        stage.quiesce(2, 3)
        stage.start()
        await asyncio.sleep(100.0)
    assert stage.host.count(Spawn) == 1


@scene(**{**RESPAWNING, "recovery": Recovery(policy="repartition", respawn=True, respawn_delay_s=4.0)})
async def test_under_a_policy_that_stops_to_move_them_layers_move_before_the_generation_trains(stage: Stage) -> None:
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
    for worker in (2, 9, -1):
        with refused(ControlError):
            stage.say(Puppet("late"), Hello(member=Member(worker, 0), host="h"))
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
        with refused(ControlError):
            stage.say(Puppet("worker 5"), Hello(member=Member(5, 1), host="10.0.0.2"))
        stage.ranks[4] = Puppet("worker 4")
        stage.say(stage.ranks[4], Hello(member=Member(4, 1), host="10.0.0.1"))
        stage.say(far, WorkerExited(member=Member(5, 1), exit_code=1))
        stage.say(stage.ranks[4], Ready())
        await until(lambda: stage.events("decision") or stage.ahead())
        stage.reap(1)
        stage.quiesce(stage.ranks[0].last(Stop).generation, 3)
        assert stage.order().members
    assert stage.ended is None
