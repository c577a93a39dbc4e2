"""The end of a run: after its last step, or before it with a checkpoint, from which the same run can be resumed."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from chameleon_ft.coordinator.commands import Send
from chameleon_ft.coordinator.handlers import incidents
from chameleon_ft.coordinator.handlers.draft import Draft
from chameleon_ft.coordinator.state.state import Ending
from chameleon_ft.events import kinds
from chameleon_ft.events.records import RunStatus
from chameleon_ft.protocol.messages import Finish

SIGNAL_WINDOW_S: Final = 1.0
"""Seconds in which signals count once: a batch system sends SIGTERM to all processes, some of which pass it on."""
UNSAVED: Final = "the last checkpoint could not be written, and --resume continues from the one before"
"""The reason given at the end of a run whose last state is in no checkpoint."""


def request(draft: Draft, status: RunStatus, signal: str = "") -> None:
    """End the run after the current step with a checkpoint; if asked again, or before training, at once.

    Args:
        signal: that asks for it, if the run is terminated.
    """
    state, now = draft.state, draft.at.monotonic_s
    ending = state.ending
    is_repeated = ending is not None and ending.status == status and now - ending.since_s < SIGNAL_WINDOW_S
    if status == "terminated" and is_repeated:
        return
    if state.nothing_trained or ending is not None:
        incidents.end(draft, status, _by(status, signal))
        return
    draft.state = replace(draft.state, ending=Ending(status, signal, now))
    kind = kinds.Interrupt if status == "interrupted" else kinds.Termination
    draft.record(kind(message="ending after this step with a checkpoint; again to end at once"))
    draft.tell_live(Finish())


def finish(draft: Draft, connection: int, message: Finish) -> None:
    """Answer a command that asks for the end of the run, and end it; asking again changes nothing."""
    draft.do(Send(connection, message))
    if message.at_once:
        incidents.end(draft, "interrupted", _by("interrupted"))
    elif draft.state.ending is None:
        request(draft, "interrupted")


def finished(draft: Draft, worker: int) -> None:
    """Note that a worker has finished training; end the run when all have."""
    state, finished = draft.state, draft.state.finished | {worker}
    draft.state = replace(draft.state, finished=finished)
    if state.active is not None and finished.issuperset(state.active.plan.workers):
        _end(draft)


def _end(draft: Draft) -> None:
    """End the run, whose checkpoint is written, or could not be."""
    state = draft.state
    is_saved = state.committed not in state.checkpoints.failed
    if state.committed >= state.settings.steps:
        # Its last state is lost: a script that continues after exit code 0 would take an older one for it.
        reason = "all steps are trained" + ("" if is_saved else f", but {UNSAVED}")
        incidents.end(draft, "finished" if is_saved else "failed", reason)
    elif (reason := state.health.ending) and state.ending is not None and state.ending.trains_no_step:
        saved = f"the state before it is in the checkpoint of step {state.committed}" if is_saved else UNSAVED
        incidents.end(draft, "failed", f"{reason}; {saved}")
    elif reason:
        incidents.end(draft, "failed", reason)
    else:
        ending = state.ending or Ending("interrupted")
        how = "with a checkpoint" if is_saved else f"but {UNSAVED}"
        incidents.end(draft, ending.status, f"{_by(ending.status, ending.signal)}, {how}")


def _by(status: RunStatus, signal: str = "") -> str:
    return f"terminated by {signal}" if status == "terminated" else "interrupted by the user"
