"""Hosts: an agent joins, its connection ends, and another one of its host adopts the workers that it leaves behind."""

from __future__ import annotations

from collections.abc import Sequence

from chameleon_ft.control.commands import Send
from chameleon_ft.control.handlers.draft import Draft
from chameleon_ft.control.state.state import Phase
from chameleon_ft.control.wire.messages import HostHello, Refused
from chameleon_ft.errors import ControlError
from chameleon_ft.quantities import duration

__all__ = ["admit_waiting", "joined", "lost"]


def joined(draft: Draft, agent: int, hello: HostHello) -> None:
    """Have an agent adopt workers of its host, and start others beside them.

    It waits while another agent of its host is expected back, which may still have its workers.

    Raises:
        ControlError: all workers of a run that has not begun have a place.
    """
    state = draft.state
    if any(state.members.agents.get(connection) == hello.host for connection in state.returning):
        others = {each: other for each, other in state.waiting_hosts.items() if not hello.id or other.id != hello.id}
        draft.set(waiting_hosts={**others, agent: hello})
        return
    is_late = state.phase is not Phase.GATHERING
    blocklist = [worker.id for worker in state.members if is_late and state.respawns.is_blocked(worker.id)]
    members, adopt, spawn = state.members.with_host(
        agent, hello, is_late=is_late, blocklist=blocklist, now=draft.at.unix_s
    )
    draft.set(members=members)
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


def admit_waiting(draft: Draft) -> None:
    """Let the agents join that have waited for others of their hosts, which are back or lost by now."""
    waiting = draft.state.waiting_hosts
    if not waiting or draft.state.returning:
        return
    draft.set(waiting_hosts={})
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
    draft.set(members=members.without_agent(agent))
    messages = []
    if draft.state.phase is Phase.GATHERING and len(left) < len(own):
        wait = duration(draft.state.settings.timeouts.rendezvous_s)
        messages.append(f"{host} was lost before the run began; its places are open for {wait}")
    if left:
        messages.append(f"the agent of {host} is gone; {_named(left)} live on, and another agent there adopts them")
    fields = {"message": "; ".join(messages)} if messages else {}
    draft.record("host_lost", host=host, workers=left, **fields)


def _named(workers: Sequence[int]) -> str:
    return f"worker{'s' * (len(workers) > 1)} {', '.join(map(str, workers))}"
