"""Hosts: an agent joins, its connection ends, and it returns, or another one of its host adopts its workers.

Whether a host is fit for a run, by what its agent has found there.

Newcomers: workers that are restarted or join a live run, until they are in the plan or stay spares.

None of this delays training, and a newcomer that fails before it takes part does not affect the other workers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

from chameleon_ft.config import Preflight
from chameleon_ft.coordinator.commands import Send, Task
from chameleon_ft.coordinator.detectors.slowness import workers_of_link
from chameleon_ft.coordinator.events import Considered
from chameleon_ft.coordinator.handlers import drains, switches
from chameleon_ft.coordinator.handlers.draft import Draft
from chameleon_ft.coordinator.state.members import ScaleUp, Worker
from chameleon_ft.coordinator.state.state import Phase
from chameleon_ft.errors import ControlError
from chameleon_ft.events import decisions, kinds
from chameleon_ft.plan.frozen_map import without
from chameleon_ft.protocol.messages import Examine, Exit, HostHello, Kill, Refused
from chameleon_ft.protocol.parts import HostReport
from chameleon_ft.quantities import duration


def reason_against(
    report: HostReport, peers: Sequence[HostReport], *, settings: Preflight, versions: Mapping[str, str], now: float
) -> str | None:
    """Return why a host is not admitted, and what to do; None if it is.

    Args:
        peers: reports of the hosts that were admitted.
        versions: package -> version, where the coordinator runs.
        now: Unix seconds when the report arrived, by the coordinator's clock.
    """
    if report.problem:
        return report.problem
    if report.free_memory < settings.min_free_memory:
        return (
            f"only {report.free_memory:.0%} of the memory of a device is free; end the other jobs there, or lower "
            "preflight.min_free_memory"
        )
    if settings.same_versions and (difference := _other_version(report, peers, versions)) is not None:
        return f"{difference}; install the same, or set preflight.same_versions = false"
    if (error_s := abs(report.clock_s - now)) > settings.max_clock_error_s:
        side = "ahead of" if report.clock_s > now else "behind"
        return (
            f"its clock is {duration(error_s)} {side} that of the coordinator; have NTP set both, or raise "
            "preflight.max_clock_error_s"
        )
    if peers and report.links < (most := statistics.mode(each.links for each in peers)):
        return f"{report.links} InfiniBand ports are active, and {most} on the other hosts; look at their cables"
    return _slow_device(report, peers, settings.min_speed)


def _other_version(report: HostReport, peers: Sequence[HostReport], versions: Mapping[str, str]) -> str | None:
    """Return a package that has another version than on the coordinator's host, or else on the first admitted one."""
    expected = {**(dict(peers[0].versions) if peers else {}), **versions}
    for package, version in report.versions:
        if package in expected and not _is_same(package, version, expected[package]):
            return f"{package} is {version} here, and {expected[package]} in the run"
    return None


def _is_same(package: str, version: str, other: str) -> bool:
    """Compare versions: of Python without the patch level, of torch without the build for a device."""
    if package == "python":
        return version.split(".")[:2] == other.split(".")[:2]
    return version.partition("+")[0] == other.partition("+")[0]


def _slow_device(report: HostReport, peers: Sequence[HostReport], least: float) -> str | None:
    speeds: dict[str, Callable[[HostReport], float]] = {
        "matrix products": lambda each: each.matmul_flops,
        "copies in memory": lambda each: each.copy_bytes_per_s,
    }
    for name, speed_of in speeds.items():
        known = [speed for each in peers if (speed := speed_of(each)) > 0]
        if speed_of(report) > 0 and known and (share := speed_of(report) / statistics.median(known)) < least:
            return (
                f"{name} have {share:.0%} of the usual speed of the other hosts; look for a device that is throttled "
                "or used by others, or lower preflight.min_speed"
            )
    return None


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
        # The report has waited: no clock is behind for that.
        now = min(now, report.clock_s)
    reason = reason_against(report, peers, settings=settings.preflight, versions=settings.versions, now=now)
    if reason is not None:
        message = f"{hello.host} is not admitted: {reason}"
        draft.record(kinds.HostRefused(host=hello.host, reason=reason, report=report.model_dump(), message=message))
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
    if spawn.members:
        draft.do(Send(agent, spawn))
    adopted = tuple(member.worker for member, _ in adopt.ranks)
    if is_late or adopted:
        actions = [f"adopts {_named(adopted)}"] * bool(adopted) + [f"starts {_named(spawn.workers)}"] * bool(
            spawn.workers
        )
        message = f"{hello.host} {' and '.join(actions)}"
        draft.record(kinds.HostJoined(host=hello.host, workers=spawn.workers, adopted=adopted, message=message))


