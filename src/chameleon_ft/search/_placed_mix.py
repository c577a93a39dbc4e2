"""Mixes of pipelines on real workers, and which of them a lost host leaves whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from chameleon_ft.search._placed import PlacedPipeline, polished, synced_s
from chameleon_ft.search._sync import largest_host
from chameleon_ft.search._timed import TimedPipeline, Timer


@dataclass(frozen=True, slots=True)
class PlacedMix:
    """A mix on real workers.

    Attributes:
        pipelines: all of it.
        timer: that its pipelines come from.
        step_s: seconds until all operations have ended and all gradients are reduced.
    """

    pipelines: tuple[PlacedPipeline, ...]
    timer: Timer
    step_s: float

    @property
    def survives_hosts(self) -> bool:
        """Whether every layer is left to somebody, whichever host is lost."""
        cluster = self.timer.costs.cluster
        if len(self.pipelines) > largest_host(cluster):
            return True
        hosts = self.timer.host_numbers
        by_layer: list[list[int]] = []
        for each in self.pipelines:
            own: list[int] = []
            stops = each.timed.stops
            for worker, start, stop in zip(each.workers, (0, *stops[:-1]), stops, strict=True):
                own += [hosts[worker]] * (stop - start)
            by_layer.append(own)
        return all(len(set(holders)) > 1 for holders in zip(*by_layer, strict=True))


def with_survivor(chosen: Sequence[PlacedMix], placed: Sequence[PlacedMix]) -> list[PlacedMix]:
    """What was chosen, and if none of it survives the loss of every host, the first of all that does."""
    if any(each.survives_hosts for each in chosen):
        return list(chosen)
    return [*chosen, *islice((each for each in placed if each.survives_hosts), 1)]


def best_ways(
    timed: Sequence[TimedPipeline], ways: Sequence[Sequence[tuple[int, ...]]], timer: Timer
) -> list[PlacedMix]:
    """Pipelines on workers that are chosen by what sync takes, with the same orders; the best way and `with_survivor`.

    Only where they are placed it counts what the links take between their workers, which is little.
    """
    rough = [tuple(map(PlacedPipeline, timed, workers)) for workers in ways]
    on_ways = [PlacedMix(pipelines, timer, step_s=synced_s(pipelines, timer)) for pipelines in rough]
    on_ways.sort(key=lambda placed: placed.step_s)
    return [_replayed(placed) for placed in with_survivor(on_ways[:1], on_ways)]


def scheduled_ways(
    timed: Sequence[TimedPipeline], ways: Sequence[Sequence[tuple[int, ...]]], timer: Timer, *, effort: int
) -> list[PlacedMix]:
    """The same with pipelines scheduled anew on the workers of every way, with so much effort for each of them."""
    on_ways: list[PlacedMix] = []
    for workers in ways:
        pipelines = tuple(
            PlacedPipeline(timer.moved(each, own, effort=effort), own) for each, own in zip(timed, workers, strict=True)
        )
        on_ways.append(PlacedMix(pipelines, timer, step_s=synced_s(pipelines, timer)))
    on_ways.sort(key=lambda placed: placed.step_s)
    return with_survivor(on_ways[:1], on_ways)


def with_best_programs(placed: PlacedMix, effort: int | None) -> PlacedMix:
    """The same with what `polished` makes of its pipelines, in a search of this effort."""
    pipelines = polished(placed.pipelines, placed.timer, effort)
    return replace(placed, pipelines=pipelines, step_s=synced_s(pipelines, placed.timer))


def _replayed(placed: PlacedMix) -> PlacedMix:
    timer = placed.timer
    pipelines = tuple(
        PlacedPipeline(timer.replayed(each.timed, each.workers), each.workers) for each in placed.pipelines
    )
    return replace(placed, pipelines=pipelines, step_s=synced_s(pipelines, timer))
