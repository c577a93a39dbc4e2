"""Draining: workers that are to leave are taken out of the plan while training continues, and then end.

Until then they train, and send layers to others; the run searches for a plan without them and switches to it, like to
one for newcomers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from chameleon_ft.coordinator.commands import Drop, Send
from chameleon_ft.coordinator.handlers import endings, incidents, switches
from chameleon_ft.coordinator.handlers.draft import Draft
from chameleon_ft.coordinator.state.members import Worker
from chameleon_ft.coordinator.state.state import Phase, State
from chameleon_ft.events import kinds
from chameleon_ft.protocol.messages import Drain, Exit, Kill, Refused
from chameleon_ft.quantities import listed

_NOT_BEGUN: Final = "it is to leave before the run has begun"


def drain(draft: Draft, connection: int, message: Drain) -> None:
    """Have workers leave, and answer the command, the agent or the worker that asked for it.

    Workers that are still loading leave at once.
    """
    admission = draft.state.admission
    if connection in admission.waiting:
        draft.state = replace(draft.state, admission=admission.without(connection))
        draft.do(Send(connection, Exit(reason="drained", is_drained=True)))
        return
    own = _own_workers(draft.state, connection)
    if own is not None and draft.state.ending is not None:
        # `Exit` is sent to it with all others.
        draft.do(Send(connection, message))
        return
    if own is not None and draft.state.phase is Phase.GATHERING:
        processes = {connection, *(worker.connection for worker in own)}
        order = Exit(reason=_NOT_BEGUN, status="terminated")
        draft.do(*(Send(each, order) for each in sorted(filter(None, processes))))
        return
    workers = _named_workers(draft.state, message) if own is None else own
    if own is not None and _needs_all(draft.state, workers):
        draft.do(Send(connection, message))
        endings.request(draft, "terminated", message.signal)
        return
    if own is None and (reason := _reason_against(draft.state, message, workers)) is not None:
        draft.do(Send(connection, Refused(reason=reason)))
        return
    if own is not None:
        draft.state = replace(draft.state, members=draft.state.members.with_drain_request(connection, message.signal))
    is_new = any(not worker.draining for worker in workers)
    for worker in workers:
        draft.change_worker(worker, draining=True)
        draft.state = replace(draft.state, scale_up=draft.state.scale_up.without(worker.id))
    concerned = tuple(worker.id for worker in workers if not worker.lost)
    draft.do(Send(connection, message.model_copy(update={"workers": concerned})))
    if concerned:
        until = f"until no plan needs {listed('worker', concerned)} any more"
        to = "the agent" if connection in draft.state.members.agents else "its process"
        cause = "chameleon drain" if own is None else f"{message.signal} to {to}"
        draft.record(kinds.Draining(workers=concerned, message=f"{until}, because of {cause}"))
    for worker in workers:
        if not worker.lost and not worker.takes_part:
            _dismiss_worker(draft, worker)
    state = draft.state
    draft.state = replace(draft.state, scale_up=replace(state.scale_up, retry_at_s=0.0))
    # A migration is not interrupted: where its layers are is known only when they have arrived.
    is_migrating = state.active is not None and state.active.migration is not None
    if is_new and state.phase is Phase.TRAINING and state.switches.underway is None and not is_migrating:
        switches.discard(draft)


def _own_workers(state: State, connection: int) -> list[Worker] | None:
    """Return all workers of an agent, or the worker whose connection this is; None if it is a command's."""
    if connection in state.members.agents:
        return [worker for worker in state.members if worker.agent == connection]
    worker = state.members.worker_of(connection)
    return None if worker is None else [worker]


def _named_workers(state: State, message: Drain) -> list[Worker]:
    """Return the workers that a request names, lost ones of a host included: they are not to come back there."""
    named = [worker for worker in state.members if worker.id in message.workers]
    if message.host is None:
        return named
    return named + [each for each in state.members if each not in named and message.host in _hosts_of(state, each)]


def _hosts_of(state: State, worker: Worker) -> set[str]:
    """Return all names of a worker's host: "node7" and "10.0.0.7" if its agent calls it "node7 (10.0.0.7)"."""
    agent = worker.agent_host
    return {worker.host, agent, *agent.rstrip(")").split(" ("), state.hosts().get(worker.id, "")} - {""}


