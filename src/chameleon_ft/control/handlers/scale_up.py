"""Newcomers: workers that are restarted or join a live run, until they are in the plan or stay spares.

None of this delays training, and a newcomer that fails before it takes part does not affect the other workers.
"""

from __future__ import annotations

from dataclasses import replace

from chameleon_ft.control.commands import Send, Task
from chameleon_ft.control.detectors.slow_links import workers_of_link
from chameleon_ft.control.events import Considered
from chameleon_ft.control.handlers import drains, switches
from chameleon_ft.control.handlers.draft import Draft
from chameleon_ft.control.state.members import Worker
from chameleon_ft.control.state.scale_up import ScaleUp
from chameleon_ft.control.state.state import Phase


def respawn_due(draft: Draft) -> None:
    """Have the lost workers restarted whose delay is over."""
    respawns, due = draft.state.respawns.at(draft.at.monotonic_s)
    draft.state = replace(draft.state, respawns=respawns)
    for number in due:
        worker = draft.state.members[number]
        if not worker.lost or worker.draining or worker.agent is None:
            continue  # another process has taken the number, or the worker was to leave, or its host is gone
        members, spawn = draft.state.members.respawned(worker, now=draft.at.unix_s)
        draft.state = replace(draft.state, members=members)
        draft.do(Send(worker.agent, spawn))
        incarnation = members[number].incarnation
        message = f"worker {number} is restarted as incarnation {incarnation}"
        draft.record("respawn", worker=number, incarnation=incarnation, message=message)


def ready(draft: Draft, worker: Worker) -> None:
    """Note that a newcomer has loaded what it needs."""
    scale_up = draft.state.scale_up
    if worker.takes_part or worker.id in scale_up.loaded:
        return
    draft.change_worker(worker, first_step=draft.state.committed)
    draft.state = replace(draft.state, scale_up=replace(scale_up, loaded=(*scale_up.loaded, worker.id)))
    message = f"worker {worker.id} has joined as a spare"
    draft.record("joined", worker=worker.id, incarnation=worker.incarnation, host=worker.host, message=message)


def advance(draft: Draft) -> None:
    """Do what is due: switch to a better plan, prepare one, make newcomers spares, or have a decision made on them."""
    state, now = draft.state, draft.at.monotonic_s
    if state.phase is not Phase.TRAINING:
        return
    if state.switches.next is not None:
        switches.advance(draft)
    elif state.scale_up.considering is None and now >= state.scale_up.retry_at_s and not switches.resume(draft):
        for number in state.scale_up.loaded:
            draft.change_worker(draft.state.members[number], takes_part=True)
            draft.state = replace(draft.state, history=draft.state.history.live(len(draft.state.members.live()), now))
        scale_up = draft.state.scale_up.admitted(now)
        speeds = state.detectors.speeds
        is_complete = scale_up.is_complete(now, is_loading=draft.state.members.is_loading(), speeds=speeds)
        if is_complete or drains.is_waited_for(draft.state):
            scale_up = scale_up.asked(state.generation, speeds)
            draft.do(Task.CONSIDER_SCALE_UP)
        draft.state = replace(draft.state, scale_up=scale_up)


def considered(draft: Draft, event: Considered) -> None:
    """Act on a decision during training: prepare its plans, or continue as before."""
    state, scale_up = draft.state, draft.state.scale_up
    if event.question != scale_up.question:
        return
    generation, scale_up = scale_up.considering, replace(scale_up, considering=None)
    draft.state = replace(draft.state, scale_up=scale_up)
    if generation != state.generation or state.phase is not Phase.TRAINING or state.reconnection.awaited:
        return  # it is considered again; orders would not reach workers that are to come back
    if event.error is not None:
        _stay_after_error(draft, event.error)
        drains.give_up(draft, event.error)
    elif event.staying != state.members.staying():
        return  # all are considered again
    elif event.plans:
        switches.prepare(draft, [plan.active() for plan in event.plans])
    elif drains.is_waited_for(state):
        draft.do(Task.RECORD_SCALE_UP)
        drains.give_up(draft, event.reason)  # newcomers are considered again, with all that stay
    else:
        draft.do(Task.RECORD_SCALE_UP)
        if scale_up.asked_speeds != scale_up.speeds:
            message = "the plan stays as it is; `chameleon explain` shows why"
            draft.record("stay", **_slow(scale_up), message=message)
        draft.state = replace(draft.state, scale_up=scale_up.settled())


def _stay_after_error(draft: Draft, error: str) -> None:
    """Record that the decision on newcomers or slow workers failed; training does not depend on it."""
    scale_up = draft.state.scale_up
    workers = sorted(scale_up.newcomers)
    draft.state = replace(draft.state, scale_up=scale_up.settled())
    if workers:
        names, one = ", ".join(map(str, workers)), len(workers) == 1
        subject = f"worker {names} stays a spare" if one else f"workers {names} stay spares"
        message = f"{subject}: the decision on {'it' if one else 'them'} failed: {error}"
        draft.record("decision_failed", workers=workers, error=error, message=message)
    elif scale_up.asked_speeds != scale_up.speeds:
        message = f"the plan stays as it is: the decision on slow workers and links failed: {error}"
        slow = _slow(scale_up)
        draft.record("decision_failed", workers=slow.pop("slow"), **slow, error=error, message=message)


def _slow(scale_up: ScaleUp) -> dict[str, object]:
    """Return the fields of an event with the slow workers and links that a decision was about."""
    links = {number: workers_of_link(number) for number in sorted(scale_up.asked_speeds)}
    return {
        "slow": [number for number, workers in links.items() if workers is None],
        "slow_links": [workers for workers in links.values() if workers is not None],
    }
