"""The failure detectors of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, Final, Self, cast

from pydantic import BeforeValidator, TypeAdapter

from chameleon_ft.config import Timeouts
from chameleon_ft.coordinator.detectors.base import Detector, Finding, Signal
from chameleon_ft.coordinator.detectors.connection import ConnectionDetector, PeerFailureDetector, QuiesceTimeout
from chameleon_ft.coordinator.detectors.process import CrashDetector, ProcessExitDetector, StartTimeout
from chameleon_ft.coordinator.detectors.slowness import SlowLinkDetector, SlownessDetector
from chameleon_ft.coordinator.detectors.watchdog import Watchdog
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.registry import Registry

__all__ = ["Detectors"]

DETECTORS: Final = Registry[type[Detector]](
    "detector",
    "detectors",
    {
        "process_exit": ProcessExitDetector,
        "connection": ConnectionDetector,
        "crash": CrashDetector,
        "quiesce_timeout": QuiesceTimeout,
        "watchdog": Watchdog,
        "peer_failure": PeerFailureDetector,
        "slowness": SlownessDetector,
        "slow_links": SlowLinkDetector,
        "start_timeout": StartTimeout,
    },
)
"""Their types, by name. Findings are acted on in this order."""


def _read(by_name: Mapping[str, Any]) -> dict[str, Detector]:
    """Return the detectors of a stored state."""
    return {name: _adapter(DETECTORS[name]).validate_python(each) for name, each in by_name.items()}


@cache
def _adapter(kind: type[Detector]) -> TypeAdapter[Detector]:
    return TypeAdapter(kind)


@dataclass(frozen=True, slots=True)
class Detectors:
    """All detectors of a run by name."""

    by_name: Annotated[Mapping[str, Any], BeforeValidator(_read)]

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", FrozenMap(self.by_name))

    @classmethod
    def with_timeouts(cls, timeouts: Timeouts) -> Self:
        """Return the detectors of a run that has not begun."""
        made = {}
        for name in DETECTORS:
            kind: Any = DETECTORS[name]
            made[name] = kind(timeouts) if "timeouts" in (field.name for field in fields(kind)) else kind()
        return cls(made)

    @property
    def watchdog(self) -> Watchdog:
        return cast(Watchdog, self.by_name["watchdog"])

    @property
    def slowness(self) -> SlownessDetector:
        return cast(SlownessDetector, self.by_name["slowness"])

    @property
    def slow_links(self) -> SlowLinkDetector:
        return cast(SlowLinkDetector, self.by_name["slow_links"])

    @property
    def start_timeout(self) -> StartTimeout:
        return cast(StartTimeout, self.by_name["start_timeout"])

    @property
    def speeds(self) -> FrozenMap[int, float]:
        """The speeds of slow workers, and of slow links by their numbers (`number_of_link`)."""
        return FrozenMap({**self.slowness.speeds, **self.slow_links.speeds})

    def observe(self, signal: Signal) -> tuple[Self, tuple[Finding, ...]]:
        """Return the detectors after a signal, and their findings in the order of the detectors."""
        after: dict[str, Detector] = {}
        findings: list[Finding] = []
        for name, detector in self.by_name.items():
            after[name], found = detector.observe(signal)
            findings += found
        return type(self)(after), tuple(findings)
