"""Runs whose coordinator is replaced, replayed through the state machine."""

from __future__ import annotations

from chameleon_ft.config import Recovery
from tests.coordinator.histories import History, new_state


def training(steps: int = 3, **changes: object) -> History:
    history = History(new_state(**changes))
    history.train(steps)
    return history


def prepared_to_move(*, waves: int) -> History:
    """A run that has lost a worker, and is prepared to move layers to one on another host."""
    history = training()
    history.replace_lost(waves=waves)
    return history


def replaced(history: History, *, ranks: set[tuple[int, int]] | None = None, absent: tuple[int, ...] = ()) -> None:
    """Replace the coordinator, and have its peers come back."""
    history.commands.clear()
    known = history.state.newest
    history.take_over()
    history.return_agent(ranks=ranks)
    for worker in history.live():
        if worker not in absent:
            history.return_worker(worker, known=known)


def preparing() -> tuple[History, int]:
    """Have a worker come back; return the number of the generation that is prepared for it, too."""
    history = training(recovery=Recovery(respawn=True, respawn_delay_s=0.1))
    history.reap(3)
    history.quiesce()
    history.start()
    history.commit()
    history.wait(0.3)
    history.come_back(3)
    history.wait(0.7)
    history.consider(0, 1, 2, 3)
    assert history.state.switches.next is not None
    return history, history.state.switches.next.number
