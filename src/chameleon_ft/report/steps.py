"""The committed steps of a run as columns of numbers: few bytes a step, so that a long run fits in memory."""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from chameleon_ft.events.records import StepRecord
from chameleon_ft.quantities import counted

RECENT_STEPS: Final = 20
"""Steps over which the present pace is taken."""
_DAY_S: Final = 86_400.0
_MAX_COMPARED: Final = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Median step time and throughput of some steps without a failure, and the share of their time that reads took.

    `since` describes which steps.
    """

    step_s: float
    tokens_per_s: float
    data_share: float
    since: str


@dataclass(frozen=True, slots=True)
class Series:
    """Points of a curve: columns of equal length, by name."""

    columns: Mapping[str, Sequence[float | None]]


@dataclass(slots=True)
class StepHistory:
    """All steps in the order in which they were committed. Repeated steps occur again, and their last line counts.

    Attributes:
        last: the newest step; None before the first.
        useful_s: seconds of steps, each counted once and without the stalls in them.
        tokens: loss terms of the steps, each counted once.
    """

    last: StepRecord | None = None
    useful_s: float = 0.0
    tokens: float = 0
    _highest: int = -1
    _step: array[int] = field(default_factory=lambda: array("q"))
    _time: array[float] = field(default_factory=lambda: array("d"))
    _loss: array[float] = field(default_factory=lambda: array("d"))
    _step_s: array[float] = field(default_factory=lambda: array("d"))
    _tokens_per_s: array[float] = field(default_factory=lambda: array("d"))
    _data_wait_s: array[float] = field(default_factory=lambda: array("d"))
    _workers: array[int] = field(default_factory=lambda: array("q"))
    # Indices of steps without a failure.
    _plain: array[int] = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self._step)

    def add(self, record: StepRecord) -> None:
        """Add a committed step."""
        index, is_plain = len(self._step), not (record.is_rest or record.is_skipped)
        self._time.append(record.time)
        self._loss.append(record.loss)
        self._step_s.append(record.step_s)
        self._tokens_per_s.append(record.tokens_per_s)
        self._data_wait_s.append(record.data_wait_s)
        self._workers.append(record.workers)
        # The last column, because another thread may read as many rows as this one has.
        self._step.append(record.step)
        if is_plain:
            self._plain.append(index)
        if record.step > self._highest:
            self._highest = record.step
            self.tokens += record.tokens
            usual = None if is_plain else self.recent
            self.useful_s += record.step_s if usual is None else min(record.step_s, usual.step_s)
        self.last = record

    @property
    def recent(self) -> Pace | None:
        """The pace of the newest steps; None before the first."""
        newest = self._plain[-RECENT_STEPS:]
        return self._pace(newest, f"the last {counted(len(newest), 'step')}")

    def earlier(self, now: float) -> Pace | None:
        """Return the pace to compare with: that of a day ago, or else of all steps before the newest ones."""
        earlier = self._plain[:-RECENT_STEPS]
        of_a_day_ago = [index for index in _thinned(earlier) if _DAY_S < now - self._time[index] < 2 * _DAY_S]
        if len(of_a_day_ago) >= RECENT_STEPS:
            return self._pace(of_a_day_ago, "a day ago")
        return self._pace(_thinned(earlier), "before")

    def series(self, most: int, *, since: int = 0) -> Series:
        """Return the steps from the index `since` on as at most so many points, each the mean of neighbours."""
        size = max(1, math.ceil((len(self) - since) / most))
        spans = [slice(first, min(first + size, len(self))) for first in range(since, len(self), size)]
        return Series(
            {
                "step": [self._step[span][-1] for span in spans],
                "time": [self._time[span][-1] for span in spans],
                "loss": [_mean(self._loss[span]) for span in spans],
                "tokens_per_s": [_mean(self._tokens_per_s[span]) for span in spans],
                "step_s": [_mean(self._step_s[span]) for span in spans],
                "data_wait_s": [_mean(self._data_wait_s[span]) for span in spans],
                "longest_s": [max(self._step_s[span]) for span in spans],
                "workers": [min(self._workers[span]) for span in spans],
            }
        )

    def _pace(self, indices: Sequence[int], since: str) -> Pace | None:
        if not indices:
            return None
        return Pace(
            step_s=statistics.median(self._step_s[index] for index in indices),
            tokens_per_s=statistics.median(self._tokens_per_s[index] for index in indices),
            data_share=sum(self._data_wait_s[i] for i in indices) / sum(self._step_s[i] for i in indices),
            since=since,
        )


def _thinned(indices: Sequence[int]) -> Sequence[int]:
    return indices[:: max(1, len(indices) // _MAX_COMPARED)]


def _mean(values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else None
