"""Records of incidents: of the losses, of repeated deaths, and of the evidence of hangs."""

from __future__ import annotations

from dataclasses import replace

from chameleon_ft.control import commands
from chameleon_ft.control.handlers.draft import Draft
from chameleon_ft.control.state.active_plan import ActivePlan
from chameleon_ft.control.state.incident import Incident
from chameleon_ft.control.state.members import Worker
from chameleon_ft.control.wire import messages
from chameleon_ft.observe.evidence import Evidence
from chameleon_ft.quantities import counted


def record_incident(draft: Draft, active: ActivePlan | None, *, stop: str = "") -> None:
    """Record the losses of an incident that is over, and learn from the durations of its phases."""
    state, incident, now = draft.state, draft.state.incident, draft.at.unix_s
    was_a_stall = incident.stopped_at > 0 and not incident.is_switch  # no worker stops for a spare
    stopped_at = incident.stopped_at or now
    incident = replace(incident, stopped_at=stopped_at, decided_at=incident.decided_at or stopped_at)
    records = incident.records(
        active, generation=state.generation, resumed_at=now, cause_of=state.describe_cause, stop=stop
    )
    draft.do(*(commands.Record(record) for record in records))
    history = state.history
    if active is not None and was_a_stall:
        for record in records:
            history = history.resumed(record)
        if incident.chosen_at:
            history = history.decided(
                looked_up=incident.looked_up,
                decide_s=incident.decided_at - incident.stopped_at,
                hand_out_s=incident.decided_at - incident.chosen_at,
            )
    draft.state = replace(draft.state, incident=Incident(), history=history)


def count_death(draft: Draft, worker: int, *, steps: int, at_link: bool) -> None:
    """Count the death of a worker after so many steps, and say so if it is not taken again; see `Respawns.died`."""
    before = draft.state.respawns
    after = before.died(worker, steps=steps, at_link=at_link)
    draft.state = replace(draft.state, respawns=after)
    if after.is_blocked(worker) and not before.is_blocked(worker):
        deaths = after.deaths[worker]
        times = "once" if deaths == 1 else counted(deaths, "time")
        message = f"worker {worker} was lost {times} and is not taken again; see recovery.max_respawns"
        draft.record("blocklisted", worker=worker, deaths=deaths, message=message)


def report_unresponsive(draft: Draft, connection: int) -> None:
    """Report a worker without an agent that does not answer after `Kill` was sent to it."""
    worker = draft.state.members.killed_on(connection)
    if worker is None:
        return
    process = f"process {worker.process.pid}" if worker.process is not None else "its process"
    # Its agent was lost before: it has ended, or it is out of reach, too.
    silent, remedy = "does not answer and has no agent", "end it by `kill -9`"
    if worker.agent_host:
        silent, remedy = "and the agent of its host do not answer", "start another agent there"
    message = f"worker {worker.id} {silent}, so {process} on {worker.host} may still run: {remedy}"
    draft.record("not_ended", worker=worker.id, host=worker.host, message=message)


def hang_examined(draft: Draft, worker: Worker, message: messages.HangEvidence) -> None:
    """Save and record the evidence of the hang of a worker, which may be in its failure's record or come after it."""
    evidence, state = Evidence.parse(message.activity), draft.state
    last, place = evidence.last, evidence.place
    draft.change_worker(worker, hung_in="" if last is None else str(last), hung_at=place or "")
    file = f"worker-{worker.id}-{worker.incarnation}.txt"
    draft.do(commands.SaveEvidence(file, f"{message.process}\n\n{message.activity}"))
    is_late = not any(loss.worker == worker.id for loss in state.incident.losses)
    draft.record(
        "hang",
        worker=worker.id,
        incarnation=worker.incarnation,
        host=state.hosts().get(worker.id, ""),
        process=message.process,
        doing=None if last is None else str(last),
        since=None if last is None else last.time,
        place=place,
        file=file,
        **({"message": f"worker {worker.id} hung at {place}; see incidents/{file}"} if is_late and place else {}),
    )
