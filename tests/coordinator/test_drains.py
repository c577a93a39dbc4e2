"""Workers that leave while the run trains, as the coordinator sees them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from chameleon_ft.config import Parallel, PolicyName, Recovery
from chameleon_ft.protocol.messages import Discard, Drain, Exit, Message, Migrate, Prepare, Spawn
from tests.coordinator.newcomers import RESPAWNING, STEADY, considered, until, watched
from tests.coordinator.stage import Puppet, Stage, play, scene


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
        assert {move.layer for move in moves if move.source == 1} == set(stage.layers_of(1))
        stage.switch_to_the_end(3)
    assert stage.events("drain_failed") == []


@pytest.mark.parametrize("policy", ["repartition", "restart"])
def test_layers_of_a_drained_worker_do_not_migrate_under_a_policy_that_stops_to_move_them(
    tmp_path: Path, policy: PolicyName
) -> None:
    async def leave(stage: Stage) -> None:
        async with watched(stage):
            stage.train()
            drained(stage, 1)
            order = await considered(stage)
            assert 1 not in order.members
            assert stage.ranks[1].count(Migrate) == 0
            assert order.transition is not None
            assert 1 in order.transition.participants

    changes = {"parallel": Parallel(dp=1, pp=4), "recovery": Recovery(policy=policy)}
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
