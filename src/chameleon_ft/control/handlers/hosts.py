"""Hosts: an agent joins, its connection ends, and it returns, or another one of its host adopts its workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from chameleon_ft.control.commands import Send
from chameleon_ft.control.handlers.draft import Draft
from chameleon_ft.control.preflight import reason_against
from chameleon_ft.control.state.state import Phase
from chameleon_ft.control.wire.messages import Examine, Exit, HostHello, Kill, Refused
from chameleon_ft.control.wire.parts import HostReport
from chameleon_ft.errors import ControlError
from chameleon_ft.plan.frozen_map import without
from chameleon_ft.quantities import duration


def arrived(draft: Draft, agent: int, hello: HostHello) -> None:
    """Have an agent examine its host, if it can and the run asks for that, and otherwise join.

    Raises:
        ControlError: like `joined`.
    """
    settings = draft.state.settings
    if settings.devices is None or not (settings.preflight.enabled and hello.examines):
        joined(draft, agent, hello)
        return
    workers = draft.state.members.workers.values()
    trains = any(each.agent_host == hello.host and not each.lost for each in workers)
    draft.state = replace(draft.state, admission=draft.state.admission.examined_by(agent, hello))
    needed = asdict(settings.devices)
    draft.do(Send(agent, Examine(workers=hello.slots, measures=not trains, request=agent, **needed)))


def examined(draft: Draft, agent: int, report: HostReport) -> None:
    """Admit a host that was examined, or turn it away; the run continues in either case.

    Raises:
        ControlError: the host was not to be examined; or like `joined`.
    """
    state = draft.state
    if (hello := state.admission.examining.get(agent)) is None:
        raise ControlError("this host was not to be examined")
    admission = state.admission.without(agent)
    draft.state = replace(draft.state, admission=admission)
    peers = [*without(admission.reports, hello.host).values()]
    settings, now = state.settings, draft.at.unix_s
    if state.reconnection.has_stalled(draft.at.monotonic_s, within_s=settings.timeouts.heartbeat_timeout_s):
        now = min(now, report.clock_s)  # the report has waited: no clock is behind for that
    reason = reason_against(report, peers, settings=settings.preflight, versions=settings.versions, now=now)
    if reason is not None:
        message = f"{hello.host} is not admitted: {reason}"
        draft.record("host_refused", host=hello.host, reason=reason, report=report.model_dump(), message=message)
        draft.do(Send(agent, Refused(reason=message)))
        return
    draft.state = replace(draft.state, admission=admission.with_report(hello.host, report))
    joined(draft, agent, hello)


def joined(draft: Draft, agent: int, hello: HostHello) -> None:
    """Have an agent adopt workers of its host, and start others beside them.

    It waits while another agent of its host is expected back, which may still have its workers.

    Raises:
        ControlError: all workers of a run that has not begun have a place.
    """
    state = draft.state
    if any(state.members.agents.get(connection) == hello.host for connection in state.reconnection.awaited):
        draft.state = replace(draft.state, admission=state.admission.awaited_by(agent, hello))
        return
    is_late = state.phase is not Phase.GATHERING
    blocklist = [worker for worker in state.members.workers if state.respawns.is_blocked(worker)] if is_late else []
    members, adopt, spawn = state.members.with_host(
        agent, hello, is_late=is_late, blocklist=blocklist, now=draft.at.unix_s
    )
    draft.state = replace(draft.state, members=members)
    if adopt.ranks or adopt.given_up:
        draft.do(Send(agent, adopt))
    if spawn.workers:
        draft.do(Send(agent, spawn))
    adopted = tuple(worker for worker, _, _ in adopt.ranks)
    if is_late or adopted:
        actions = [f"adopts {_named(adopted)}"] * bool(adopted) + [f"starts {_named(spawn.workers)}"] * bool(
            spawn.workers
        )
        message = f"{hello.host} {' and '.join(actions)}"
        draft.record("host_joined", host=hello.host, workers=spawn.workers, adopted=adopted, message=message)


def returned_late(draft: Draft, agent: int, hello: HostHello, before: int | None) -> None:
    """Have an agent join again whose lost connection `before` is not waited for any more.

    It ends those of its ranks that are lost by now, and keeps the others. If another agent has adopted them, or they
    are to leave, it starts none, and exits after them.

    Raises:
        ControlError: like `joined`.
    """
    members = draft.state.members
    ranks = [(number, members.incarnation_of(number, incarnation)) for number, incarnation in hello.ranks]
    live = {number: rank for number, rank in ranks if rank is not None and not rank.lost}
    draft.do(*(Send(agent, Kill(worker=number)) for number, _ in ranks if number not in live))
    is_leaving = before in members.drain_requests or any(rank.draining for rank in live.values())
    is_replaced = any(rank.agent is not None for rank in live.values())
    if before in members.drained_agents or is_replaced or (is_leaving and not live):
        reason = f"another agent of {hello.host} has adopted its workers" if is_replaced else "drained"
        draft.do(Send(agent, Exit(reason=reason, is_drained=True)))
        draft.state = replace(draft.state, members=members.fence_connection(agent))
    elif is_leaving:
        if before is not None and (signal := members.drain_requests.get(before)) is not None:
            draft.state = replace(draft.state, members=members.with_drain_request(agent, signal))
        joined(draft, agent, hello.model_copy(update={"slots": len(live)}))
    else:
        joined(draft, agent, hello)


def admit_waiting(draft: Draft) -> None:
    """Let the agents join that have waited for others of their hosts, which are back or lost by now."""
    admission = draft.state.admission
    waiting = admission.waiting
    if not waiting or draft.state.reconnection.awaited:
        return
    draft.state = replace(draft.state, admission=replace(admission, waiting={}))
    for agent, hello in waiting.items():
        try:
            joined(draft, agent, hello)
        except ControlError as error:
            draft.do(Send(agent, Refused(reason=str(error))))


def lost(draft: Draft, agent: int) -> None:
    """Note that the connection of an agent has ended: its workers that are connected train on without it."""
    members = draft.state.members
    host, own = members.agents[agent], [worker for worker in members if worker.agent == agent and not worker.lost]
    left = tuple(worker.id for worker in own if worker.connection is not None)
    draft.state = replace(draft.state, members=members.without_agent(agent))
    messages = []
    if draft.state.phase is Phase.GATHERING and len(left) < len(own):
        wait = duration(draft.state.settings.timeouts.rendezvous_s)
        messages.append(f"{host} was lost before the run began; its places are open for {wait}")
    if left:
        messages.append(
            f"the agent of {host} is gone; {_named(left)} keep running, and another agent there adopts them"
        )
    fields = {"message": "; ".join(messages)} if messages else {}
    draft.record("host_lost", host=host, workers=left, **fields)


def _named(workers: Sequence[int]) -> str:
    return f"worker{'s' * (len(workers) > 1)} {', '.join(map(str, workers))}"
