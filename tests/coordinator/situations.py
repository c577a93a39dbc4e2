"""Situations in which histories of several tests begin."""

from __future__ import annotations

from chameleon_ft.config import Recovery
from chameleon_ft.protocol.messages import Drain, Message, Spawn
from chameleon_ft.protocol.parts import Member
from tests.coordinator.histories import History, new_state

RESPAWNING = Recovery(respawn=True, respawn_delay_s=4.0, max_respawns=1)


def training(**changes: object) -> History:
    """A run that has taken three steps."""
    history = History(new_state(**changes))
    history.train()
    return history


def lose_and_respawn(history: History, worker: int = 1) -> None:
    """Lose a worker, train on without it, and wait until its agent is told to restart it."""
    history.reap(worker)
    history.quiesce()
    history.start()
    history.wait(5.0)
    assert history.sent(Spawn)[-1] == Spawn(members=(Member(worker, 2),))


def come_back(history: History, worker: int = 1) -> None:
    """Lose a worker, have it come back, and wait until it is considered."""
    lose_and_respawn(history, worker)
    history.come_back(worker)
    history.wait(1.0)


def drain(history: History, *workers: int, host: str | None = None, by: int = 2000) -> Message:
    """Ask for workers to leave; return the answer."""
    before = len(history.sent(Message, to=by))
    history.say(by, Drain(workers=workers, host=host))
    return history.sent(Message, to=by)[before]
