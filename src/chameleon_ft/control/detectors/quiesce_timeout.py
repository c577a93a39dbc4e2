"""A worker answers probes and heartbeats, but does not quiesce."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from chameleon_ft.config import Timeouts
from chameleon_ft.control.detectors.base import Finding, Lost, Signal, StopRequested, Ticked

__all__ = ["QuiesceTimeout"]


@dataclass(frozen=True, slots=True)
class QuiesceTimeout:
    """Gives up the workers that have not quiesced in time."""

    timeouts: Timeouts
    requested_at_s: float = 0.0  # when they were last told to quiesce, in monotonic seconds

    def observe(self, signal: Signal) -> tuple[Self, tuple[Finding, ...]]:
        """See `Detector`."""
        match signal:
            case StopRequested(at_s=at_s):
                return replace(self, requested_at_s=at_s), ()
            case Ticked(at_s=at_s, held_up_s=held_up_s, unquiesced=workers, in_first_step=in_first_step) if workers:
                after = replace(self, requested_at_s=self.requested_at_s + held_up_s) if held_up_s else self
                waited_s, timeouts = at_s - after.requested_at_s, self.timeouts
                cause = "hung: it does not leave its operation"
                return after, tuple(
                    Lost(worker, "watchdog", cause)
                    for worker in workers
                    if waited_s > (timeouts.first_step_s if worker in in_first_step else timeouts.collective_timeout_s)
                )
        return self, ()
