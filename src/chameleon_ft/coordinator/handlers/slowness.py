"""Workers and links that become slow, or recover: the change is recorded, and a better plan is searched for meanwhile.

What follows is decided like any switch: the plan stays, the worker gets fewer micro-batches or layers, or none at all.

Failures that a user injects into a live run.
"""

from __future__ import annotations

import statistics
from typing import Any

from chameleon_ft.coordinator.commands import LogFault, Send
from chameleon_ft.coordinator.detectors.base import Recovered, RecoveredLink, Slow, SlowLink
from chameleon_ft.coordinator.events import Event, Received, Ticked
from chameleon_ft.coordinator.handlers.draft import Draft
from chameleon_ft.coordinator.state.state import Phase, State
from chameleon_ft.events import kinds
from chameleon_ft.protocol.messages import Committed, Inject, Kill, Prepared, Quiesced, Refused, SnapshotTaken, Started
from chameleon_ft.quantities import duration


def slow(draft: Draft, finding: Slow) -> None:
    """Record that a worker is slow, and what that costs."""
    message = f"worker {finding.worker} computes at {finding.speed:.2f} of the speed of others"
    draft.record(kinds.Slow(worker=finding.worker, **_slowness(draft, finding, message)))


def slow_link(draft: Draft, finding: SlowLink) -> None:
    """Record that messages on a link take longer, and what that costs."""
    one, other = finding.workers
    ratio = f"{1 / finding.speed:.2f}"
    message = f"micro-batches take {ratio} times as long between workers {one} and {other} as on other links"
    draft.record(kinds.SlowLink(workers=finding.workers, **_slowness(draft, finding, message)))


def _slowness(draft: Draft, finding: Slow | SlowLink, message: str) -> dict[str, Any]:
    """Return the fields that events about slow workers and links have in common; `message` is the first part of it."""
    message += f" since step {finding.since_step}"
    steps_s = draft.state.detectors.watchdog.steps_s
    count = draft.state.committed - finding.since_step
    before_s = now_s = None
    if 0 < count < len(steps_s):
        before_s, now_s = statistics.median(steps_s[:-count]), statistics.median(steps_s[-count:])
        message += f"; a step takes {duration(now_s)}, and took {duration(before_s)} before"
    return {
        "speed": finding.speed,
        "since_step": finding.since_step,
        "step": draft.state.committed,
        "before_step_s": before_s,
        "step_s": now_s,
        "message": message,
    }


def recovered(draft: Draft, finding: Recovered) -> None:
    """Record that a worker is slow no longer, or is to be tried again."""
    common = _recovery(draft, finding, f"worker {finding.worker}")
    draft.record(kinds.Recovered(worker=finding.worker, **common))


def recovered_link(draft: Draft, finding: RecoveredLink) -> None:
    """Record that a link is slow no longer, or is to be tried again."""
    one, other = finding.workers
    what = f"the link of workers {one} and {other}"
    draft.record(kinds.RecoveredLink(workers=finding.workers, **_recovery(draft, finding, what)))


def _recovery(draft: Draft, finding: Recovered | RecoveredLink, what: str) -> dict[str, Any]:
    reason = "is tried again, after it was slow" if finding.is_trial else "is as fast as the others again"
    return {"step": draft.state.committed, "is_trial": finding.is_trial, "message": f"{what} {reason}"}


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
        case Received(message=Quiesced()):
            # Nothing follows from the reports before the last one.
            return len(state.quiesced) + 1 >= len(state.members.live())
        case Received(message=Started()):
            # The first of them ends the incident.
            return state.phase is Phase.REGROUPING
        case Received(message=Committed() | Prepared() | SnapshotTaken()):
            return False
        case Ticked():
            return state.phase is Phase.STOPPING
        case _:
            return True
