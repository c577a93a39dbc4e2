"""Workers that come back on a stage, and plans that are looked for during training."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from chameleon_ft.config import Batch, Recovery
from chameleon_ft.protocol.messages import Hello, Prepare, Ready, Spawn
from chameleon_ft.protocol.parts import Member
from chameleon_ft.recovery.generation import WorkerOrders
from tests.coordinator.stage import Puppet, Stage

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
    """Keep the clock of the coordinator running."""
    watching = asyncio.create_task(stage.coordinator.wait())
    yield
    watching.cancel()


def orders_of(stage: Stage, generation: int) -> dict[int, WorkerOrders]:
    """Return the order of each worker to prepare a generation."""
    sent = {worker: [m.orders for m in puppet.sent if isinstance(m, Prepare)] for worker, puppet in stage.ranks.items()}
    return {worker: order for worker, own in sent.items() for order in own if order.generation == generation}


async def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds; if it never does, the test fails by its time limit."""
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


def join_from_late_host(stage: Stage, worker: int) -> Puppet:
    """Have a worker of a host that joins during the run connect; it still has to load."""
    rank = stage.ranks[worker] = Puppet(f"worker {worker}")
    stage.say(rank, Hello(member=Member(worker, 1), host="10.0.0.2"))
    return rank


async def considered(stage: Stage) -> WorkerOrders:
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
