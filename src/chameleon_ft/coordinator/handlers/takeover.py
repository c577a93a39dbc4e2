"""Another coordinator continues a run, or one that was held up does: workers and agents reconnect.

Whatever orders they may lack are repeated.

Workers train on meanwhile. A generation that begins, and a decision, are interrupted, because nothing tells which
orders have been sent; what is only prepared during training is given up.
"""

from __future__ import annotations

from dataclasses import replace

from chameleon_ft.coordinator.commands import DistrustCheckpoints, Drop, Send, Task, Welcome
from chameleon_ft.coordinator.detectors import base as signals
from chameleon_ft.coordinator.handlers import evaluations, incidents, snapshots, switches
from chameleon_ft.coordinator.handlers import membership as hosts
from chameleon_ft.coordinator.handlers.draft import Draft
from chameleon_ft.coordinator.state.members import Worker
from chameleon_ft.coordinator.state.state import Phase, State
from chameleon_ft.events import kinds
from chameleon_ft.plan.frozen_map import without
from chameleon_ft.protocol.messages import (
    Adopt,
    Begin,
    BeginCheckpoint,
    Discard,
    Finish,
    Hello,
    HostHello,
    Kill,
    Refused,
    Spawn,
    StandbyHello,
    Stop,
    Switch,
)


def took_over(draft: Draft, term: int, address: str) -> None:
    """Continue in a higher term from the last state of a coordinator that is lost, with all of its connections.

    Args:
        address: where this coordinator stood by; it does no longer.
    """
    now = draft.at.monotonic_s
    draft.state = replace(
        draft.state, standbys={each: other for each, other in draft.state.standbys.items() if other != address}
    )
    state = draft.state
    doubtful = state.reconnection.doubtful
    if state.switches.underway is None:
        doubtful = state.switches.next or doubtful
    draft.state = replace(
        draft.state,
        term=term,
        reconnection=replace(
            state.reconnection,
            awaited=frozenset(state.connections),
            until_s=now + state.settings.timeouts.heartbeat_timeout_s,
            doubtful=doubtful,
            journaled=state.newest,
        ),
        ticked_at_s=now,
        scale_up=replace(state.scale_up, considering=None),
    )
    schedule = state.checkpoints.schedule
    # A number that ranks may have answered, if the disk did not, is not used again.
    if not schedule.is_requested:
        schedule = replace(schedule, request=schedule.request + 1)
        draft.state = replace(draft.state, checkpoints=replace(state.checkpoints, schedule=schedule))
    # They may not have been marked yet.
    if state.health.disagreement is not None:
        draft.do(DistrustCheckpoints(after=state.health.agreed))
    draft.record(
        kinds.TookOver(generation=state.generation, step=state.committed, message="the coordinator is replaced")
    )
    incidents.detect(draft, signals.Progressed(now))
    match state.phase:
        case Phase.GATHERING if len(state.members.live()) == state.settings.workers:
            draft.state = replace(draft.state, question=state.question + 1)
            draft.do(Task.DECIDE)
        case Phase.STOPPING:
            incidents.detect(draft, signals.StopRequested(now))
    _orders_lost(draft)


def reclaimed(draft: Draft, term: int, reason: str) -> None:
    """Continue in the next term, after a time in which another coordinator might have led.

    Peers may have left this one, or were disconnected, to look for that one; so they have a while to reconnect.
    """
    reconnection = replace(draft.state.reconnection, stalled_at_s=draft.at.monotonic_s)
    draft.state = replace(draft.state, term=term, reconnection=reconnection)
    why = f", because {reason}" if reason else ""
    message = f"the coordinator had not led for a while{why}; it does in term {term}"
    draft.record(kinds.Reclaimed(term=term, reason=reason, message=message))
    draft.announce()


def standby_joined(draft: Draft, connection: int, hello: StandbyHello) -> None:
    """Note that a coordinator stands by at an address, perhaps again, and tell all peers.

    The standby itself comes last: from then on it may lead, and all others have to know its address.
    """
    state = draft.state
    before = {each for each, address in state.standbys.items() if address == hello.address}
    standbys = {each: address for each, address in state.standbys.items() if each not in before}
    draft.state = replace(
        draft.state, standbys={**standbys, connection: hello.address}, reconnection=state.reconnection.without(before)
    )
    draft.announce()


