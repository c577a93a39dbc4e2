"""A rank reports an error of its own code: the loss of one worker, or a fault of the job that every worker has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from chameleon_ft.control.detectors.base import ErrorReported, Fatal, Finding, Lost, Signal
from chameleon_ft.plan.frozen_map import FrozenMap

__all__ = ["CrashDetector"]


@dataclass(frozen=True, slots=True)
class CrashDetector:
    """Tells the error of one worker, which the run can do without, from one that every other worker would run into."""

    known: Mapping[int, tuple[int, str]] = FrozenMap(
        {}
    )  # step -> the last worker that an error in it ended, and the error

    def __post_init__(self) -> None:
        object.__setattr__(self, "known", FrozenMap(self.known))

    def observe(self, signal: Signal) -> tuple[Self, tuple[Finding, ...]]:
        """See `Detector`."""
        if not isinstance(signal, ErrorReported):
            return self, ()
        lost = Lost(signal.worker, "self", signal.error)
        # A worker that has joined in this step proves nothing: what it lacks, the others may have.
        if signal.since_step is None or (signal.step > 0 and signal.since_step >= signal.step):
            return self, (lost,)
        other, known = self.known.get(signal.step, (signal.worker, signal.error))
        after = replace(self, known={**self.known, signal.step: (signal.worker, signal.error)})
        if signal.step == 0 or (known == signal.error and other != signal.worker):
            reason = f"worker {signal.worker} failed in step {signal.step}: {signal.error}; see {signal.log}"
            return after, (Fatal(reason),)
        return after, (lost,)
