"""A worker does not get ready: its process does not connect, does not load the job, or its place stays empty."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from chameleon_ft.config import Timeouts
from chameleon_ft.control.detectors.base import Fatal, Fenced, Finding, Lost, Signal, Starting, StartStage
from chameleon_ft.plan.frozen_map import FrozenMap, without


@dataclass(frozen=True, slots=True)
class StartTimeout:
    """Gives up workers that are not ready in time, and a run that has not begun and whose lost workers are missing.

    A process has as long to connect as workers have to form communicators, and as long to load the job as it may take
    for its first step: both may compile.
    """

    timeouts: Timeouts
    since: Mapping[int, tuple[StartStage, float]] = FrozenMap({})  # worker -> its stage, and when that began

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
                    else:  # usually the same object, which the journal need not compare
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
