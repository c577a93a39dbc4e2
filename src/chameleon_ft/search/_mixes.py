"""Which pipelines, how many of each, with which share of the micro-batches: so that the last of them ends first.

Pipelines do not wait for each other, so a step takes as long as its slowest. For a time T every shape of pipeline
finishes at most so many micro-batches, and the best mix of shapes is a knapsack; the least T at which it holds all
micro-batches is found by bisection. With the bounds on pipelines for their times, that T is a bound on every plan. The
pipelines of the mix are then replayed, their times take the place of their bounds, and so on: when the best mix
consists of replayed pipelines only, none is better.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from chameleon_ft.schedule import CostModel
from chameleon_ft.search._bounds import Pipelines, SyncCost
from chameleon_ft.search._depth_mixes import DepthMixes, is_small
from chameleon_ft.search._effort import is_dear, look_effort
from chameleon_ft.search._kinds import Crew, Shape
from chameleon_ft.search._looks import Looks
from chameleon_ft.search._mix import BoundedMix, Size, best_mix, mix_of_number
from chameleon_ft.search._shapes import shapes_of, size_of
from chameleon_ft.search._timed import TimedPipeline, Timer

_ROUNDING: Final = 1e-9
# Relative precision of a bisection when the search is not to be complete.
_COARSE: Final = 2e-4
# Most plans take less than so many times what workers take that are never idle.
_LIKELY: Final = 1.8
# To begin with where nothing takes any time.
_NO_TIME_S: Final = 1e-9
# When everything is done that can be done at all.
_AT_LAST_S: Final = 1e300
# With little effort: how much longer a step may be so that it need not look at dear pipelines.
_NOT_MUCH_LONGER: Final = (1.15, 1.3, 1.5)
# With little effort: how much longer mixes may take that are less alike than others.
_NEARLY: Final = 1.003
# With little effort: pipelines that take longer than the best mix by this are not gone on with.
_HOPELESS: Final = 1.03
# With little effort: so many mixes in a row that are no better end a search.
_IN_VAIN: Final = 2
# How many times as deep one pipeline may be as the mean.
_ALIKE: Final = 1.5


@dataclass(frozen=True, slots=True)
class Share:
    """So many pipelines of a shape, each with so many micro-batches."""

    shape: Shape
    micro_batches: int
    count: int


@dataclass(frozen=True, slots=True)
class TimedMix:
    """A mix with the pipelines that it is made of, and the seconds that the slowest takes."""

    pipelines: tuple[tuple[TimedPipeline, int], ...]
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """What a search has come to.

    Attributes:
        mixes: all mixes that were replayed, in that order.
        complete: whether no mix can be better than the best of these, replayed under the same rules.
    """

    mixes: tuple[TimedMix, ...]
    complete: bool


class MixSearch:
    """The search over mixes of pipelines with fused, or with split backward.

    Args:
        effort: operations to schedule, at most; None to go on until nothing can be better, with every cut tried.
        numbers: fewest and most pipelines side by side; None for any number. More than one only where workers are of
            one kind.
    """

    def __init__(
        self,
        costs: CostModel,
        crew: Crew,
        timer: Timer,
        *,
        sync: SyncCost | None = None,
        effort: int | None,
        numbers: tuple[int, int] | None = None,
    ) -> None:
        self.timer = timer
        self._plain = timer.pipelines.bounds(sync or SyncCost())
        self._recomputing = None if timer.recomputing is None else timer.recomputing.bounds(sync or SyncCost())
        self._micro_batches = costs.workload.micro_batches
        self._counts = crew.counts
        self._effort = effort
        self.numbers = numbers
        # Where many are looked at, with hardly any effort.
        look = look_effort(effort) if effort is None or numbers is None else None
        self._looks = Looks(timer, self._plain, self._recomputing, effort=look, complete=effort is None)
        self._precision = _COARSE if effort is not None else _ROUNDING / 10
        self.shapes, self.all_shapes = shapes_of(self._counts, len(costs.workload.layers))
        # Shapes that a formula does not rule out get a closer look.
        self._opened: set[Shape] = set()
        self._by_depth: DepthMixes | None = None
        if len(self._counts) == 1 and numbers is not None and is_small(*self._counts, len(self.shapes), numbers[1]):
            both = [bounds for bounds in (self._plain, self._recomputing) if bounds is not None]
            self._by_depth = DepthMixes(both, self.shapes, *self._counts, numbers)
        self._activate(self.shapes)
        self._known: dict[tuple[Shape, int], tuple[float, TimedPipeline | None]] = {}
        # Seconds of a shape by micro-batches, or those from which on it was given up; infinite where it does not fit.
        self._replayed: dict[Shape, dict[int, float]] = {}
        self._bound: tuple[float, list[Share]] | None = None
        self._work_s = timer.work_s

    def _activate(self, shapes: Sequence[Shape]) -> None:
        """Go on with these."""
        if self._by_depth is not None:
            self._by_depth.activate(shapes)
            return
        self._active = tuple(shapes)
        # By place, for shapes are slow to hash.
        self._sizes = [size_of(shape, len(self._counts)) for shape in self._active]
        self._open_places = {place for place, shape in enumerate(self._active) if shape in self._opened}
        self._closed_forms = self._plain.closed_forms(self._active, self._micro_batches)

    def promise(self, time_s: float) -> int:
        """Micro-batches that mixes may finish in `time_s`, at the most; to tell which searches to begin with."""
        if self._by_depth is not None:
            return self._by_depth.promise(time_s)
        return self._at(time_s, bounding=True)[0]

    def bound_s(self) -> float:
        """Seconds below which no mix can be; infinite if memory allows none. To be asked before `run`."""
        if self._bound is None:
            self._bound = self._bounded()
        return self._bound[0]

    @property
    def is_bounded(self) -> bool:
        """Whether its bound has been worked out."""
        return self._bound is not None

    def bound_mix(self) -> list[Share]:
        """The mix that comes closest to the bound."""
        return self._bounded()[1] if self._bound is None else self._bound[1]

    def reaches(self, time_s: float) -> bool:
        """Whether a mix may take less than `time_s`."""
        if time_s == math.inf:
            return self.bound_s() < math.inf
        return self._at(time_s * (1 - _ROUNDING), bounding=True)[0] >= self._micro_batches

    def run(self, bound_s: float, upper_s: float = math.inf) -> Searched:
        """Search between a bound and a time that is to be beaten."""
        if self._effort is None:
            return self._run(bound_s, upper_s)
        mixes: list[TimedMix] = []
        for _ in self._few_shapes(bound_s):
            # Those that are less alike may not be slower before they reduce their gradients, or hardly.
            mixes += self._run(bound_s, min([upper_s, *(mix.time_s * _NEARLY for mix in mixes)])).mixes
        return Searched(mixes=tuple(mixes), complete=False)

    def _run(self, bound_s: float, upper_s: float) -> Searched:
        mixes: list[TimedMix] = []
        low, best_s = bound_s, upper_s
        complete, looked, in_vain = False, False, 0
        most = math.inf if self._effort is None else self.timer.spent + self._effort
        while not complete and (not looked or self.timer.spent < most):
            found = self._next(low, best_s)
            if found is None:
                complete = self._effort is None
                break
            low, mix = found
            fresh, timed_mix = self._timed(mix, best_s * _HOPELESS)
            looked = True
            if timed_mix.pipelines:
                mixes.append(timed_mix)
            elif timed_mix.time_s == math.inf:
                continue
            if not fresh or timed_mix.time_s <= low * (1 + _ROUNDING):
                complete = self._effort is None
                break
            in_vain = 0 if timed_mix.time_s < best_s else in_vain + 1
            if self._effort is not None and in_vain == _IN_VAIN:
                break
            best_s = min(best_s, timed_mix.time_s)
        return Searched(mixes=tuple(mixes), complete=complete)

    def _bounded(self) -> tuple[float, list[Share]]:
        low, high = self._work_s, self._work_s * 1.05 or _NO_TIME_S
        total, mix = self._at(low, bounding=True)
        if total >= self._micro_batches:
            return low, mix
        possible = False
        while self._at(high, bounding=True)[0] < self._micro_batches:
            if high > _LIKELY * self._work_s and not possible:
                possible = self._at(_AT_LAST_S, bounding=True)[0] >= self._micro_batches
                if not possible:
                    return math.inf, []
            low, high = high, high * (1.1 if high < _LIKELY * self._work_s else 2)
        return self._narrowed(low, high, bounding=True)

    def _next(self, low: float, best_s: float) -> tuple[float, list[Share]] | None:
        """The best mix for what is known, if it may take less than `best_s`, and a time that is certain by then."""
        high = best_s * (1 - _ROUNDING)
        if high < math.inf:
            return None if self._at(high)[0] < self._micro_batches else self._narrowed(low, high)
        high = low * (1 + 2 * self._precision) or _NO_TIME_S
        possible = False
        while self._at(high)[0] < self._micro_batches:
            if high > _LIKELY * self._work_s and not possible:
                possible = self._at(_AT_LAST_S)[0] >= self._micro_batches
                if not possible:
                    return None
            low, high = high, high * (1.05 if high < _LIKELY * self._work_s else 2)
        return self._narrowed(low, high)

    def _narrowed(self, low: float, high: float, *, bounding: bool = False) -> tuple[float, list[Share]]:
        """The least time between `low` and `high` in which all can be finished, from below, and the mix that does."""
        if self._by_depth is not None:
            low = self._by_depth.narrowed(low, high, self._replayed, precision=self._precision)
            mix = self._shares_by_depth()
            return low, mix if bounding else self._trimmed(mix)
        mix = self._at(high, bounding=bounding)[1]
        while high - low > self._precision * high:
            middle = (low + high) / 2
            total, found = self._at(middle, bounding=bounding)
            if total >= self._micro_batches:
                high, mix = middle, found
            else:
                low = middle
        return low, mix if bounding else self._trimmed(mix)

    def _few_shapes(self, time_s: float) -> Iterator[None]:
        """With little effort, go on without shapes that a look at would cost too much, if others can finish in time.

        Where the number of pipelines is given, first with those of equal depth, or nearly so; of equal depth but
        for one; with those that are not much deeper or shallower; and at last with any shallower ones: the more alike
        pipelines are, the more of their gradients can be reduced together.
        """
        if self._by_depth is None:
            most = [self._most(shape, time_s) for shape in self.shapes]
        else:
            most = self._by_depth.each(time_s)
        everything = [
            shape
            for shape, count in zip(self.shapes, most, strict=True)
            if not is_dear(len(shape), count, self._effort)
        ]
        ways: list[Sequence[Shape]] = [everything]
        if self.numbers is not None:
            mean = [sum(self._counts) / number for number in self.numbers]
            ways = [
                [shape for shape in everything if shallow <= len(shape) <= deep]
                for shallow, deep in (
                    (math.floor(mean[1]), math.ceil(mean[0])),
                    (mean[1] / _ALIKE - 1, mean[0] * _ALIKE + 1),
                    (0, mean[0] * _ALIKE + 1),
                )
            ]
            # All equal but one, which takes those that are left over.
            depth, workers = max(1, math.floor(mean[1])), sum(self._counts)
            alike = {depth, *(workers - depth * (number - 1) for number in self.numbers)}
            ways.insert(1, [shape for shape in everything if len(shape) in alike])
        possible = False
        for shapes in ways:
            self._activate(shapes)
            if any(self._at(time_s * longer)[0] >= self._micro_batches for longer in _NOT_MUCH_LONGER):
                possible = True
                yield
        if not possible:
            self._activate(self.shapes)
            yield

    def _at(self, time_s: float, *, bounding: bool = False) -> tuple[int, list[Share]]:
        """The most micro-batches that a mix may finish in `time_s`, and the mix.

        With `bounding`, a number that no mix passes, and a mix that comes close to it.
        """
        if self._by_depth is not None:
            total = self._by_depth.at(time_s, self._replayed)
            return total, self._shares_by_depth() if total >= self._micro_batches else []
        # Those of shapes that have not been opened, none of which has been replayed.
        counts = self._closed_forms.most(time_s).tolist()
        for place in self._open_places:
            counts[place] = self._most(self._active[place], time_s)
        while True:
            best: dict[Size, int] = {}
            for place, (size, count) in enumerate(zip(self._sizes, counts, strict=True)):
                if count > (counts[best[size]] if size in best else 0):
                    best[size] = place
            found = self._best_mix({size: counts[place] for size, place in best.items()})
            total = found.bound if bounding else sum(counts[best[size]] * number for size, number in found.mix.items())
            if total < self._micro_batches:
                return total, []
            fresh = {best[size] for size in (*found.mix, *found.made_of)} - self._open_places
            if not fresh:
                mix = ((best[size], number) for size, number in found.mix.items())
                return total, [Share(self._active[place], counts[place], number) for place, number in mix]
            self._open_places |= fresh
            for place in fresh:
                self._opened.add(self._active[place])
                counts[place] = self._most(self._active[place], time_s)

    def _shares_by_depth(self) -> list[Share]:
        return [] if self._by_depth is None else [Share(*share) for share in self._by_depth.shares()]

    def _best_mix(self, values: dict[Size, int]) -> BoundedMix:
        if self.numbers is None:
            return best_mix(values, self._counts)
        if self.numbers == (1, 1):
            most = max(values, key=values.__getitem__, default=None)
            return BoundedMix(0, {}, ()) if most is None else BoundedMix(values[most], {most: 1}, (most,))
        (count,) = self._counts
        return mix_of_number(values, count, *self.numbers)

    def _most(self, shape: Shape, time_s: float) -> int:
        """The most micro-batches that a pipeline may finish: not as many as one that was replayed and took longer."""
        enough = self._micro_batches
        for count, own_s in self._replayed.get(shape, {}).items():
            if own_s > time_s:
                enough = min(enough, count - 1)
        if shape not in self._opened:
            return self._plain.most_by_closed_form(shape, time_s, enough)
        plain = self._plain.most(shape, time_s, enough)
        # Only where memory does not allow it otherwise can a pipeline that computes more finish more.
        if self._recomputing is None or plain >= self._recomputing.most_by_closed_form(shape, time_s, enough):
            return plain
        return max(plain, self._recomputing.most(shape, time_s, enough))

    def _trimmed(self, mix: list[Share]) -> list[Share]:
        """The mix without the micro-batches that are too many; the pipelines that would end last give them up."""
        surplus = sum(share.micro_batches * share.count for share in mix) - self._micro_batches
        shares = {(share.shape, share.micro_batches): share.count for share in mix}
        while surplus > 0:
            shape, count = max(shares, key=lambda key: (self._time_s(*key), key))
            pipelines = shares.pop((shape, count))
            fewer = min(pipelines, surplus)
            if pipelines > fewer:
                shares[shape, count] = pipelines - fewer
            if count > 1:
                shares[shape, count - 1] = shares.get((shape, count - 1), 0) + fewer
            surplus -= fewer
        return [Share(shape, count, pipelines) for (shape, count), pipelines in sorted(shares.items())]

    def _time_s(self, shape: Shape, micro_batches: int) -> float:
        known = self._known.get((shape, micro_batches))
        return self._least_s(shape, micro_batches) if known is None else known[0]

    def _least_s(self, shape: Shape, micro_batches: int) -> float:
        plain_s = self._plain.least_s(shape, micro_batches)
        if plain_s < math.inf or self._recomputing is None:
            return plain_s
        return self._recomputing.least_s(shape, micro_batches)

    def _timed(self, mix: Sequence[Share], upper_s: float) -> tuple[bool, TimedMix]:
        """Whether any of the mix was not known before, and the mix replayed.

        Without pipelines where it takes longer than its time, which is `upper_s`, or for ever where it does not fit.
        """
        fresh = False
        pipelines: list[tuple[TimedPipeline, int]] = []
        time_s = 0.0
        for share in mix:
            key = share.shape, share.micro_batches
            if key not in self._known:
                fresh = True
                self._known[key] = self._looks.best_cut(*key, upper_s)
                self._replayed.setdefault(share.shape, {})[share.micro_batches] = self._known[key][0]
            own_s, pipeline = self._known[key]
            if pipeline is None:
                return fresh, TimedMix((), own_s)
            time_s = max(time_s, own_s)
            pipelines.append((pipeline, share.count))
        return fresh, TimedMix(tuple(pipelines), time_s)


def holds(pipelines: Pipelines, counts: Sequence[int], micro_batches: int) -> bool:
    """Whether there is a mix that memory allows."""
    bounds = pipelines.bounds(SyncCost())
    best: dict[Size, int] = {}
    for shape in shapes_of(counts, pipelines.num_layers)[0]:
        size = size_of(shape, len(counts))
        best[size] = max(bounds.most(shape, math.inf, micro_batches), best.get(size, 0))
    return best_mix(best, counts).bound >= micro_batches
