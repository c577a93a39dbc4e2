"""The result of a search, and the Pareto front of several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from chameleon_ft.plan import Plan
from chameleon_ft.schedule import InFlightLimit, PipelineSchedule

__all__ = ["BoundFamily", "FoundPlan", "SearchResult", "SizeFigures", "pareto_front"]

T = TypeVar("T")


class BoundFamily(StrEnum):
    """The plans that a bound holds for.

    PIPELINES: every worker is one stage of one pipeline, or idle, and recomputes some of the first layers of its stage
    selectively, or some of them in full and the others selectively or not at all. Any depths, cuts, shares, orders of
    workers and of operations, and any number of micro-batches in flight that fits the memory of the workers; each
    pipeline with fused or with split backward.
    """

    PIPELINES = "pipelines"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlan:
    """A plan with its predictions.

    Attributes:
        name: its origin: "pipelines" for the search itself, "recut" where whole pipelines are kept as they are, else
            the name it was passed with.
        plan: the plan.
        in_flight_limits: the most that each worker may keep, by its memory. `best_program` with it takes `program_s`.
        step_s: seconds until all operations have ended and all gradients are reduced; vote and update come on top.
        program_s: seconds until the last operation has ended. Pipelines have the best program each.
        peak_bytes: of the worker that needs most memory, at its worst moment, if its pipelines run `schedules`.
        moved_bytes: parameters and optimizer state that its workers lack now.
        host_single_points_of_failure: hosts whose workers are the only ones to hold some layer.
        schedules: of its pipelines, for `best_parts`.
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
        bound_s: seconds below which no plan of this size can be; infinite if none fits the memory of the workers.
        step_s: of the best plan of this size; None if none was made, because the bound rules the size out.
    """

    micro_batch_size: int
    bound_s: float
    step_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best plan that was found, how good that is, and its alternatives.

    Attributes:
        best: the plan of least step time.
        bound_s: seconds below which no plan of `family` can be; infinite where none fits.
        family: the plans that the bound holds for.
        complete: whether the search has looked at everything, so that no pipelines side by side are faster than `best`
            with programs by `best_program` for each; never where links differ or there is gradient sync.
        mixes: how many different mixes of pipelines have been replayed.
        alternatives: the other plans on the Pareto front of step time, bytes to move and
            `host_single_points_of_failure`, by step time.
        too_large: bytes that are missing on some worker, for each of the other plans that does not fit, by name.
        recuts: plans of `recut_plan`, with split and with fused backward, as far as that was looked at.
        sizes: the micro-batch sizes that were compared, ascending; empty for a search with one. `bound_s`, `family` and
            `complete` are of all of them, and the plans are of the size of `best`.
    """

    best: FoundPlan
    bound_s: float
    complete: bool
    mixes: int
    alternatives: tuple[FoundPlan, ...]
    too_large: Mapping[str, int]
    family: BoundFamily = BoundFamily.PIPELINES
    recuts: tuple[FoundPlan, ...] = ()
    sizes: tuple[SizeFigures, ...] = ()

    @property
    def gap(self) -> float:
        """By which share of the bound the best plan is slower than it; negative for one outside the family."""
        return self.best.step_s / self.bound_s - 1 if self.bound_s else 0.0


def pareto_front(items: Iterable[T], figures: Callable[[T], tuple[float, ...]]) -> list[T]:
    """Return the items that no other equals or beats in all figures, of which less is better, by their first figure.

    Of items with equal figures, the first is returned.
    """
    front: list[tuple[tuple[float, ...], T]] = []
    for own, item in sorted(((figures(item), item) for item in items), key=lambda each: each[0]):
        if not any(all(a <= b for a, b in zip(other, own, strict=True)) for other, _ in front):
            front.append((own, item))
    return [item for _, item in front]
