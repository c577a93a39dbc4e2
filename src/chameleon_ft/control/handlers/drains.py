"""Draining: workers that are to leave are taken out of the plan while training goes on, and then told to exit.

Until then they train, and send layers to others; a plan without them is looked for, prepared and switched to like one
for newcomers.
"""

from __future__ import annotations

from dataclasses import replace

from chameleon_ft.control.commands import Send
from chameleon_ft.control.handlers import switches
from chameleon_ft.control.handlers.draft import Draft
from chameleon_ft.control.state.members import Worker
from chameleon_ft.control.state.state import Phase, State
from chameleon_ft.control.wire.messages import Drain, Exit, Refused

__all__ = ["drain", "give_up", "is_waited_for", "release"]


def drain(draft: Draft, connection: int, message: Drain) -> None:
    """Have workers leave, and answer the command, or the agent, that asked for it."""
    workers = _workers_of(draft.state, connection, message)
    if (reason := _reason_against(draft.state, message, workers)) is not None:
        draft.do(Send(connection, Refused(reason=reason)))
        return
    for worker in workers:
        draft.change_worker(worker, draining=True)
        draft.set(scale_up=draft.state.scale_up.without(worker.id))
    state = draft.state
    concerned = tuple(worker.id for worker in workers if not worker.lost)
    draft.do(Send(connection, message.model_copy(update={"workers": concerned})))
    names = ", ".join(map(str, concerned))
    draft.record("draining", workers=concerned, message=f"workers that are to leave: {names}")
    draft.set(scale_up=replace(state.scale_up, retry_at_s=0.0))
    # A migration goes on: where its layers are is known only when they have arrived.
    if state.next is not None and not state.next.is_switching and state.following is None:
        switches.discard(draft)


def _workers_of(state: State, connection: int, message: Drain) -> list[Worker]:
    """Return the workers that a request names, lost ones of a host included: they are not to come back there."""
    if connection in state.members.agents:
        return [worker for worker in state.members if worker.agent == connection]
    named = [worker for worker in state.members if worker.id in message.workers]
    if message.host is None:
        return named
    return named + [each for each in state.members if each not in named and message.host in _hosts_of(state, each)]


def _hosts_of(state: State, worker: Worker) -> set[str]:
    """Return all names of a worker's host: "node7" and "10.0.0.7" if its agent calls it "node7 (10.0.0.7)"."""
    agent = "" if worker.agent is None else state.members.agents[worker.agent]
    return {worker.host, agent, *agent.rstrip(")").split(" ("), state.hosts().get(worker.id, "")} - {""}


def _reason_against(state: State, message: Drain, workers: list[Worker]) -> str | None:
    """Return why workers cannot be drained, and what to do; None if they can."""
    live = state.members.live()
    concerned = {worker.id for worker in workers if not worker.lost}
    if state.phase is Phase.GATHERING:
        return "the run has not begun; wait until it trains, or end it"
    if state.interrupted:
        return "the run ends after this step"
    if unknown := sorted(set(message.workers) - concerned):
        return f"worker {unknown[0]} is not live; live are {list(live)}"
    if message.host is not None and not concerned:
        hosts = sorted(set(state.hosts().values()))
        return f"no worker is on host {message.host!r}; the hosts are {', '.join(hosts)}"
    if not concerned:
        return "no worker is named; name workers, or a host with workers"
    if concerned.issuperset(state.members.staying()):
        return f"no worker would be left of {list(live)}; leave one at least, or end the run"
    return None


def is_waited_for(state: State) -> bool:
    """Return whether a plan has to be found without workers that are to leave."""
    return state.active is not None and not state.members.draining().isdisjoint(state.active.plan.workers)


def give_up(draft: Draft, reason: str) -> None:
    """Keep the workers that are to leave if the plan needs them and none was found without them."""
    assert draft.state.active is not None
    kept = sorted(draft.state.members.draining().intersection(draft.state.active.plan.workers))
    for number in kept:
        draft.change_worker(draft.state.members[number], draining=False)
    if kept:
        names = ", ".join(map(str, kept))
        message = (
            f"there is no plan without the workers {names}, which stay: {reason}; drain fewer, or add others first"
        )
        draft.record("drain_failed", workers=kept, reason=reason, message=message)


def release(draft: Draft) -> None:
    """Have the workers exit that are to leave and that no plan needs, once a step is committed without them."""
    state = draft.state
    if state.phase is not Phase.TRAINING or state.active is None or state.committed <= state.active.first_step:
        return
    needed = {*state.active.plan.workers, *(() if state.next is None else state.next.plan.participants)}
    for worker in state.members:
        if not worker.draining or worker.lost or worker.id in needed:
            continue
        draft.send(worker.id, Exit(reason="drained"))
        # From now on its end is no loss.
        draft.set(members=draft.state.members.fence(worker.id), scale_up=draft.state.scale_up.without(worker.id))
        live = len(draft.state.members.live())
        draft.set(history=draft.state.history.live(live, draft.at.monotonic_s))
        message = f"worker {worker.id} has left, and its process is told to exit"
        draft.record("drained", worker=worker.id, step=state.committed, message=message)
