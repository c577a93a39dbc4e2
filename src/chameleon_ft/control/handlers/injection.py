"""Failures that a user injects into a live run."""

from __future__ import annotations

from chameleon_ft.control.commands import LogFault, Send
from chameleon_ft.control.handlers.draft import Draft
from chameleon_ft.control.wire.messages import Inject, Kill, Refused

__all__ = ["inject"]


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
