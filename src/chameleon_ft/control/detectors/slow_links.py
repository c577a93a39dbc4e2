"""Messages between two workers take persistently longer than on other links: a bad cable, a busy or throttled port.

The rules are those for slow workers: a link is compared with the others of its kind in the same step, and is slow when
the median over recent steps has moved further than the observed noise explains. See `slowness`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final, Self

from chameleon_ft.control.detectors.base import (
    Fenced,
    Finding,
    LinksMeasured,
    OperationsMeasured,
    Recovered,
    RecoveredLink,
    Signal,
    Slow,
    SlowLink,
)
from chameleon_ft.control.detectors.slowness import SlownessDetector
from chameleon_ft.plan.frozen_map import FrozenMap

_WORKERS: Final = 1 << 24  # more than there are


def number_of_link(workers: tuple[int, int]) -> int:
    """Return a number that no other link has, and no worker."""
    return (workers[0] + 1) * _WORKERS + workers[1]


def workers_of_link(number: int) -> tuple[int, int] | None:
    """Return the workers of the link with this number, ascending; None if it is the number of a worker."""
    return _split(number) if number >= _WORKERS else None


def _split(number: int) -> tuple[int, int]:
    one, other = divmod(number, _WORKERS)
    return one - 1, other


@dataclass(frozen=True, slots=True)
class SlowLinkDetector:
    """Finds slow links, and notices when they recover; `links` judges each by its number, as if it were a worker."""

    links: SlownessDetector = field(default_factory=SlownessDetector)

    @property
    def speeds(self) -> FrozenMap[int, float]:
        """The slow links by number, ascending, with the usual time of a micro-batch by theirs."""
        return self.links.speeds

    def observe(self, signal: Signal) -> tuple[Self, tuple[Finding, ...]]:
        """See `Detector`."""
        match signal:
            case Fenced(worker=worker):
                known = {*self.links.spells, *self.links.reports, *(each for own in self.links.recent for each in own)}
                gone = [number for number in known if worker in (workers_of_link(number) or ())]
                return self._observe(map(Fenced, gone))
            case LinksMeasured(generation=generation, step=step):
                return self._observe(
                    OperationsMeasured(number_of_link(workers), generation, step, ratio, group)
                    for workers, (ratio, group) in signal.links.items()
                )
        return self, ()

    def _observe(self, signals: Iterable[Signal]) -> tuple[Self, tuple[Finding, ...]]:
        links, findings = self.links, list[Finding]()
        for signal in signals:
            links, found = links.observe(signal)
            findings += map(_of_link, found)
        return replace(self, links=links), tuple(findings)


def _of_link(finding: Finding) -> Finding:
    match finding:
        case Slow(worker=number, speed=speed, since_step=since_step):
            return SlowLink(_split(number), speed, since_step)
        case Recovered(worker=number, is_trial=is_trial):
            return RecoveredLink(_split(number), is_trial)
    return finding
