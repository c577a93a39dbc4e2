"""A worker trains, but persistently slower than the others: throttled, or with a processor that others use too.

Each report of a worker's operations in a step is divided by the seconds that the costs expect, so that workers with
different layers compare, and by the median of the other workers in the same step, so that delays of all workers do not
count: long sequences, a busy host. A worker is slow when the median over its recent steps has moved further than the
observed noise explains.

Messages between two workers take persistently longer than on other links: a bad cable, a busy or throttled port.

The rules are those for slow workers: a link is compared with the others of its kind in the same step, and is slow when
the median over recent steps has moved further than the observed noise explains. See `slowness`.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Self

from chameleon_ft.coordinator.detectors.base import (
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
from chameleon_ft.plan.frozen_map import FrozenMap, updated, without

# The median of so many recent steps counts: a worker is noticed in its fifth slow one.
_WINDOW: Final = 8
# Smaller changes of the logarithm of a speed are not worth a switch.
_MIN_CHANGE: Final = 0.05
# A change by so many standard deviations is not noise, even if that is not quite normal.
_DEVIATIONS: Final = 5.0
# The standard deviation of a normal distribution over its median absolute deviation.
_PER_MAD: Final = 1.4826
# The standard error of the median of n normal values, times sqrt(n).
_OF_MEDIAN: Final = math.sqrt(math.pi / 2)
# The spread of fewer medians of other workers is no measure of noise.
_FEW: Final = 3
# A slow worker stays out of the plan for so many steps; a trial in vain costs about a window.
_TRIAL: Final = 20 * _WINDOW
# A spell belongs to the series of the last one if it begins within so many of its waits.
_SAME_SERIES: Final = 10


@dataclass(frozen=True, slots=True)
class MeasuredOperations:
    """A worker's report of a step: observed / expected seconds of its operations, and its group; see the signal."""

    ratio: float
    group: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spell:
    """The last time that a worker was slow. Speeds are relative to the other workers.

    Attributes:
        speed: as it was reported last; 1 if the worker has recovered.
        estimate: by recent steps. A higher speed is reported only after some steps.
        since_step: when it became so slow.
        ended_at: how many steps had been observed when it recovered, or was still not in the plan after that; None if
            it has not recovered.
        series: how many spells have followed shortly upon each other before this one. Each doubles the steps after
            which a recovery is accepted, so that a run does not switch back and forth.
        calm: steps in a row in which the estimate has been higher than the reported speed.
        idle: steps in a row in which the worker was not in the plan.
    """

    speed: float = 1.0
    estimate: float
    since_step: int
    ended_at: int | None = None
    series: int = 0
    calm: int = 0
    idle: int = 0

    @property
    def wait(self) -> int:
        """Steps for which a recovery has to last, beyond those in which it is noticed."""
        return _WINDOW * ((1 << self.series) - 1)

    def reported(self, steps: int) -> Self:
        """Return the spell when its estimate is reported, after so many observed steps."""
        series = self.series
        if self.ended_at is not None:
            is_near = steps - self.ended_at <= _SAME_SERIES * (self.wait + _WINDOW)
            series = series + 1 if is_near else 0
        has_ended = self.estimate == 1
        return replace(
            self,
            speed=self.estimate,
            ended_at=steps if has_ended else None,
            series=self.series if has_ended else series,
            calm=0,
            idle=0,
        )


