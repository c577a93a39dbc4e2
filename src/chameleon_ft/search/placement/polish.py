"""Local search from pipelines that are placed: other cuts, other recomputation, other shares, better programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any, Final

from chameleon_ft.cluster import Cluster
from chameleon_ft.quantities import ROUNDING
from chameleon_ft.search.placement.candidates import PlacedPipelines
from chameleon_ft.search.placement.gradient_sync import GradientSync, links_are_equal
from chameleon_ft.search.options import SearchOptions
from chameleon_ft.search.pipelines.pipeline_search import PipelineSearch
from chameleon_ft.search.pipelines.schedules import PipelineSpec, TimedPipeline

__all__ = ["Polish"]

# Neighbours that are scheduled in a round, those with the least estimates.
_TRIES: Final = 8
_ROUNDS: Final = 6
# Of the pipelines with different programs, this many of the slowest are changed.
_PIPELINES: Final = 3
# Polishing a plan may spend this many times the effort of a search; the round that passes it is the last.
_EFFORT: Final = 4
# With up to this many workers, every pair is exchanged.
_FEW_WORKERS: Final = 16
# Layers are moved away from this many of the stages that compute longest.
_SLOW_STAGES: Final = 3


class Polish:
    """Improves pipelines on workers, step by step, as long as the step becomes shorter."""

    def __init__(
        self, pipelines: Sequence[PipelineSearch], sync: GradientSync, cluster: Cluster, options: SearchOptions
    ) -> None:
        self._searches = {each.scheduler: each for each in pipelines}
        self._sync = sync
        self._options = options
        self._class_of = pipelines[0].scheduler.pool.class_of()
        self._hosts = cluster.hosts
        self._equal_links = links_are_equal(cluster)

    def with_best_programs(self, pipelines: PlacedPipelines) -> PlacedPipelines:
        """Give every pipeline the program that `best_program` makes of it."""
        best: dict[int, TimedPipeline] = {}
        for timed, workers in {id(timed): (timed, workers) for timed, workers in pipelines}.values():
            found = timed.scheduler.scheduled(timed.spec, effort=self._options.polish_effort, workers=workers)
            if found is not None:
                best[id(timed)] = found
        return tuple((best.get(id(timed), timed), workers) for timed, workers in pipelines)

    def improved(self, pipelines: PlacedPipelines, *, exchange: bool = True) -> PlacedPipelines:
        """Pipelines with neighbouring cuts, recomputation and shares, by steepest descent.

        With `exchange`, workers may take each other's place too.

        How long a pipeline takes differs by some hundredths between cuts whose bounds hardly do, and gradient sync
        depends on where the stages of all pipelines stop.
        """
        if not exchange:
            return self._descended(pipelines, self._recut_or_shifted)
        return self._descended(pipelines, lambda own: chain(self._recut_or_shifted(own), self._swapped(own)))

    def exchanged(self, pipelines: PlacedPipelines) -> PlacedPipelines:
        """Exchange workers, by steepest descent."""
        return self._descended(pipelines, self._swapped)

    def _descended(
        self, pipelines: PlacedPipelines, neighbours: Callable[[PlacedPipelines], Iterator[PlacedPipelines]]
    ) -> PlacedPipelines:
        best, best_s = pipelines, self._sync.step_s(pipelines)
        most = self._spent() + _EFFORT * self._options.effort
        for _ in range(_ROUNDS):
            if self._spent() > most:
                break
            found = min(neighbours(best), key=self._sync.step_s, default=best)
            found_s = self._sync.step_s(found)
            if found_s >= best_s * (1 - ROUNDING):
                break
            best, best_s = found, found_s
        return best

    def _spent(self) -> int:
        return sum(each.spent for each in self._searches)

    def _recut_or_shifted(self, pipelines: PlacedPipelines) -> Iterator[PlacedPipelines]:
        different = {id(timed): timed for timed, _ in pipelines}
        # Others than the slowest may hold up gradient sync.
        slowest, *others = sorted(different.values(), key=lambda timed: -timed.program_s)[:_PIPELINES]
        for timed in (slowest, *others):
            recut = self._recut(timed)
            by_estimate = sorted(recut, key=lambda found: (found[0], found[1].cut_points, found[1].options))
            for _, other in by_estimate[:_TRIES]:
                # All pipelines that are cut alike, so that they go on to reduce gradients together; or this one alone.
                for alone in (False, True):
                    changed = self._changed(pipelines, timed, other, alone=alone)
                    if changed is not None:
                        yield changed
        shifted = self._shifted(pipelines, slowest)
        if shifted is not None:
            yield shifted

    def _swapped(self, pipelines: PlacedPipelines) -> Iterator[PlacedPipelines]:
        """Two workers of a class on different hosts take each other's place; one of them may be idle."""
        used = [worker for _, workers in pipelines for worker in workers]
        if self._equal_links or len(used) > _FEW_WORKERS:
            return
        workers = [*used, *sorted(self._hosts.keys() - set(used))]
        for place, one in enumerate(used):
            for other in workers[place + 1 :]:
                if self._class_of[one] == self._class_of[other] and self._hosts[one] != self._hosts[other]:
                    exchange = {one: other, other: one}
                    placed = [(timed, tuple(exchange.get(own, own) for own in each)) for timed, each in pipelines]
                    yield tuple((timed.scheduler.replayed(timed, each), each) for timed, each in placed)

    def _recut(self, timed: TimedPipeline) -> Iterator[tuple[float, PipelineSpec]]:
        """Cuts with a layer moved from a slow stage to another one, and other options of a stage, with estimates."""
        spec, estimates = timed.spec, self._searches[timed.scheduler].estimates
        starts = (0, *spec.cut_points[:-1])
        work_s = [
            float(estimates.tables.forward_s[kind, start, stop] + estimates.tables.backward_s[kind, start, stop])
            + float(estimates.tables.weight_s[kind, start, stop] + estimates.tables.recompute_s[option])
            for kind, start, stop, option in zip(spec.shape, starts, spec.cut_points, spec.options, strict=True)
        ]
        slow = sorted(range(len(work_s)), key=lambda stage: -work_s[stage])[:_SLOW_STAGES]
        for less in slow:
            for more in range(len(work_s)):
                if less == more:
                    continue
                low, high, shift = min(less, more), max(less, more), 1 if more < less else -1
                cut_points = (
                    *spec.cut_points[:low],
                    *(stop + shift for stop in spec.cut_points[low:high]),
                    *spec.cut_points[high:],
                )
                if all(start < stop for start, stop in pairwise((0, *cut_points))):
                    for own_s, options in estimates.chosen(spec.shape, cut_points, spec.micro_batches):
                        yield own_s, replace(spec, cut_points=cut_points, options=options)
        for stage, options_of in enumerate(estimates.stages.options_of(spec.shape, spec.cut_points)):
            for option in (spec.options[stage] - 1, spec.options[stage] + 1):
                if option in options_of:
                    options = (*spec.options[:stage], option, *spec.options[stage + 1 :])
                    own_s = estimates.bound_s(spec.shape, spec.cut_points, spec.micro_batches, options)
                    yield own_s, replace(spec, options=options)

    def _shifted(self, pipelines: PlacedPipelines, slowest: TimedPipeline) -> PlacedPipelines | None:
        """A micro-batch goes from each of the slowest pipelines to one of those that end first."""
        quickest = min((timed for timed, _ in pipelines), key=lambda timed: timed.program_s)
        counts = [sum(timed is each for timed, _ in pipelines) for each in (slowest, quickest)]
        if slowest is quickest or slowest.spec.micro_batches < 2:
            return None
        fewer, more = slowest.spec.micro_batches - 1, quickest.spec.micro_batches + 1
        left = {id(slowest): (min(counts), fewer), id(quickest): (min(counts), more)}
        found: list[tuple[TimedPipeline, tuple[int, ...]]] = []
        for timed, workers in pipelines:
            number, share = left.get(id(timed), (0, 0))
            if not number:
                found.append((timed, workers))
                continue
            left[id(timed)] = number - 1, share
            other = self._scheduled(timed, workers, micro_batches=share)
            if other is None:
                return None
            found.append((other, workers))
        return tuple(found)

    def _changed(
        self,
        pipelines: PlacedPipelines,
        like: TimedPipeline,
        other: PipelineSpec,
        *,
        alone: bool,
    ) -> PlacedPipelines | None:
        """All pipelines cut like one, or the first of those that are it, cut like `other` instead; None if one of them
        does not fit then."""
        spec = like.spec
        left = 1 if alone else len(pipelines)
        found: list[tuple[TimedPipeline, tuple[int, ...]]] = []
        for timed, workers in pipelines:
            own = timed.spec
            is_alike = (own.shape, own.cut_points, own.options) == (spec.shape, spec.cut_points, spec.options)
            is_alike = is_alike and timed.scheduler is like.scheduler
            if left and (timed is like if alone else is_alike):
                left -= 1
                changed = self._scheduled(timed, workers, cut_points=other.cut_points, options=other.options)
                if changed is None:
                    return None
                timed = changed
            found.append((timed, workers))
        return tuple(found)

    def _scheduled(self, timed: TimedPipeline, workers: Iterable[int], **changes: Any) -> TimedPipeline | None:
        """A pipeline with these changes of what it is; None if it does not fit then."""
        spec = replace(timed.spec, **changes)
        return timed.scheduler.scheduled(spec, effort=self._options.look_effort, workers=tuple(workers))
