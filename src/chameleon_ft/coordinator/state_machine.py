"""The state machine of a run: one pure function from a state and an event to the next state and commands.

It makes all decisions of the coordinator, with `handlers`. Clocks, connections, searches and files are in
`coordinator`. So whole histories can be replayed, and another process can continue from a stored state.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from chameleon_ft.coordinator import commands, events
from chameleon_ft.coordinator.detectors import base as signals
from chameleon_ft.coordinator.handlers import (
    checkpoints,
    drains,
    endings,
    evaluations,
    gathering,
    health,
    incidents,
    progress,
    regrouping,
    snapshots,
    switches,
    takeover,
)
from chameleon_ft.coordinator.handlers import draft as incident_records
from chameleon_ft.coordinator.handlers import membership as hosts
from chameleon_ft.coordinator.handlers import membership as scale_up
from chameleon_ft.coordinator.handlers import slowness as injection
from chameleon_ft.coordinator.handlers.draft import Draft
from chameleon_ft.coordinator.state.members import Worker
from chameleon_ft.coordinator.state.state import Phase, State
from chameleon_ft.errors import ControlError
from chameleon_ft.events import kinds
from chameleon_ft.protocol import messages
from chameleon_ft.protocol.messages import Message
from chameleon_ft.quantities import duration

TICK_S: Final = 0.05
"""Seconds between two `Ticked` events, unless the coordinator is held up."""

_STALL_S: Final = 1.0
"""Seconds without a tick from which on peers may have noticed that the coordinator was held up."""

_OF_A_GENERATION: Final = (
    messages.Quiesced
    | messages.Switched
    | messages.Started
    | messages.PeerFailed
    | messages.Finished
    | messages.Prepared
    | messages.CheckpointUnreadable
)
_INTRODUCTIONS: Final = messages.Hello | messages.HostHello | messages.StandbyHello
_WATCHED: Final = (Phase.TRAINING, Phase.REGROUPING, Phase.STOPPING)


def step(state: State, event: events.Event) -> tuple[State, tuple[commands.Command, ...]]:
    """Return the state after an event, and the commands that follow from it; none once the run is over.

    Raises:
        ControlError: a peer has sent a message that it may not send; the state stays as it is.
    """
    if state.phase is Phase.OVER:
        return state, ()
    draft = Draft(state, event.at)
    if _has_stalled(state, event):
        # The time of the stall is taken off all deadlines before anything that has happened meanwhile is judged.
        _ticked(draft, has_run=isinstance(event, events.TermClaimed) and event.reason != "")
        if draft.state.phase is Phase.OVER:
            return draft.state, tuple(draft.commands)
    match event:
        case events.Received(connection=connection, message=message):
            _received(draft, connection, message)
        case events.Disconnected(connection=connection, will_return=will_return):
            if not takeover.is_expected_back(draft, connection, will_return=will_return):
                _disconnected(draft, connection)
        case events.Silent(connection=connection, since_s=since_s):
            _silent(draft, connection, since_s)
        case events.Ticked():
            _ticked(draft)
        case events.TookOver(term=term, address=address):
            takeover.took_over(draft, term, address)
        case events.TermClaimed(term=term, reason=reason):
            takeover.reclaimed(draft, term, reason)
        case events.Decided():
            regrouping.decided(draft, event)
        case events.DecisionFailed():
            regrouping.decision_failed(draft, event)
        case events.Considered():
            scale_up.considered(draft, event)
        case events.OperationsMeasured():
            progress.operations_measured(draft, event)
        case events.MarkFailed(step=unmarked, error=error):
            checkpoints.not_marked(draft, unmarked, error)
        case events.FaultsInjected(faults=faults):
            draft.state = replace(draft.state, faults=faults)
        case events.Interrupted(signal=signal):
            endings.request(draft, "terminated" if signal else "interrupted", signal)
        case events.EndRequested(status=status, reason=reason):
            incidents.end(draft, status, reason)
    return draft.state, tuple(draft.commands)


def _has_stalled(state: State, event: events.Event) -> bool:
    """Return whether an event comes first after a time in which the coordinator did not run."""
    if isinstance(event, events.Ticked | events.TookOver | events.FaultsInjected) or state.ticked_at_s is None:
        return False
    return event.at.monotonic_s - state.ticked_at_s > _STALL_S


def _ticked(draft: Draft, *, has_run: bool = False) -> None:
    """Let the time go on; `has_run`: whether this coordinator could not act before, although it ran."""
    state, now = draft.state, draft.at.monotonic_s
    held_up_s = 0.0 if state.ticked_at_s is None else max(0.0, now - state.ticked_at_s - 2 * TICK_S)
    draft.state = replace(draft.state, ticked_at_s=now)
    if held_up_s:
        draft.state = replace(
            draft.state,
            reconnection=state.reconnection.extended(held_up_s),
            switches=state.switches.extended(held_up_s),
        )
    if held_up_s > _STALL_S:
        draft.state = replace(draft.state, reconnection=replace(draft.state.reconnection, stalled_at_s=now))
        if not has_run:
            message = f"the coordinator did not run for {duration(held_up_s)}"
            draft.record(kinds.Stalled(stall_s=held_up_s, message=message))
    state = draft.state
    for connection in takeover.missing(draft):
        _disconnected(draft, connection)
    hosts.admit_waiting(draft)
    stages = gathering.stages(draft.state)
    if stages or draft.state.detectors.start_timeout.since:
        incidents.detect(draft, signals.Starting(now, held_up_s, stages))
    if draft.state.phase is Phase.GATHERING:
        scale_up.respawn_due(draft)
    state = draft.state
    if state.phase not in _WATCHED:
        return
    is_stopping = state.phase is Phase.STOPPING
    live = state.members.live()
    unquiesced = tuple(worker for worker in live if worker not in state.quiesced) if is_stopping else ()
    incidents.detect(
        draft,
        signals.Ticked(
            now,
            held_up_s,
            unquiesced,
            participants=() if is_stopping else tuple(filter(state.needed.__contains__, live)),
            in_first_step=state.members.in_first_step,
        ),
    )
    if draft.state.phase in _WATCHED and draft.state.ending is None:
        scale_up.respawn_due(draft)
        drains.release(draft)
        # Orders would not reach all.
        if not draft.state.reconnection.awaited:
            scale_up.advance(draft)


def _disconnected(draft: Draft, connection: int) -> None:
    """Give up the worker, or the host, at the other end of a connection."""
    state = draft.state
    if connection in state.standbys:
        takeover.standby_left(draft, connection)
    if connection in state.members.agents:
        hosts.lost(draft, connection)
    draft.state = replace(draft.state, admission=draft.state.admission.without(connection))
    if (worker := draft.state.members.worker_of(connection)) is not None:
        draft.change_worker(worker, connection=None)
        incidents.detect(draft, signals.ConnectionEnded(worker.id))


def _silent(draft: Draft, connection: int, since_s: float) -> None:
    """Have the detectors judge a worker that answers no pings; give up any other peer."""
    members = draft.state.members
    if (worker := members.worker_of(connection)) is None:
        draft.do(commands.Drop(connection))
        incident_records.report_unresponsive(draft, connection)
        draft.state = replace(draft.state, members=members.fence_connection(connection))
        _disconnected(draft, connection)
        return
    signal = signals.Silent(
        worker.id, since_s, has_agent=worker.agent is not None, in_first_step=not worker.has_stepped
    )
    incidents.detect(draft, signal)


# --- messages --------------------------------------------------------------------------------------------------------


def _received(draft: Draft, connection: int, message: Message) -> None:
    state = draft.state
    if isinstance(message, _INTRODUCTIONS):
        if message.term > state.term:
            draft.do(commands.Resign())
            return
        if not isinstance(message, messages.StandbyHello):
            draft.do(commands.Acknowledge(connection))
    if connection in state.members.fenced:
        match message:
            case messages.CheckpointSaved():
                # A layer that is stored counts, even if its worker has left.
                checkpoints.saved(draft, message)
            case messages.HangEvidence() if (ending := state.members.killed_on(connection)) is not None:
                incident_records.hang_examined(draft, ending, message)
        return
    match message:
        case messages.Hello() if (before := takeover.replaced(state, message)) not in (None, connection):
            takeover.worker_returned(draft, connection, message, before)
        case messages.HostHello() if (before := takeover.replaced(state, message)) is not None:
            takeover.host_returned(draft, connection, message, before)
        case messages.StandbyHello():
            takeover.standby_joined(draft, connection, message)
        case messages.Hello():
            _hello(draft, connection, message)
        case messages.HostHello():
            hosts.arrived(draft, connection, message)
        case messages.HostExamined(report=report, request=request):
            # Any other was kept while the agent looked for another coordinator.
            if request in (0, connection):
                hosts.examined(draft, connection, report)
        case messages.Inject():
            injection.inject(draft, connection, message)
        case messages.Drain():
            drains.drain(draft, connection, message)
        case messages.SaveCheckpoint():
            checkpoints.save(draft, connection, message)
        case messages.Evaluate():
            evaluations.evaluate(draft, connection, message)
        case messages.Finish():
            endings.finish(draft, connection, message)
        case messages.WorkerExited() | messages.ProcessState() | messages.HangEvidence() if (
            connection in state.members.agents
        ):
            worker = state.members.started_by(connection, message.member)
            if isinstance(message, messages.WorkerExited):
                _exited(draft, worker, message)
            elif isinstance(message, messages.HangEvidence):
                incident_records.hang_examined(draft, worker, message)
            else:
                _judge(draft, worker, message)
        case _:
            if (sender := state.members.worker_of(connection)) is None:
                raise ControlError(f"{message.type!r} from a peer that has not joined")
            _worker_message(draft, sender, message)


def _worker_message(draft: Draft, worker: Worker, message: Message) -> None:
    generation = draft.state.generation
    match message:
        case messages.Ready():
            scale_up.ready(draft, worker)
        case messages.Prepared():
            switches.prepared(draft, worker.id, message)
        case messages.Committed():
            progress.committed(draft, worker, message)
        case messages.Evaluated():
            evaluations.evaluated(draft, worker, message)
        case messages.Position():
            _judge(draft, worker, message)
        case messages.Quiesced() if message.generation == generation:
            incidents.quiesced(draft, worker.id, message)
        case messages.Switched() if message.generation == generation:
            regrouping.switched(draft, message)
        case messages.Started() if message.generation == generation:
            regrouping.started(draft)
        case messages.PeerFailed() if message.generation in draft.state.reported:
            incidents.peer_failed(draft, worker.id, message)
        case messages.Finished() if message.generation == generation:
            endings.finished(draft, worker.id)
        case messages.CheckpointUnreadable() if message.generation == generation:
            incidents.checkpoint_unreadable(draft, worker.id, message)
        case messages.Crashed():
            _crashed(draft, worker, message)
        case messages.BadStep():
            health.bad_step(draft, worker.id, message)
        case messages.SampleUnread():
            health.sample_unread(draft, worker.id, message)
        case messages.DevicesConnected():
            regrouping.devices_connected(draft, worker.id, message)
        case messages.LoaderEnded():
            health.loader_ended(draft, worker.id, message)
        case messages.StateDiffers():
            health.state_differs(draft, message)
        case messages.CheckpointSaved():
            checkpoints.saved(draft, message)
        case messages.SnapshotTaken():
            snapshots.taken(draft, worker.id, message)
        case messages.SlowIO():
            checkpoints.slow_io(draft, worker.id, message)
        # Those of an earlier generation are ignored.
        case _ if not isinstance(message, _OF_A_GENERATION):
            raise ControlError(f"a rank does not send {message.type!r}")


def _hello(draft: Draft, connection: int, hello: messages.Hello) -> None:
    """Take in a rank; once all workers have joined, ask for the first plan."""
    state = draft.state
    is_gathering = state.phase is Phase.GATHERING
    if not is_gathering:
        state.members.require_number(hello.member.worker)
        if state.respawns.is_blocked(hello.member.worker):
            raise ControlError(f"{hello.member} was lost too often and is not taken again; take another number")
    draft.state = replace(draft.state, members=state.members.joined(connection, hello, now=draft.at.unix_s))
    worker = draft.state.members[hello.member.worker]
    draft.do(commands.Welcome(connection, worker.incarnation))
    if not is_gathering:
        return
    draft.change_worker(worker, takes_part=True, first_step=0)
    if len(draft.state.members.live()) == state.settings.workers:
        generation = draft.new_generation()
        draft.state = replace(
            draft.state,
            generation=generation,
            question=state.question + 1,
            outcomes=replace(state.outcomes, since=draft.at.unix_s),
        )
        draft.do(commands.Task.DECIDE)


def _exited(draft: Draft, worker: Worker, message: messages.WorkerExited) -> None:
    draft.change_worker(worker, exit_code=message.exit_code)
    if draft.state.members[worker.id].incarnation != worker.incarnation:
        return
    incidents.detect(draft, signals.ProcessExited(worker.id, message.exit_code))
    if draft.state.phase is not Phase.OVER and not worker.draining:
        draft.state = replace(draft.state, respawns=draft.state.respawns.reaped(worker.id, draft.at.monotonic_s))


def _judge(draft: Draft, worker: Worker, answer: messages.Position | messages.ProcessState) -> None:
    now = draft.state.members[worker.id]
    if isinstance(answer, messages.Position):
        incidents.newcomers_unreached(draft, worker.id, answer)
        training = tuple(each for each in answer.unreached if each[0] == draft.state.active_generation)
        answer = answer.model_copy(update={"unreached": training})
    # An agent answers for a worker that loads, too.
    if now.is_live or answer.probe == 0:
        signal = signals.ProbeAnswered(worker.id, answer, draft.at.monotonic_s, in_first_step=not now.has_stepped)
        if now.incarnation == worker.incarnation:
            incidents.detect(draft, signal)


def _crashed(draft: Draft, worker: Worker, message: messages.Crashed) -> None:
    state = draft.state
    if message.is_alive and state.ending is not None and state.ending.trains_no_step:
        # The run ends for such an error, and needs what this worker holds.
        return
    draft.change_worker(worker, crash=message.error)
    error = signals.ErrorReported(
        worker.id,
        message.error,
        state.committed,
        since_step=(worker.first_step or 0) if worker.takes_part else None,
        log=f"{state.settings.logs}/worker-{worker.id}.log",
        is_alive=message.is_alive,
        is_replaceable=state.can_do_without(worker.id),
    )
    incidents.detect(draft, error)
