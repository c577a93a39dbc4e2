"""The result of a search, and the Pareto front of several.

Effort of a search, after which it settles for the best plan so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from chameleon_ft.plan import Plan
from chameleon_ft.quantities import ROUNDING
from chameleon_ft.schedule import InFlightLimit, PipelineSchedule
from chameleon_ft.schedule.best import DEFAULT_EFFORT as PROGRAM_EFFORT

T = TypeVar("T")

# Bounds and steps are sums and maxima of the same seconds in different orders, and bounds are lowered by `ROUNDING`.
_PROVEN: Final = 10 * ROUNDING


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlan:
    """A plan with its predictions.

    Attributes:
        name: its origin: "pipelines" for the search itself, "recut" where whole pipelines are kept, else
            the name it was passed with.
        plan: the plan.
        in_flight_limits: the most that each worker may keep, by its memory. `best_program` with it takes `program_s`.
        step_s: seconds until all operations have ended and all gradients are reduced; vote and update are not included.
        program_s: seconds until the last operation has ended, with the best program of each pipeline.
        peak_bytes: peak memory of the worker that needs most, if its pipelines run `schedules`.
        moved_bytes: parameters and optimizer state that its workers lack now.
        host_single_points_of_failure: hosts whose workers are the only ones to hold some layer.
        schedules: schedules of its pipelines, for `best_parts`.
    """

    name: str
    plan: Plan
    in_flight_limits: Mapping[int, InFlightLimit]
    step_s: float
    program_s: float
    peak_bytes: int
    moved_bytes: int
    host_single_points_of_failure: int
    schedules: tuple[PipelineSchedule, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class SizeFigures:
    """One micro-batch size among several.

    Attributes:
        micro_batch_size: samples of one micro-batch.
        bound_s: lower bound, in seconds, on plans of this size; infinite if none fits the memory of the workers.
        step_s: seconds of the best plan of this size; None if the bound rules the size out.
    """

    micro_batch_size: int
    bound_s: float
    step_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best plan found, its bound, and its alternatives.

    In a plan of pipelines every worker is one stage of one pipeline, or idle, and recomputes some of the first layers
    of its stage selectively, or some of them in full and the others selectively or not at all. Any depths, cuts,
    shares, orders of workers and of operations, and any number of micro-batches in flight that fits the memory of the
    workers; each pipeline with fused or with split backward.

    Attributes:
        best: the plan of least step time.
        bound_s: lower bound, in seconds, on all plans of pipelines; infinite if none fits.
        exhaustive: every plan of pipelines was ruled out by its bound or scheduled by `best_program`. Another order of
            operations may still be faster than `best`; see `complete`. False if links differ or there is gradient sync.
        mixes: number of different mixes of pipelines that have been replayed.
        alternatives: the other plans on the Pareto front of step time, bytes to move and
            `host_single_points_of_failure`, by step time.
        too_large: bytes missing on some worker, by name of each other plan that does not fit.
        recuts: plans of `recut_plan`, with split and with fused backward, as far as searched.
        sizes: the micro-batch sizes that were compared, ascending; empty for a search with one. `bound_s`, `exhaustive`
            and `complete` cover all sizes, and the plans have the size of `best`.
    """

    best: FoundPlan
    bound_s: float
    exhaustive: bool
    mixes: int
    alternatives: tuple[FoundPlan, ...]
    too_large: Mapping[str, int]
    recuts: tuple[FoundPlan, ...] = ()
    sizes: tuple[SizeFigures, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether `best` is proven optimal: it reaches the bound, which holds for all orders of operations."""
        return self.gap <= _PROVEN

    @property
    def gap(self) -> float:
        """Relative excess of the best plan's step over the bound; negative for a plan outside the family."""
        return self.best.step_s / self.bound_s - 1 if self.bound_s else 0.0


def pareto_front(items: Iterable[T], figures: Callable[[T], tuple[float, ...]]) -> list[T]:
    """Return the items on the Pareto front of the figures, less being better, by their first figure.

    Among items with equal figures, the first is returned.
    """
    front: list[tuple[tuple[float, ...], T]] = []
    for own, item in sorted(((figures(item), item) for item in items), key=lambda each: each[0]):
        if not any(all(a <= b for a, b in zip(other, own, strict=True)) for other, _ in front):
            front.append((own, item))
    return [item for _, item in front]


DEFAULT_EFFORT: Final = 160_000
"""Approximate number of operations to schedule before a search settles; a few tenths of a second."""

# Effort that completes most small searches: bounds rule out all but some hundreds of pipelines.
_COMPLETE: Final = 250 * PROGRAM_EFFORT
# A search is small if all its pipelines have at most this many hops for each operation that may be scheduled.
_SMALL: Final = 100_000
# Operations for a first look at a pipeline: enough for a few list-scheduling heuristics.
_LOOK: Final = 20_000
# With limited effort, a schedule this close to its lower bound is good enough.
_SLACK: Final = 5e-4
# A pipeline with more operations than this share of the effort is too expensive to look at first.
_EXPENSIVE: Final = 3 / 4


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Options of a search.

    Attributes:
        effort: approximate number of operations to schedule.
        min_holders: least number of holders of every layer.
        complete: the search continues until no plan can be better, within `effort`.
        polish_effort: operations to schedule for a pipeline that will run.
    """

    effort: float = DEFAULT_EFFORT
    min_holders: int = 1
    complete: bool = False
    polish_effort: int = PROGRAM_EFFORT

    @classmethod
    def of(cls, effort: float | None, *, min_holders: int = 1) -> SearchOptions:
        """Return options of a search with this effort; complete, however long it takes, if it is None."""
        return cls(math.inf if effort is None else effort, min_holders, complete=effort is None)

    @property
    def small(self) -> float:
        """Hops that all pipelines of a search may have for a complete search to be worth trying."""
        return self.effort * _SMALL

    def completed(self) -> SearchOptions:
        """Return options of the complete search that follows a small search."""
        return replace(self, effort=max(self.effort, _COMPLETE), complete=True)

    @property
    def slack(self) -> float:
        """Share by which a good enough schedule may exceed its lower bound."""
        return ROUNDING if self.complete else _SLACK

    @property
    def look_effort(self) -> int:
        """Operations to schedule in order to estimate a pipeline."""
        return PROGRAM_EFFORT if self.complete else _LOOK

    def is_expensive(self, depth: int, micro_batches: float) -> bool:
        """Return whether scheduling such a pipeline takes too much of the effort for a first look."""
        return not self.complete and depth * micro_batches > max(self.effort, DEFAULT_EFFORT) * _EXPENSIVE
