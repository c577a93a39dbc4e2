"""A rank reports an error of its own code: the loss of one worker, or a fault of the job itself.

A worker's process has ended, as the agent that started it reports.

A worker does not get ready: its process does not connect, does not load the job, or its place stays empty.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

from chameleon_ft.config import Timeouts
from chameleon_ft.coordinator.detectors.base import (
    ErrorReported,
    Fatal,
    Fenced,
    Finding,
    Lost,
    ProcessExited,
    Signal,
    Starting,
    StartStage,
)
from chameleon_ft.plan.frozen_map import FrozenMap, without

_NUMBER: Final = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?(?: (?:bytes|[KMGT]iB)\b)?")
"""A number, in which equal errors of two workers may differ: a layer, a micro-batch, a size in any unit, an address."""


@dataclass(frozen=True, slots=True)
class CrashDetector:
    """Tells an error of one worker, without which the run continues, from an error that every worker would meet."""

    # Step -> the last worker that an error ended, and the kind of the error.
    errors: Mapping[int, tuple[int, str]] = FrozenMap({})

    def __post_init__(self) -> None:
        object.__setattr__(self, "errors", FrozenMap(self.errors))

    def observe(self, signal: Signal) -> tuple[Self, tuple[Finding, ...]]:
        """See `Detector`."""
        if not isinstance(signal, ErrorReported):
            return self, ()
        lost = Lost(signal.worker, "self", signal.error)
        reason = f"worker {signal.worker} failed in step {signal.step}: {signal.error}; see {signal.log}"
        # No other worker can try the step.
        if signal.is_alive and not signal.is_replaceable:
            return self, (Fatal(reason, is_saved=True),)
        # A worker that has joined in this step proves nothing: it may lack what the others have.
        if signal.since_step is None or (signal.step > 0 and signal.since_step >= signal.step):
            return self, (lost,)
        # The first sentence: an error of a full device lists all processes that use it, in any order.
        kind = _NUMBER.sub("#", signal.error).partition(". ")[0]
        other, error = self.errors.get(signal.step, (signal.worker, kind))
        after = replace(self, errors={**self.errors, signal.step: (signal.worker, kind)})
        if signal.step == 0 or (error == kind and other != signal.worker):
            return after, (Fatal(reason, explained=other, is_saved=signal.is_alive),)
        return after, (lost,)


@dataclass(frozen=True, slots=True)
class ProcessExitDetector:
    """Finds a worker lost as soon as its process is reaped."""

    def observe(self, signal: Signal) -> tuple[Self, tuple[Finding, ...]]:
        """See `Detector`."""
        if isinstance(signal, ProcessExited):
            return self, (Lost(signal.worker, "child", describe_exit(signal.exit_code)),)
        return self, ()


def describe_exit(exit_code: int | None) -> str:
    """Describe how a process ended, from its exit code as `subprocess` gives it; None if it is not known."""
    if exit_code is None:
        return "its process has ended"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


@dataclass(frozen=True, slots=True)
class StartTimeout:
    """Gives up workers that are not ready in time, and a run that has not begun and whose lost workers are missing.

    A process has as long to connect as workers have to form communicators, and as long to load the job as it may take
    for its first step: both may compile.
    """

    timeouts: Timeouts
    # Worker -> its stage, and when that began.
    since: Mapping[int, tuple[StartStage, float]] = FrozenMap({})

    def __post_init__(self) -> None:
        object.__setattr__(self, "since", FrozenMap(self.since))

    def observe(self, signal: Signal) -> tuple[Self, tuple[Finding, ...]]:
        """See `Detector`."""
        match signal:
            case Fenced(worker=worker) if worker in self.since:
                return replace(self, since=without(self.since, worker)), ()
            case Starting(at_s=at_s, held_up_s=held_up_s, stages=stages):
                since: dict[int, tuple[StartStage, float]] = {}
                for worker, stage in stages.items():
                    before = self.since.get(worker)
                    if before is None or before[0] != stage:
                        since[worker] = stage, at_s
                    else:
                        since[worker] = (stage, before[1] + held_up_s) if held_up_s else before
                after = replace(self, since=since)
                found = (after._judge(worker, at_s) for worker in since)
                return after, tuple(finding for finding in found if finding is not None)
        return self, ()

    def _judge(self, worker: int, now: float) -> Finding | None:
        stage, began_s = self.since[worker]
        limit_s = self.timeouts.first_step_s if stage == "loading" else self.timeouts.rendezvous_s
        if now - began_s <= limit_s:
            return None
        match stage:
            case "connecting":
                return Lost(worker, "watchdog", f"hung: its process has not connected within {limit_s:g} s")
            case "loading":
                return Lost(worker, "watchdog", f"hung: it has not loaded the job within {limit_s:g} s")
            case "vacant":
                return Fatal(
                    f"worker {worker} was lost before the run began, and no other process has taken its place within "
                    f"{limit_s:g} s (timeouts.rendezvous_s)"
                )