def standby_left(draft: Draft, connection: int) -> None:
    """Forget a coordinator that stood by, and tell all peers."""
    draft.state = replace(draft.state, standbys=without(draft.state.standbys, connection))
    draft.announce()


def is_expected_back(draft: Draft, connection: int, *, will_return: bool) -> bool:
    """Return whether a lost connection is to be made again.

    Its peer has said so, or has had no answer while this coordinator stalled or did not lead. It has a while for that,
    in which it is not lost.
    """
    state, now, patience_s = draft.state, draft.at.monotonic_s, draft.state.settings.timeouts.heartbeat_timeout_s
    is_member = connection in state.members.agents or state.members.worker_of(connection) is not None
    has_stalled = state.reconnection.has_stalled(now, within_s=patience_s)
    if not is_member or not (has_stalled or will_return):
        return False
    draft.state = replace(draft.state, reconnection=state.reconnection.awaiting([connection], until_s=now + patience_s))
    _orders_lost(draft)
    return True


def _orders_lost(draft: Draft) -> None:
    """Restart what is under way, because some orders may not have been received."""
    match draft.state.phase:
        case Phase.DECIDING | Phase.REGROUPING:
            incidents.stop(draft)
        case Phase.TRAINING if draft.state.switches.underway is None:
            switches.abandon(draft)


def replaced(state: State, hello: Hello | HostHello) -> int | None:
    """Return the number of the connection that a peer replaces by another one; None if the peer is new.

    A peer whose newest connection was lost before it was acknowledged does not know that number. Before the run begins,
    a rank whose first message is not in the journal is new to the next coordinator.
    """
    if isinstance(hello, HostHello):
        return state.members.agent_ids.get(hello.id, hello.resumes)
    worker = state.members.workers.get(hello.member.worker)
    has_joined = worker is not None and (worker.lost or worker.connection is not None or worker.process is not None)
    if state.phase is Phase.GATHERING and not hello.known and not has_joined:
        return None
    if worker is not None:
        is_same = hello.process is not None and (worker.process, worker.host) == (hello.process, hello.host)
        if hello.resumes is not None and worker.connection in state.reconnection.awaited:
            is_same = is_same or hello.member.incarnation in (0, worker.incarnation)
        if is_same and worker.connection is not None:
            return worker.connection
    return hello.resumes


def worker_returned(draft: Draft, connection: int, hello: Hello, before: int) -> None:
    """Take a worker back on another connection, and repeat the orders that it may lack."""
    worker = draft.state.members.worker_of(before)
    if worker is None or worker.id != hello.member.worker:
        # All that it has kept, and sends before it knows, is ignored.
        draft.state = replace(draft.state, members=draft.state.members.fence_connection(connection))
        draft.do(Send(connection, Refused(reason=f"{hello.member} is not in the run any more")))
        return
    _reconnected(draft, before, connection)
    if hello.resumes is None or (worker.first_step is None and not worker.takes_part):
        draft.do(Welcome(connection, worker.incarnation))
    state = draft.state
    journaled = state.newest if state.reconnection.journaled is None else state.reconnection.journaled
    # The coordinator before had not written its last events.
    if hello.known > journaled:
        reconnection = replace(state.reconnection, journaled=hello.known)
        draft.state = replace(state, newest=max(hello.known, state.newest), reconnection=reconnection)
        # It is not known what ranks hold by now.
        if draft.state.active is None:
            incidents.end(draft, "failed", "the first plan is not in the journal, and workers have it; resume the run")
            return
        incidents.stop(draft)
        return
    doubtful = draft.state.reconnection.doubtful
    if doubtful is not None and hello.switch_to == doubtful.number:
        # Some may have switched by now; their reports tell whether one has given up its old layers.
        draft.state = replace(
            draft.state,
            switches=replace(draft.state.switches, next=replace(doubtful, is_switching=True)),
            reconnection=replace(draft.state.reconnection, doubtful=None),
        )
        if draft.state.phase is Phase.TRAINING:
            incidents.stop(draft)
            return
    _repeat_orders(draft, worker)


