"""Before a run begins: workers that are lost are started again, or leave their places to other processes."""

from __future__ import annotations

from dataclasses import replace

from chameleon_ft.coordinator.detectors.base import StartStage
from chameleon_ft.coordinator.handlers.draft import Draft
from chameleon_ft.coordinator.state.state import Phase, State
from chameleon_ft.events import kinds
from chameleon_ft.quantities import duration


def stages(state: State) -> dict[int, StartStage]:
    """Return the workers that are not ready yet, or that a run that has not begun lacks, and what they wait for."""
    found: dict[int, StartStage] = {}
    for worker in state.members.unsettled:
        if worker.lost:
            if state.phase is Phase.GATHERING and worker.id not in state.respawns.due:
                found[worker.id] = "vacant"
        elif worker.connection is None:
            found[worker.id] = "connecting"
        elif not worker.takes_part and worker.first_step is None:
            found[worker.id] = "loading"
    return found


def lost(draft: Draft, number: int, cause: str) -> str | None:
    """Have a lost worker started again by its agent, or leave its number to another process that joins.

    Returns:
        Why the run ends, if the worker was lost too often or none can be expected to take its place.
    """
    # A decision on the first plan, if one is being made, includes the worker.
    draft.state = replace(draft.state, question=draft.state.question + 1)
    state, worker = draft.state, draft.state.members[number]
    recovery = state.settings.recovery
    reason = f"worker {number} ended before the run began: {cause}; see {state.settings.logs}"
    if worker.agent is not None and recovery.respawn:
        if state.respawns.is_blocked(number):
            return f"{reason} and recovery.max_respawns"
        remedy = f"it is started again {duration(state.respawns.delay_s(number))} after its process has ended"
    else:
        is_whole_run = len(state.members.workers) == state.settings.workers
        if worker.agent is not None and is_whole_run and all(each.agent == worker.agent for each in state.members):
            # The workers were started on one machine: no other is expected.
            return reason
        draft.change_worker(worker, is_vacant=True)
        remedy = f"its place is open for {duration(state.settings.timeouts.rendezvous_s)}"
    message = f"worker {number} was lost before the run began: {cause}; {remedy}"
    draft.record(kinds.JoinFailed(worker=number, incarnation=worker.incarnation, cause=cause, message=message))
    return None
