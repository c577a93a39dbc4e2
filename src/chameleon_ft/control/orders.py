"""The orders of generations: worked out from plans, recorded, and sent to workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from chameleon_ft.control import commands, events
from chameleon_ft.control.decisions.decisions import Decisions
from chameleon_ft.control.decisions.planner import Planner
from chameleon_ft.control.decisions.recovery_plan import RecoveryPlan
from chameleon_ft.control.peers import Peers
from chameleon_ft.control.rendezvous import RendezvousStore
from chameleon_ft.control.state.active_plan import ActivePlan
from chameleon_ft.control.state.state import State
from chameleon_ft.control.wire import messages
from chameleon_ft.errors import ProfileError
from chameleon_ft.observe import GenerationPlan, Recorder, RunDirectory


class Orders:
    """Works out the orders of each generation, and sends them.

    Args:
        peers: the connected peers.
        now: returns the time.
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        planner: Planner,
        decisions: Decisions,
        rendezvous: RendezvousStore,
        recorder: Recorder,
        peers: Peers,
        now: Callable[[], events.Moment],
    ) -> None:
        self._run = run
        self._planner = planner
        self._decisions = decisions
        self._rendezvous = rendezvous
        self._recorder = recorder
        self._peers = peers
        self._now = now
        self._prepared: GenerationPlan | None = None  # of the generation that is being prepared, or was last
        self._in_force: GenerationPlan | None = None

    def continue_from(self, state: State) -> None:
        """Take in the generations of a coordinator that is lost; send nothing."""
        if state.active is not None:
            planned, _ = self._orders(state, RecoveryPlan.kept(state.active, None), state.generation)
            self._begin(state, planned)
        if (upcoming := state.switches.underway) is not None:
            self._prepared, _ = self._orders(state, RecoveryPlan.kept(upcoming.plan, None), upcoming.number)

    def launch(self, state: State, plan: RecoveryPlan, *, is_first: bool) -> events.Event:
        """Send the orders of a generation."""
        generation = state.generation
        try:
            planned, orders = self._orders(state, plan, generation, active=state.active)
        except ProfileError as error:  # a link between hosts without costs
            return events.DecisionFailed(at=self._now(), question=state.question, reason=str(error))
        self._peers.send_alike(orders)
        self._begin(state, planned)
        launched = events.Launched(at=self._now(), generation=generation)
        # Before any answer is handled: records of a generation mean nothing without its plan.
        self._recorder.plan(planned, policy=plan.policy)
        if is_first:
            self._recorder.started(self._planner.describe(plan, run=str(self._run.path), generation=generation))
        return launched

    def prepare(self, state: State) -> events.Event | None:
        """Send the orders of the next generation, to be prepared."""
        upcoming = state.switches.next
        assert upcoming is not None
        try:
            to_prepare = self._to_prepare(state, upcoming.plan)
            self._prepared, orders = self._orders(state, to_prepare, upcoming.number, active=upcoming.plan)
        except ProfileError as error:
            return events.PrepareFailed(at=self._now(), generation=upcoming.number, reason=str(error))
        self._peers.send_alike({connection: messages.Prepare(order=order) for connection, order in orders.items()})
        return None

    def migrate(self, state: State, command: commands.Migrate) -> None:
        """Send the orders to move layers."""
        order = self._planner.migrate(command.plan, state.members.hosts(), generation=command.generation)
        for worker in command.workers:
            if (connection := state.members[worker].connection) is not None:
                self._peers.send(connection, order)

    def begin(self, state: State) -> None:
        """Record the plan of the generation that was prepared last, and begin to measure it."""
        planned, active = self._prepared, state.active
        assert active is not None
        assert planned is not None
        assert planned.generation == state.active_generation
        self._begin(state, planned)
        self._recorder.plan(replace(planned, first_step=active.first_step), policy=active.policy)

    def _begin(self, state: State, planned: GenerationPlan) -> None:
        self._in_force = planned
        self._planner.begin(planned, state.members.hosts())

    def _to_prepare(self, state: State, plan: ActivePlan) -> RecoveryPlan:
        """Return a plan with its program; if only owners change, that is the one in force, and nothing is searched."""
        found, active, now = self._decisions.to_prepare(plan), state.active, self._in_force
        assert active is not None
        is_same = (plan.plan, plan.in_flight_limits) == (active.plan, active.in_flight_limits)
        return RecoveryPlan.kept(plan, now.program) if is_same and found.program is None and now is not None else found

    def _orders(
        self, state: State, plan: RecoveryPlan, generation: int, *, active: ActivePlan | None = None
    ) -> tuple[GenerationPlan, dict[int, messages.StartGeneration]]:
        """Return the record of a generation and the orders of its workers, by connection.

        While the disk is full or does not answer, workers keep the plan, `active`, in place of the journal.
        """
        self._rendezvous.forget_before(min(generation, state.active_generation))
        planned, orders = self._planner.orders(plan, state.members.hosts(), generation=generation)
        skipped = tuple(sorted(state.health.skipped))
        complete = state.snapshots.complete
        kept = "" if active is None or not self._recorder.files.is_late else active.pack()
        known = {
            "skipped": skipped,
            "snapshot": None if complete is None else complete.step,
            "finish": state.ending is not None and state.ending.trains_no_step,
            "plan": kept,
        }
        orders = {worker: order.model_copy(update=known) for worker, order in orders.items()}
        connections = {worker: state.members[worker].connection for worker in orders}
        return planned, {at: orders[worker] for worker, at in connections.items() if at is not None}