def _repeat_orders(draft: Draft, worker: Worker) -> None:
    """Repeat the orders that a worker may lack, which has come back."""
    state = draft.state
    if state.ending is not None:
        draft.send(worker.id, Finish())
    match state.phase:
        case Phase.STOPPING if worker.id not in state.quiesced:
            draft.send(worker.id, Stop(generation=state.generation))
        case Phase.REGROUPING if state.switched_from is None and worker.id in state.participants:
            # It was given orders while it was away.
            incidents.stop(draft)
        case Phase.REGROUPING | Phase.TRAINING:
            active, upcoming = state.active, state.switches.underway
            assert active is not None
            if state.switched_from is not None and worker.id in active.participants:
                # One that has trained before has begun by itself, and ignores this.
                evaluate = state.evaluations.pending == active.first_step
                draft.send(
                    worker.id, Begin(generation=state.generation, first_step=active.first_step, evaluate=evaluate)
                )
            switching = None if upcoming is None else upcoming.number
            for generation in range(state.generation + 1, state.newest + 1):
                is_next = generation == switching
                order = Switch(generation=generation) if is_next else Discard(generation=generation)
                draft.send(worker.id, order)
            if (schedule := state.checkpoints.schedule).is_requested:
                draft.send(worker.id, BeginCheckpoint(request=schedule.request))
            snapshots.repeat_orders(draft, worker.id)
            evaluations.repeat_orders(draft, worker.id)


def host_returned(draft: Draft, connection: int, hello: HostHello, before: int) -> None:
    """Take an agent back on another connection; have it end ranks that are lost, and start those that it has not."""
    admission = draft.state.admission
    if before in admission.connections:
        draft.state = replace(draft.state, admission=admission.without(before))
        _reconnected(draft, before, connection)
        admit = hosts.joined if before in admission.waiting else hosts.arrived
        admit(draft, connection, hello)
        return
    members = draft.state.members
    # If the journal lacks changes, another agent may have the number of a connection that was lost before.
    is_another = any(each == before and name != hello.id for name, each in members.agent_ids.items())
    if before not in members.agents or is_another:
        hosts.returned_late(draft, connection, hello, None if is_another else before)
        return
    _reconnected(draft, before, connection)
    own = [worker for worker in draft.state.members if worker.agent == connection]
    for worker in own:
        if worker.lost and worker.member in hello.ranks:
            draft.do(Send(connection, Kill(worker=worker.id)))
    adopted = [
        (each.member, each.process)
        for each in own
        if each.process is not None and not each.lost and each.member not in hello.ranks
    ]
    if adopted:
        draft.do(Send(connection, Adopt(ranks=tuple(adopted))))
    unstarted = [each for each in own if not each.lost and each.connection is None and each.member not in hello.ranks]
    if unstarted:
        draft.do(Send(connection, Spawn(members=tuple(each.member for each in unstarted))))


def missing(draft: Draft) -> list[int]:
    """Return the connections whose peers have not come back in time, which are lost."""
    reconnection = draft.state.reconnection
    if not reconnection.awaited and (reconnection.doubtful, reconnection.journaled) != (None, None):
        draft.state = replace(draft.state, reconnection=replace(reconnection, doubtful=None, journaled=None))
    if not reconnection.awaited or draft.at.monotonic_s < reconnection.until_s:
        return []
    draft.state = replace(draft.state, reconnection=replace(reconnection, awaited=frozenset()))
    return sorted(reconnection.awaited)


def _reconnected(draft: Draft, before: int, connection: int) -> None:
    members, reconnection = draft.state.members.reconnected(before, connection), draft.state.reconnection
    if before in reconnection.awaited:
        draft.state = replace(draft.state, members=members, reconnection=reconnection.without([before]))
        return
    # The peer has noticed the end of its connection first; what is left of that has been sent again.
    draft.state = replace(draft.state, members=members.fence_connection(before))
    draft.do(Drop(before))
    _orders_lost(draft)