def returned_late(draft: Draft, agent: int, hello: HostHello, before: int | None) -> None:
    """Have an agent join again whose lost connection `before` is not waited for any more.

    It ends those of its ranks that are lost by now, and keeps the others. If another agent has adopted them, or they
    are to leave, it starts none, and exits after them.

    Raises:
        ControlError: like `joined`.
    """
    members = draft.state.members
    ranks = [members.find(member) for member in hello.ranks]
    live = {rank.id: rank for rank in ranks if rank is not None and not rank.lost}
    draft.do(*(Send(agent, Kill(worker=number)) for number, _ in hello.ranks if number not in live))
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
    draft.record(kinds.HostLost(host=host, workers=left, message="; ".join(messages) or None))


def _named(workers: Sequence[int]) -> str:
    return f"worker{'s' * (len(workers) > 1)} {', '.join(map(str, workers))}"


def respawn_due(draft: Draft) -> None:
    """Have the lost workers restarted whose delay is over."""
    respawns, due = draft.state.respawns.at(draft.at.monotonic_s)
    draft.state = replace(draft.state, respawns=respawns)
    for number in due:
        worker = draft.state.members[number]
        if not worker.lost or worker.draining or worker.agent is None:
            # Another process has taken the number, or the worker was to leave, or its host is gone.
            continue
        members, spawn = draft.state.members.respawned(worker, now=draft.at.unix_s)
        draft.state = replace(draft.state, members=members)
        draft.do(Send(worker.agent, spawn))
        incarnation = members[number].incarnation
        message = f"worker {number} is restarted as incarnation {incarnation}"
        draft.record(kinds.Respawn(worker=number, incarnation=incarnation, message=message))


def ready(draft: Draft, worker: Worker) -> None:
    """Note that a newcomer has loaded what it needs."""
    scale_up = draft.state.scale_up
    if worker.takes_part or worker.id in scale_up.loaded:
        return
    draft.change_worker(worker, first_step=draft.state.committed)
    draft.state = replace(draft.state, scale_up=replace(scale_up, loaded=(*scale_up.loaded, worker.id)))
    message = f"worker {worker.id} has joined as a spare"
    draft.record(kinds.Joined(worker=worker.id, incarnation=worker.incarnation, host=worker.host, message=message))


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
        # It is considered again; orders would not reach workers that are to come back.
        return
    if event.error is not None:
        _stay_after_error(draft, event.error)
        drains.give_up(draft, event.error)
    elif event.staying != state.members.staying():
        # All are considered again.
        return
    elif event.plans:
        switches.prepare(draft, event.plans, event.record)
    elif drains.is_waited_for(state):
        switches.record_decision(draft, event.record)
        # Newcomers are considered again, with all that stay.
        drains.give_up(draft, event.reason)
    else:
        switches.record_decision(draft, event.record)
        if scale_up.asked_speeds != scale_up.speeds:
            message = "the plan stays as it is; `chameleon explain` shows why"
            slow, slow_links = _slow(scale_up)
            draft.record(decisions.Stay(slow=slow, slow_links=slow_links, message=message))
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
        draft.record(decisions.DecisionFailed(workers=tuple(workers), error=error, message=message))
    elif scale_up.asked_speeds != scale_up.speeds:
        message = f"the plan stays as it is: the decision on slow workers and links failed: {error}"
        slow, slow_links = _slow(scale_up)
        draft.record(decisions.DecisionFailed(workers=slow, slow_links=slow_links, error=error, message=message))


def _slow(scale_up: ScaleUp) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Return the slow workers and links that a decision was about."""
    links = {number: workers_of_link(number) for number in sorted(scale_up.asked_speeds)}
    workers = tuple(number for number, ends in links.items() if ends is None)
    return workers, tuple(ends for ends in links.values() if ends is not None)
