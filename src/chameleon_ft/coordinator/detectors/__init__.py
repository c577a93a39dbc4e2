"""The failure detectors, one file each, and their registry.

A new detector is a file with a frozen value that follows `base.Detector`, and a field of `Detectors`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self

from chameleon_ft.config import Timeouts
from chameleon_ft.coordinator.detectors.base import Detector, Finding, Signal
from chameleon_ft.coordinator.detectors.connection import ConnectionDetector, PeerFailureDetector, QuiesceTimeout
from chameleon_ft.coordinator.detectors.process import CrashDetector, ProcessExitDetector, StartTimeout
from chameleon_ft.coordinator.detectors.slowness import SlowLinkDetector, SlownessDetector
from chameleon_ft.coordinator.detectors.watchdog import Watchdog
from chameleon_ft.plan.frozen_map import FrozenMap

__all__ = ["Detectors"]


@dataclass(frozen=True, slots=True)
class Detectors:
    """All detectors of a run; each field is one."""

    process_exit: ProcessExitDetector
    connection: ConnectionDetector
    crash: CrashDetector
    quiesce_timeout: QuiesceTimeout
    watchdog: Watchdog
    peer_failure: PeerFailureDetector
    slowness: SlownessDetector
    slow_links: SlowLinkDetector
    start_timeout: StartTimeout

    @classmethod
    def with_timeouts(cls, timeouts: Timeouts) -> Self:
        """Return the detectors of a run that has not begun."""
        return cls(
            ProcessExitDetector(),
            ConnectionDetector(timeouts.first_step_s),
            CrashDetector(),
            QuiesceTimeout(timeouts),
            Watchdog(timeouts),
            PeerFailureDetector(),
            SlownessDetector(),
            SlowLinkDetector(),
            StartTimeout(timeouts),
        )

    @property
    def speeds(self) -> FrozenMap[int, float]:
        """The speeds of slow workers, and of slow links by their numbers (`number_of_link`)."""
        return FrozenMap({**self.slowness.speeds, **self.slow_links.speeds})

    def observe(self, signal: Signal) -> tuple[Self, tuple[Finding, ...]]:
        """Return the detectors after a signal, and their findings in the order of the fields."""
        after: list[Any] = []
        findings: list[Finding] = []
        for field in fields(self):
            detector: Detector = getattr(self, field.name)
            detector, found = detector.observe(signal)
            after.append(detector)
            findings += found
        return type(self)(*after), tuple(findings)
