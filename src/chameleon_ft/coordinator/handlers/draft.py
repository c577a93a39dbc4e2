"""The next state of a run while an event is being handled.

Records of incidents: of the losses, of repeated deaths, and of the evidence of hangs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from chameleon_ft.coordinator import commands
from chameleon_ft.coordinator.commands import Acknowledge, Command, Record, Send
from chameleon_ft.coordinator.events import Moment
from chameleon_ft.coordinator.state.incidents import Incident
from chameleon_ft.coordinator.state.members import Worker
from chameleon_ft.coordinator.state.state import Phase, State
from chameleon_ft.events import kinds, lines
from chameleon_ft.events.evidence import Evidence
from chameleon_ft.plan import Plan
from chameleon_ft.protocol import messages
from chameleon_ft.protocol.messages import Message
from chameleon_ft.quantities import counted
from chameleon_ft.recovery.generation import GenerationSpec


class Draft:
    """Collects the changes and commands that one event leads to.

    It replaces states, never changes them, and does not outlive the event: seen from outside, handling an event is a
    pure function. Handlers read like ordinary code, and need not pass states and commands to each other.

    Attributes:
        state: the state so far.
        at: the time of the event.
        commands: in the order in which they are to be carried out.
    """

    def __init__(self, state: State, at: Moment) -> None:
        self.state = state
        self.at = at
        self.commands: list[Command] = []

    def change_worker(self, worker: Worker, **changes: Any) -> None:
        """Replace fields of one incarnation of a worker."""
        self.state = replace(self.state, members=self.state.members.changed(worker, **changes))

    def begin_generation(self, spec: GenerationSpec, *, loads: bool = False) -> None:
        """Put a generation in force, which begins.

        Args:
            loads: whether all workers load their layers, instead of keeping those that they have.
        """
        before = {} if self.state.active is None or loads else _layers_run(self.state.active.plan)
        new = [worker for worker, layers in _layers_run(spec.plan).items() if not layers <= before.get(worker, set())]
        placement, health = spec.plan.placement, replace(self.state.health, disagreement=None)
        health = health.loaded(spec.first_step, spec.witnesses) if loads else health.held_by(placement)
        if spec.no_snapshots and (self.state.active is None or not self.state.active.no_snapshots):
            message = f"none are taken, because {spec.no_snapshots}"
            self.record(kinds.SnapshotsOff(reason=spec.no_snapshots, message=message))
        self.state = replace(
            self.state,
            phase=Phase.REGROUPING,
            generation=spec.generation,
            active=spec,
            finished=frozenset(),
            members=self.state.members.with_new_layers(new),
            health=health,
        )

    def enter_stage(self, step: int) -> None:
        """Have the generation continue with the plan for the micro-batches of a step, if it has another one for it.

        Workers do so by themselves. The layers stay where they are, so a better plan is looked for.
        """
        active, in_force = self.state.active, self.state.in_force
        if active is None or active.at(step) is active:
            return
        outcomes, outcome = self.state.outcomes.ended()
        # An answer to what was asked before is of no use any more.
        scale_up = replace(self.state.scale_up.with_provisional_plan(self.at.monotonic_s), considering=None)
        self.state = replace(
            self.state,
            active=active.at(step),
            in_force=None if in_force is None else in_force.at(step),
            outcomes=outcomes,
            scale_up=scale_up,
        )
        self.record(outcome)
        self.do(commands.Task.BEGIN_STAGE, commands.Task.FORGET_DECISIONS)

    def do(self, *commands: Command) -> None:
        """Add commands."""
        self.commands += commands

    def record(self, record: lines.Record | None) -> None:
        """Have a record written and shown, if there is one."""
        if record is not None:
            self.do(Record(record))

    def send(self, worker: int, message: Message) -> None:
        """Send to one worker, if it is connected."""
        if (connection := self.state.members[worker].connection) is not None:
            self.do(Send(connection, message))

    def tell_live(self, message: Message) -> None:
        """Send to every live worker."""
        for worker in self.state.members.live():
            self.send(worker, message)

    def tell_agents(self, message: Message) -> None:
        """Send to every agent."""
        self.do(*(Send(agent, message) for agent in self.state.members.agents))

    def tell_all(self, message: Message) -> None:
        """Send to every worker that is connected, spares and newcomers included, every agent and every standby."""
        self.do(*(Send(connection, message) for connection in self.state.connections))

    def announce(self) -> None:
        """Tell all peers the term and the coordinators that stand by."""
        self.do(*(Acknowledge(connection) for connection in self.state.connections))

    def new_generation(self) -> int:
        """Return the number of another generation."""
        self.state = replace(self.state, newest=self.state.newest + 1)
        return self.state.newest


def _layers_run(plan: Plan) -> dict[int, set[int]]:
    """Return the layers that each worker runs; it may hold more."""
    run: dict[int, set[int]] = {}
    for hops in {id(route.hops): route.hops for route in plan.routes}.values():
        for hop in hops:
            run.setdefault(hop.worker, set()).update(hop.layers)
    return run


def record_incident(draft: Draft, active: GenerationSpec | None, *, stop: str = "") -> None:
    """Record the losses of an incident that is over, and learn from the durations of its phases."""
    state, incident, now = draft.state, draft.state.incident, draft.at.unix_s
    # No worker stops for a spare.
    was_a_stall = incident.stopped_at > 0 and not incident.is_switch
    stopped_at = incident.stopped_at or now
    incident = replace(incident, stopped_at=stopped_at, decided_at=incident.decided_at or stopped_at)
    records = incident.records(
        active, generation=state.generation, resumed_at=now, cause_of=state.describe_cause, stop=stop
    )
    for record in records:
        draft.record(record)
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
        draft.record(kinds.Blocklisted(worker=worker, deaths=deaths, message=message))


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
    draft.record(kinds.NotEnded(worker=worker.id, host=worker.host, message=message))


def hang_examined(draft: Draft, worker: Worker, message: messages.HangEvidence) -> None:
    """Save and record the evidence of the hang of a worker, which may be in its failure's record or come after it."""
    evidence, state = Evidence.parse(message.activity), draft.state
    last, place = evidence.last, evidence.place
    draft.change_worker(worker, hung_in="" if last is None else str(last), hung_at=place or "")
    file = f"worker-{worker.id}-{worker.incarnation}.txt"
    draft.do(commands.SaveEvidence(file, f"{message.process}\n\n{message.activity}"))
    is_late = not any(loss.worker == worker.id for loss in state.incident.losses)
    draft.record(
        kinds.Hang(
            worker=worker.id,
            incarnation=worker.incarnation,
            host=state.hosts().get(worker.id, ""),
            process=message.process,
            doing=None if last is None else str(last),
            since=None if last is None else last.time,
            place=place,
            file=file,
            message=f"worker {worker.id} hung at {place}; see incidents/{file}" if is_late and place else None,
        )
    )