@dataclass(frozen=True, slots=True)
class SlownessDetector:
    """Finds the slow workers and their speeds, and notices when they recover.

    A slow worker that is not in the plan runs no operations. It counts as recovered after a while, so that a decision
    may include it again; if it is still slow then, the next trial is twice as far away.
    """

    # The generation and the step whose reports are being collected.
    at: tuple[int, int] = (0, 0)
    # The reports of that step, by worker.
    reports: Mapping[int, MeasuredOperations] = FrozenMap({})
    # The reports of the steps before, oldest first.
    recent: tuple[Mapping[int, MeasuredOperations], ...] = ()
    # How many steps have been observed.
    steps: int = 0
    # The last spell of each worker.
    spells: Mapping[int, Spell] = FrozenMap({})

    def __post_init__(self) -> None:
        object.__setattr__(self, "reports", FrozenMap(self.reports))
        object.__setattr__(self, "recent", tuple(map(FrozenMap, self.recent)))
        object.__setattr__(self, "spells", FrozenMap(self.spells))

    @property
    def speeds(self) -> FrozenMap[int, float]:
        """The slow workers, ascending, with their speeds relative to the others."""
        return FrozenMap({worker: each.speed for worker, each in sorted(self.spells.items()) if each.speed < 1})

    def observe(self, signal: Signal) -> tuple[Self, tuple[Finding, ...]]:
        """See `Detector`."""
        match signal:
            case Fenced(worker=worker):
                # Another process, perhaps elsewhere, may get its number.
                recent = tuple(without(reports, worker) for reports in self.recent)
                reports, spells = without(self.reports, worker), without(self.spells, worker)
                return replace(self, reports=reports, recent=recent, spells=spells), ()
            case OperationsMeasured(worker=worker, generation=generation, step=step):
                at, report = (generation, step), MeasuredOperations(signal.ratio, signal.group)
                if at < self.at:
                    # The report is too late.
                    return self, ()
                if at == self.at:
                    return replace(self, reports=updated(self.reports, {worker: report})), ()
                after, findings = self._completed() if self.reports else (self, ())
                return replace(after, at=at, reports={worker: report}), findings
        return self, ()

    def _completed(self) -> tuple[Self, tuple[Finding, ...]]:
        """Judge the workers by the step that was collected; the first report of the next one has come."""
        after = replace(self, steps=self.steps + 1, recent=(*self.recent, self.reports)[-_WINDOW:])
        changed: set[int] = set()
        # One by one: an unknown change of one worker makes its peers look slower or faster.
        while (change := after._largest_change(changed)) is not None:
            worker, estimate, since_step = change
            spell = after.spells.get(worker) or Spell(estimate=1.0, since_step=since_step)
            spell = replace(spell, estimate=estimate, since_step=since_step)
            after = replace(after, spells={**after.spells, worker: spell})
            changed.add(worker)
        spells: dict[int, Spell] = {}
        findings: list[Finding] = []
        for worker, before in sorted(after.spells.items()):
            spells[worker], finding = after._reported(worker, before)
            findings += [] if finding is None else [finding]
        return replace(after, spells=spells), tuple(findings)

    def _reported(self, worker: int, spell: Spell) -> tuple[Spell, Finding | None]:
        """Return the spell of a worker after the present step, and what is to be reported of it."""
        if worker not in self.reports:
            if spell.speed == 1:
                # The worker has yet to show its speed.
                return replace(spell, ended_at=self.steps), None
            spell = replace(spell, idle=spell.idle + 1)
            if spell.idle < _TRIAL << spell.series:
                return spell, None
            return replace(spell, estimate=1.0).reported(self.steps), Recovered(worker, is_trial=True)
        spell = replace(spell, idle=0, calm=spell.calm + 1 if spell.estimate > spell.speed else 0)
        if spell.estimate == spell.speed or 0 < spell.calm <= spell.wait:
            return spell, None
        reported = spell.reported(self.steps)
        if reported.speed == 1:
            return reported, Recovered(worker, is_trial=False)
        return reported, Slow(worker, reported.speed, reported.since_step)

    def _largest_change(self, known: Collection[int]) -> tuple[int, float, int] | None:
        """Return the worker whose speed has changed most, its speed and the first step of it; None if none has.

        A worker that has become faster goes before others. Workers whose change is `known` are left out.
        """
        excesses: dict[int, list[float]] = defaultdict(list)
        for reports in self.recent:
            for worker, excess in self._excesses(reports).items():
                excesses[worker].append(excess)
        medians = {worker: statistics.median(own) for worker, own in excesses.items() if len(own) == _WINDOW}
        found = []
        for worker in medians.keys() & self.reports.keys() - known:
            before, after = -math.log(self._speed(worker)), max(0.0, medians[worker])
            if abs(after - before) <= _MIN_CHANGE:
                continue
            others = [each + math.log(self._speed(other)) for other, each in medians.items() if other != worker]
            errors = _standard_error(excesses[worker]), statistics.median(map(_standard_error, excesses.values()))
            spread = _deviation(others) if len(others) >= _FEW else 0.0
            limit = max(_MIN_CHANGE, _DEVIATIONS * max(spread, *errors))
            if abs(after - before) <= limit:
                continue
            # Two digits, so that workers that are about as slow are of one class.
            speed = 1.0 if after <= limit else max(0.01, round(math.exp(-after), 2))
            since_step = self.at[1] - _since_last_crossing(excesses[worker], (before + after) / 2)
            if speed != self._speed(worker):
                found.append((after < before, abs(after - before), worker, speed, max(0, since_step)))
        if not found:
            return None
        *_, worker, speed, since_step = max(found)
        return worker, speed, since_step

    def _excesses(self, reports: Mapping[int, MeasuredOperations]) -> dict[int, float]:
        """Return how much longer than the others each worker took in a step, as a logarithm.

        Workers of a group are compared with each other, and one without a group with all others, as if these had their
        usual speed.
        """
        usual = {worker: math.log(report.ratio * self._speed(worker)) for worker, report in reports.items()}
        groups: dict[int | None, list[int]] = defaultdict(list)
        for worker, report in reports.items():
            groups[report.group].append(worker)
        medians: dict[int, float] = {}
        for group, workers in groups.items():
            others = _median_without_each(usual if group is None else {worker: usual[worker] for worker in workers})
            medians |= {worker: others[worker] for worker in workers if worker in others}
        return {worker: math.log(reports[worker].ratio) - median for worker, median in medians.items()}

    def _speed(self, worker: int) -> float:
        return self.spells[worker].estimate if worker in self.spells else 1.0


def _since_last_crossing(recent: Sequence[float], limit: float) -> int:
    """Return how many steps before the last one the values came to the side of the limit that most of them are on."""
    is_over = [value > limit for value in recent]
    side = sum(is_over) * 2 > len(recent)
    return len(recent) - 1 - is_over.index(side)


def _median_without_each(values: Mapping[int, float]) -> dict[int, float]:
    """Return for each worker the median of the values of the others; nothing if there are none."""
    ordered = sorted((value, worker) for worker, value in values.items())
    # The index of the last of the others.
    last = len(ordered) - 2
    if last < 0:
        return {}
    medians = {}
    for place, (_, worker) in enumerate(ordered):
        low, high = (ordered[each + (each >= place)][0] for each in (last // 2, (last + 1) // 2))
        medians[worker] = (low + high) / 2
    return medians


def _standard_error(recent: Sequence[float]) -> float:
    """Return the standard error of the median of values."""
    return _OF_MEDIAN * _deviation(recent) / math.sqrt(len(recent))


def _deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of values, by their median absolute deviation."""
    median = statistics.median(values)
    return _PER_MAD * statistics.median(abs(value - median) for value in values)


# There are fewer workers.
_WORKERS: Final = 1 << 24


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