def _needs_all(state: State, workers: list[Worker]) -> bool:
    """Return whether no worker would be left without these, not even a newcomer that has loaded all that it needs."""
    concerned = {worker.id for worker in workers if not worker.lost}
    return bool(concerned) and concerned.issuperset({*state.members.staying(), *state.scale_up.loaded})


def _reason_against(state: State, message: Drain, workers: list[Worker]) -> str | None:
    """Return why workers cannot be drained that a command names, and what to do; None if they can."""
    live = state.members.live()
    concerned = {worker.id for worker in workers if not worker.lost}
    if state.phase is Phase.GATHERING:
        return "the run has not begun; wait until it trains, or end it"
    if state.ending is not None:
        return "the run ends after this step"
    if unknown := sorted(set(message.workers) - concerned):
        return f"worker {unknown[0]} is not live; live are {list(live)}"
    if message.host is not None and not concerned:
        hosts = sorted(set(state.hosts().values()))
        return f"no worker is on host {message.host!r}; the hosts are {', '.join(hosts)}"
    if not concerned:
        return "no worker is named; name workers, or a host with workers"
    if _needs_all(state, workers):
        return f"no worker would be left of {list(live)}; leave one at least, or end the run"
    return None


def is_waited_for(state: State) -> bool:
    """Return whether a plan has to be found without workers that are to leave."""
    return state.active is not None and not state.members.draining().isdisjoint(state.active.plan.workers)


def give_up(draft: Draft, reason: str) -> None:
    """Keep the workers that are to leave if the plan needs them and none was found without them.

    If one of them, or its agent, has asked for it, its time is short: the run ends with a checkpoint.
    """
    assert draft.state.active is not None
    kept = sorted(draft.state.members.draining().intersection(draft.state.active.plan.workers))
    if not kept:
        return
    for number in kept:
        draft.change_worker(draft.state.members[number], draining=False)
    names = ", ".join(map(str, kept))
    message = f"there is no plan without the workers {names}, which stay: {reason}; drain fewer, or add others first"
    draft.record(kinds.DrainFailed(workers=tuple(kept), reason=reason, message=message))
    members = draft.state.members
    ends = [end for number in kept for end in (members[number].agent, members[number].connection) if end is not None]
    signals = [members.drain_requests[end] for end in ends if end in members.drain_requests]
    if signals:
        endings.request(draft, "terminated", signals[0])


def release(draft: Draft) -> None:
    """Have the workers exit that are to leave and that no plan needs, once a step is committed without them.

    Agents exit once all of their workers have left.
    """
    if not draft.state.members.departing:
        return
    _dismiss_agents(draft)
    state = draft.state
    if state.phase is not Phase.TRAINING or state.active is None or state.committed <= state.active.first_step:
        return
    upcoming = state.switches.next
    needed = {*state.active.plan.workers, *(() if upcoming is None else upcoming.spec.participants)}
    for worker in state.members:
        if worker.draining and not worker.lost and worker.id not in needed:
            _dismiss_worker(draft, worker)


def _dismiss_agents(draft: Draft) -> None:
    members = draft.state.members
    for agent, host in members.agents.items():
        own = [worker for worker in members if worker.agent == agent]
        if own and all(worker.draining and worker.lost for worker in own):
            draft.do(Send(agent, Exit(reason="drained", is_drained=True)))
            draft.state = replace(draft.state, members=draft.state.members.dismissed(agent))
            message = f"all workers of {host} have left, and its agent ends"
            draft.record(kinds.HostDrained(host=host, message=message))


def _dismiss_worker(draft: Draft, worker: Worker) -> None:
    """End the process of a worker that no plan needs. From now on its end is no loss."""
    if worker.first_step is None and worker.agent is not None:
        # While it loads, it follows no order.
        draft.do(Send(worker.agent, Kill(worker=worker.id)))
        if worker.connection is not None:
            draft.do(Drop(worker.connection))
    else:
        draft.send(worker.id, Exit(reason="drained", is_drained=True))
    incidents.fence(draft, worker.id)
    incidents.record_drained(draft, worker.id)
