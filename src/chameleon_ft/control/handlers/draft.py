"""The next state of a run while an event is being handled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from chameleon_ft.control.commands import Acknowledge, Command, Record, Send
from chameleon_ft.control.events import Moment
from chameleon_ft.control.state.active_plan import ActivePlan
from chameleon_ft.control.state.members import Worker
from chameleon_ft.control.state.state import Phase, State
from chameleon_ft.control.wire.messages import Message
from chameleon_ft.observe import OtherRecord, OutcomeRecord
from chameleon_ft.plan import Plan


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

    def begin_plan(self, plan: ActivePlan, generation: int, *, loads: bool = False) -> None:
        """Put a plan in force in a generation, which begins.

        Args:
            loads: whether all workers load their layers, instead of keeping those that they have.
        """
        before = {} if self.state.active is None or loads else _layers_run(self.state.active.plan)
        new = [worker for worker, layers in _layers_run(plan.plan).items() if not layers <= before.get(worker, set())]
        placement, health = plan.plan.placement, replace(self.state.health, disagreement=None)
        health = health.loaded(plan.first_step, plan.witnesses) if loads else health.held_by(placement)
        if plan.no_snapshots and (self.state.active is None or not self.state.active.no_snapshots):
            message = f"none are taken, because {plan.no_snapshots}"
            self.record("snapshots_off", reason=plan.no_snapshots, message=message)
        self.state = replace(
            self.state,
            phase=Phase.REGROUPING,
            generation=generation,
            active=plan,
            active_generation=generation,
            finished=frozenset(),
            members=self.state.members.with_new_layers(new),
            health=health,
        )

    def do(self, *commands: Command) -> None:
        """Add commands."""
        self.commands += commands

    def record(self, event: str, **fields: Any) -> None:
        """Record an event that has no record type of its own."""
        self.do(Record(OtherRecord(event, fields)))

    def record_outcome(self, outcome: OutcomeRecord | None) -> None:
        """Record the outcome of a decision, if there is one."""
        if outcome is not None:
            self.do(Record(outcome))

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
