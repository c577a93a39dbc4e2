"""Failures that a user injects into a live run."""

from __future__ import annotations

from chameleon_ft.control.commands import LogFault, Send
from chameleon_ft.control.events import Event, Received, Ticked
from chameleon_ft.control.handlers.draft import Draft
from chameleon_ft.control.state.state import Phase, State
from chameleon_ft.control.wire.messages import (
    Committed,
    Inject,
    Kill,
    Prepared,
    Quiesced,
    Refused,
    SnapshotTaken,
    Started,
)


def inject(draft: Draft, connection: int, message: Inject) -> None:
    """Have a worker fail, and answer the command that asked for it."""
    state, live, reason = draft.state, draft.state.members.live(), None
    if message.worker not in live:
        reason = f"worker {message.worker} is not live; live are {list(live)}"
    elif message.step is not None and message.step < state.committed:
        reason = f"step {message.step} is over; the run is in step {state.committed}"
    if reason is not None:
        draft.do(Send(connection, Refused(reason=reason)))
        return
    worker = state.members[message.worker]
    if message.kind == "kill" and message.phase is None and worker.agent is not None:
        draft.do(LogFault(worker.id), Send(worker.agent, Kill(worker=worker.id)))
    else:
        draft.send(worker.id, message)
    draft.do(Send(connection, message))


def may_reveal_faults(state: State, event: Event) -> bool:
    """Return whether an event may reveal the loss of a worker, or be the time to record one."""
    if state.phase in (Phase.GATHERING, Phase.OVER):
        return False
    match event:
        case Received(message=Quiesced()):  # nothing follows from the reports before the last one
            return len(state.quiesced) + 1 >= len(state.members.live())
        case Received(message=Started()):
            return state.phase is Phase.REGROUPING  # the first of them ends the incident
        case Received(message=Committed() | Prepared() | SnapshotTaken()):
            return False
        case Ticked():
            return state.phase is Phase.STOPPING
        case _:
            return True
