"""A worker is alive and stuck, and the others wait for it.

When no step is committed for longer than a step takes, every worker is asked for its current operation, and every agent
whether its processes are stopped. A worker is hung if its process is stopped at two probes in a row, because a debugger
may stop it for a moment, or if it computes a single operation for many times longer than usual. In the first step with
the layers that it has, an operation may take longer, because they may have to be compiled. A worker that waits for
another is not at fault. If all wait for messages for long, these are lost. Workers also report peers that acknowledge
nothing: nothing passes between the two, whichever waits for the other. Reading a sample is no operation: a file system
may stall for minutes, so a read has a limit of its own, and is reported long before.

A worker cannot answer while an extension or a compiler holds the interpreter's lock. If its agent answers that its
process lives, it has as much time as an operation may take, counted from the first probe that it did not answer. The
agent also sees whether the process reads a sample.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

from chameleon_ft.config import Timeouts
from chameleon_ft.coordinator.detectors.base import (
    Fatal,
    Finding,
    LinksCut,
    Lost,
    MessageFailed,
    MessagesOverdue,
    OperationsTimed,
    ProbeAnswered,
    Progressed,
    Reading,
    SendProbe,
    Signal,
    StepCommitted,
    StopRequested,
    Ticked,
)
from chameleon_ft.plan.frozen_map import FrozenMap, updated, without
from chameleon_ft.protocol.messages import Position

# The median of so many recent steps is the expected step time.
_STEPS: Final = 20
# The first probe is sent after so many steps of silence,
_PATIENCE: Final = 1.25
# but not before this time,
_PATIENCE_MIN_S: Final = 0.1
# and before the first step after this share of the timeout of messages.
_PATIENCE_FIRST: Final = 0.5
# The longest operation decays by this factor with each report.
_FORGET: Final = 0.99
# Two probes are so many steps apart,
_PROBE_EVERY: Final = 0.5
# but no more than this time, so that what a probe shows is found soon, however long the steps are.
_PROBE_EVERY_MAX_S: Final = 1.0
# A read is told first after this time, and again whenever the time has doubled.
_TOLD_S: Final = 10.0
# A process has to be stopped for at least this time; a profiler needs less for a look.
_STOPPED_S: Final = 0.5
# Messages on links that carry data may take this long at least.
_OVERDUE_S: Final = 60.0
# When one link has been silent for all of the timeout, those that were for this share of it are cut, too.
_CUT_TOGETHER: Final = 0.5


@dataclass(frozen=True, slots=True)
class Watchdog:
    """Probes the workers when no progress is made, and gives up those whose answer shows that they are stuck."""

    timeouts: Timeouts
    # Oldest first.
    steps_s: tuple[float, ...] = ()
    # 0 before the first.
    longest_operation_s: float = 0.0
    # The longest operation of a worker's first step, a measure until there is a better one.
    first_operation_s: float = 0.0
    # When progress was made last, in monotonic seconds.
    progress_at_s: float = 0.0
    # When the last probe was sent; None since progress was made.
    probed_at_s: float | None = None
    # The number of the last probe.
    probe: int = 0
    # The workers' answers to the last probe.
    positions: Mapping[int, Position] = FrozenMap({})
    # Worker -> what its agent says that it reads, and when the first of the probes was sent that was answered so by its
    # agent and not by the worker.
    silent: Mapping[int, tuple[str, float]] = FrozenMap({})
    # Worker -> when its process was first found stopped, and since then.
    stopped: Mapping[int, float] = FrozenMap({})
    # Worker -> the read that was told last, and its seconds then.
    told: Mapping[int, tuple[str, float]] = FrozenMap({})
    # The last read that a worker was given up for.
    endless: str = ""

    def __post_init__(self) -> None:
        for name in ("positions", "silent", "stopped", "told"):
            object.__setattr__(self, name, FrozenMap(getattr(self, name)))

    def observe(self, signal: Signal) -> tuple[Self, tuple[Finding, ...]]:
        """See `Detector`."""
        match signal:
            case OperationsTimed(longest_s=longest_s, in_first_step=True):
                return replace(self, first_operation_s=max(longest_s, self.first_operation_s)), ()
            case OperationsTimed(longest_s=longest_s):
                longest_operation_s = max(longest_s, _FORGET * self.longest_operation_s)
                return replace(self, longest_operation_s=longest_operation_s), ()
            case StepCommitted(at_s=at_s, step_s=step_s):
                steps_s = (*self.steps_s, step_s)[-_STEPS:]
                return replace(self._progressed(at_s), steps_s=steps_s), ()
            case Progressed(at_s=at_s) | StopRequested(at_s=at_s):
                return self._progressed(at_s), ()
            case ProbeAnswered():
                return self._answered(signal)
            case Ticked(at_s=at_s, held_up_s=held_up_s, participants=participants):
                if reports := self._cut_links(participants):
                    return self._progressed(at_s), (LinksCut(reports),)
                if reports := self._overdue_messages(participants):
                    return self._progressed(at_s), (MessagesOverdue(reports),)
                forgiving = self
                if held_up_s:
                    silent = {worker: (doing, since + held_up_s) for worker, (doing, since) in self.silent.items()}
                    stopped = {worker: since + held_up_s for worker, since in self.stopped.items()}
                    progress_at_s = self.progress_at_s + held_up_s
                    forgiving = replace(self, progress_at_s=progress_at_s, silent=silent, stopped=stopped)
                return forgiving._probed(at_s)
        return self, ()

    def _progressed(self, now: float) -> Self:
        return replace(self, progress_at_s=now, probed_at_s=None, positions={}, silent={}, stopped={})

    @property
    def step_s(self) -> float:
        """Median time of recent steps; 0 before the first."""
        return statistics.median(self.steps_s) if self.steps_s else 0.0

    def _probed(self, now: float) -> tuple[Self, tuple[Finding, ...]]:
        """Send a probe if it is time for one."""
        # Before the first step there is no measure, and first steps are slow.
        patience_s = _PATIENCE_FIRST * self.timeouts.message_timeout_s(0.0)
        if self.steps_s:
            patience_s = max(_PATIENCE_MIN_S, _PATIENCE * self.step_s)
        if now - self.progress_at_s < patience_s:
            return self, ()
        longest_s = _STOPPED_S if self.stopped else _PROBE_EVERY_MAX_S
        pause_s = min(longest_s, max(_PATIENCE_MIN_S, _PROBE_EVERY * patience_s))
        if self.probed_at_s is not None and now - self.probed_at_s < pause_s:
            return self, ()
        return replace(self, probe=self.probe + 1, probed_at_s=now, positions={}), (SendProbe(self.probe + 1),)

    def _answered(self, signal: ProbeAnswered) -> tuple[Self, tuple[Finding, ...]]:
        """Take an answer, and give up its worker if it shows a hang; an outdated one shows nothing."""
        worker, answer = signal.worker, signal.answer
        if answer.probe != self.probe or self.probed_at_s is None:
            return self, ()
        longest_s = self.longest_operation_s or self.first_operation_s
        limit_s = max(self.timeouts.watchdog_min_s, self.timeouts.watchdog_factor * longest_s)
        if signal.in_first_step:
            limit_s = self.timeouts.first_step_s
        if answer.is_reading:
            limit_s = self.timeouts.sample_read_s
        told: tuple[Finding, ...] = ()
        cause, after = None, self
        continued = without(self.stopped, worker)
        if isinstance(answer, Position):
            after = replace(
                self,
                positions=updated(self.positions, {worker: answer}),
                silent=without(self.silent, worker),
                stopped=continued,
            )
            if answer.is_reading:
                after, told = after._tell_reading(worker, answer.doing, answer.since_s)
            if (answer.is_reading or not answer.waiting) and answer.since_s > limit_s:
                cause = f"hung: {'' if answer.is_reading else 'in '}{answer.doing} for {answer.since_s:.1f} s"
        elif answer.stopped:
            since = self.stopped.get(worker, signal.at_s)
            after = replace(self, stopped={**self.stopped, worker: since})
            if signal.at_s - since >= _STOPPED_S:
                cause = "hung: its process is stopped"
        elif worker not in self.positions:
            doing, since = self.silent.get(worker, ("", self.probed_at_s))
            since = since if doing == answer.doing else self.probed_at_s
            silent_s = signal.at_s - since
            after = replace(self, silent={**self.silent, worker: (answer.doing, since)}, stopped=continued)
            if answer.is_reading:
                after, told = after._tell_reading(worker, answer.doing, silent_s)
            if silent_s > limit_s:
                cause = f"hung: its process lives, but has not answered for {silent_s:.1f} s {answer.doing}".rstrip()
        if cause is None:
            return after, told
        lost: tuple[Finding, ...] = (Lost(worker, "watchdog", cause),)
        if answer.is_reading and answer.doing == self.endless:
            lost = (*lost, Fatal(f"worker {worker}, and one before, {cause}", is_saved=True))
        return replace(after, endless=answer.doing if answer.is_reading else self.endless), lost

    def _tell_reading(self, worker: int, doing: str, since_s: float) -> tuple[Self, tuple[Finding, ...]]:
        """Tell that a worker has been reading a sample for long, unless that has been told lately."""
        before, told_s = self.told.get(worker, ("", 0.0))
        due_s = max(_TOLD_S, 2 * told_s) if doing == before else _TOLD_S
        if since_s < due_s:
            return self, ()
        finding = Reading(worker, doing, due_s, self.timeouts.sample_read_s)
        return replace(self, told=updated(self.told, {worker: (doing, due_s)})), (finding,)

    def _cut_links(self, participants: tuple[int, ...]) -> tuple[MessageFailed, ...]:
        """Return one report for each pair of workers between which nothing passes, once that lasts long enough."""
        if not self.positions.keys() >= set(participants):
            return ()
        found: dict[frozenset[int], tuple[float, int, int]] = {}
        for worker in participants:
            for _, peer, since_s in self.positions[worker].unreached:
                if peer in participants:
                    pair = frozenset((worker, peer))
                    found[pair] = max(found.get(pair, (0.0, 0, 0)), (since_s, worker, peer))
        timeout_s = self.timeouts.message_timeout_s(max(self.steps_s, default=0.0))
        if max(found.values(), default=(0.0,))[0] < timeout_s:
            return ()
        return tuple(
            MessageFailed(worker, peer, f"worker {peer} has acknowledged nothing for {since_s:.1f} s")
            for since_s, worker, peer in found.values()
            if since_s >= _CUT_TOGETHER * timeout_s
        )

    def _overdue_messages(self, participants: tuple[int, ...]) -> tuple[MessageFailed, ...]:
        """Return the messages that all workers have waited for too long; none if one of them may only be slow.

        Nor if some worker does not acknowledge what it is sent: then the link that is cut is known soon.
        """
        timeout_s = self.timeouts.message_timeout_s(max(self.steps_s, default=0.0), at_least_s=_OVERDUE_S)
        reports: dict[int, MessageFailed] = {}
        for worker in participants:
            position = self.positions.get(worker)
            if position is None or not position.for_message or position.unreached:
                return ()
            if position.since_s < timeout_s:
                return ()
            error = f"no worker has received a message for {position.since_s:.1f} s; it waits for {position.doing}"
            reports[worker] = MessageFailed(worker, position.peer, error)
        return tuple(report for report in reports.values() if not _is_transitive(report, reports))


def _is_transitive(report: MessageFailed, reports: Mapping[int, MessageFailed]) -> bool:
    """Return whether a worker waits for one that waits for another itself, unless they wait in a circle.

    A program that was checked has no circle, so a message was lost on one.
    """
    waits_for = {reporter: each.peer for reporter, each in reports.items()}
    following = peer = waits_for.get(report.peer) if report.peer is not None else None
    for _ in reports:
        if peer is None or peer == report.reporter:
            break
        peer = waits_for.get(peer)
    return following is not None and peer != report.reporter
