"""A rank reports an error of its own code: the loss of one worker, or a fault of the job itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

from chameleon_ft.control.detectors.base import ErrorReported, Fatal, Finding, Lost, Signal
from chameleon_ft.plan.frozen_map import FrozenMap

_NUMBER: Final = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?(?: (?:bytes|[KMGT]iB)\b)?")
"""A number, in which equal errors of two workers may differ: a layer, a micro-batch, a size in any unit, an address."""


@dataclass(frozen=True, slots=True)
class CrashDetector:
    """Tells an error of one worker, without which the run continues, from an error that every worker would meet."""

    errors: Mapping[int, tuple[int, str]] = FrozenMap({})  # step -> last worker that an error ended, and its kind

    def __post_init__(self) -> None:
        object.__setattr__(self, "errors", FrozenMap(self.errors))

    def observe(self, signal: Signal) -> tuple[Self, tuple[Finding, ...]]:
        """See `Detector`."""
        if not isinstance(signal, ErrorReported):
            return self, ()
        lost = Lost(signal.worker, "self", signal.error)
        reason = f"worker {signal.worker} failed in step {signal.step}: {signal.error}; see {signal.log}"
        if signal.is_alive and not signal.is_replaceable:  # no other worker can try the step
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
