"""A worker answers probes and heartbeats, but does not quiesce."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

from chameleon_ft.config import Timeouts
from chameleon_ft.control.detectors.base import Finding, Lost, ProbeAnswered, Signal, StopRequested, Ticked
from chameleon_ft.plan.frozen_map import FrozenMap, updated

_PATIENCE_S: Final = 60.0  # unless timeouts.collective_timeout_s is set


@dataclass(frozen=True, slots=True)
class QuiesceTimeout:
    """Gives up the workers that have not quiesced in time, which does not run while they read a sample."""

    timeouts: Timeouts
    requested_at_s: float = 0.0  # when they were last told to quiesce, in monotonic seconds
    read_at_s: Mapping[int, float] = FrozenMap({})  # worker -> when it was last found reading since

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
