"""A worker's control connection has closed, or its heartbeats are missing.

A worker answers probes and heartbeats, but does not quiesce.

Messages fail although no worker is lost: a bad network card, a cut between two hosts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

from chameleon_ft.config import Timeouts
from chameleon_ft.coordinator.detectors.base import (
    AllQuiesced,
    AskAgent,
    ConnectionEnded,
    Fatal,
    Fenced,
    Finding,
    Lost,
    MessageFailed,
    Note,
    ProbeAnswered,
    Signal,
    Silent,
    StepCommitted,
    StopRequested,
    Ticked,
)
from chameleon_ft.events.kinds import FailedMessage, MessagesFailed
from chameleon_ft.plan.frozen_map import FrozenMap, updated, without
from chameleon_ft.protocol.messages import ProcessState


@dataclass(frozen=True, slots=True)
class ConnectionDetector:
    """Finds a worker lost when its control connection ends or when its heartbeats are missing.

    A process whose interpreter is held up, by an extension or a compiler, answers no pings, though it lives. So missing
    heartbeats prove nothing of a worker whose agent can tell that its process lives and is not stopped; the watchdog
    judges its progress. Without an agent, a worker has until the end of its first step. The heartbeats themselves are
    the server's pings. A debugger or a profiler may stop a process for a moment, so its agent has to report that twice
    in one silence.
    """

    timeouts: Timeouts
    # Worker -> seconds, and whether it was found stopped.
    silences: Mapping[int, tuple[float, bool]] = FrozenMap({})

    def __post_init__(self) -> None:
        object.__setattr__(self, "silences", FrozenMap(self.silences))

    def observe(self, signal: Signal) -> tuple[Self, tuple[Finding, ...]]:
        """See `Detector`."""
        match signal:
            case ConnectionEnded(worker=worker):
                return self, (Lost(worker, "connection", "control connection closed"),)
            case Silent(worker=worker, since_s=since_s) if since_s > self.timeouts.first_step_s or not (
                signal.has_agent or signal.in_first_step
            ):
                return self, (Lost(worker, "heartbeat", "no heartbeat"),)
            case Silent(worker=worker, since_s=since_s, has_agent=True):
                before_s, was_stopped = self.silences.get(worker, (0.0, False))
                # If it is shorter than before, the worker has answered meanwhile.
                silence = since_s, was_stopped and since_s >= before_s
                return replace(self, silences={**self.silences, worker: silence}), (AskAgent(worker),)
            case ProbeAnswered(worker=worker, answer=ProcessState(probe=0, stopped=is_stopped)):
                since_s, was_stopped = self.silences.get(worker, (0.0, False))
                if is_stopped and was_stopped:
                    return self, (Lost(worker, "heartbeat", "no heartbeat, because its process is stopped"),)
                return replace(self, silences={**self.silences, worker: (since_s, is_stopped)}), ()
            case Fenced(worker=worker) if worker in self.silences:
                return replace(self, silences=without(self.silences, worker)), ()
        return self, ()


# Unless timeouts.collective_timeout_s is set.
_PATIENCE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class QuiesceTimeout:
    """Gives up the workers that have not quiesced in time, which does not run while they read a sample."""

    timeouts: Timeouts
    # When the workers were last told to quiesce, in monotonic seconds.
    requested_at_s: float = 0.0
    # Worker -> when it was last found reading since then.
    read_at_s: Mapping[int, float] = FrozenMap({})

    def __post_init__(self) -> None:
        object.__setattr__(self, "read_at_s", FrozenMap(self.read_at_s))

    def observe(self, signal: Signal) -> tuple[Self, tuple[Finding, ...]]:
        """See `Detector`."""
        match signal:
            case StopRequested(at_s=at_s):
                return replace(self, requested_at_s=at_s, read_at_s={}), ()
            case ProbeAnswered(worker=worker, answer=answer, at_s=at_s) if answer.is_reading:
                return replace(self, read_at_s=updated(self.read_at_s, {worker: at_s})), ()
            case Ticked(at_s=at_s, held_up_s=held_up_s, unquiesced=workers, in_first_step=in_first_step) if workers:
                after = replace(self, requested_at_s=self.requested_at_s + held_up_s) if held_up_s else self
                patience_s = self.timeouts.message_timeout_s(0.0, at_least_s=_PATIENCE_S)
                cause = "hung: it does not leave its operation"
                return after, tuple(
                    Lost(worker, "watchdog", cause)
                    for worker in workers
                    if at_s - max(after.requested_at_s, self.read_at_s.get(worker, 0.0))
                    > (self.timeouts.first_step_s if worker in in_first_step else patience_s)
                )
        return self, ()


# So many generations may fail in a row without a culprit.
_UNEXPLAINED_RETRIES: Final = 3


@dataclass(frozen=True, slots=True)
class PeerFailureDetector:
    """Gives up the worker at an end of most failed messages.

    A failed message counts against both its ends until the run commits a step. This also finds a faulty worker that
    always reports first, each time against another peer. Once a generation is stopped for another reason, failed
    messages prove nothing: the first worker that stops closes its connections.
    """

    # Failed messages of the generation that is ending.
    reports: tuple[MessageFailed, ...] = ()
    # Whether it ends for another reason.
    is_stopped: bool = False
    # Worker -> failed messages with it at an end, since the last committed step.
    against: Mapping[int, int] = FrozenMap({})
    # Generations in a row that ended without a named peer.
    unexplained: int = 0
    # The reason in the newest report.
    last_error: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "against", FrozenMap(self.against))

    def observe(self, signal: Signal) -> tuple[Self, tuple[Finding, ...]]:
        """See `Detector`."""
        match signal:
            case StopRequested() if not self.reports:
                return replace(self, is_stopped=True), ()
            case MessageFailed() if not self.is_stopped:
                return replace(self, reports=(*self.reports, signal), last_error=signal.error), ()
            case AllQuiesced(is_explained=is_explained) if is_explained or not self.reports:
                return replace(self, reports=(), is_stopped=False), ()
            case StepCommitted():
                return replace(self, reports=(), against={}, unexplained=0), ()
            case AllQuiesced(generation=generation):
                after, finding = self._suspect()
                reports = tuple(FailedMessage(each.reporter, each.peer, each.error) for each in self.reports)
                note = Note(MessagesFailed(generation=generation, reports=reports))
                return after, (note,) if finding is None else (note, finding)
        return self, ()

    def _suspect(self) -> tuple[Self, Finding | None]:
        """Find the worker to give up; if no peer is named, the generation is tried again, a few times."""
        pairs = [(report.reporter, report.peer) for report in self.reports if report.peer is not None]
        if not pairs:
            unexplained = self.unexplained + 1
            after = replace(self, reports=(), unexplained=unexplained)
            if unexplained <= _UNEXPLAINED_RETRIES:
                return after, None
            return after, Fatal(
                f"messages failed {unexplained} times in a row though no worker is lost, at last because "
                f"{self.last_error}; check that the workers reach each other at the addresses of --host"
            )
        against = Counter(self.against)
        against.update(worker for pair in pairs for worker in pair)
        named = Counter(peer for _, peer in pairs)
        suspect = max({w for pair in pairs for w in pair}, key=lambda w: (against[w], named[w], w))
        del against[suspect]
        lost = Lost(suspect, "peer", f"messages with it failed: {self.last_error}")
        return replace(self, reports=(), against=against), lost
