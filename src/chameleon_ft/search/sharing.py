"""Shares the hops of a lost worker among other holders of its layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Final

from chameleon_ft.plan import Hop, LayerRange
from chameleon_ft.quantities import ROUNDING

# Most workers that take over, by lost micro-batch: more would gain little, and all pipelines that take part wait for
# each other.
_HELPERS: Final = 2
_BISECTIONS: Final = 30

Seconds = Callable[[int, int, int], float]
"""Returns the seconds that a worker computes for one micro-batch on layers start to stop."""


def shared_hops(
    micro_batches: Sequence[int],
    layers: LayerRange,
    holders: Iterable[int],
    load_s: MutableMapping[int, float],
    seconds: Seconds,
    *,
    cut: bool,
) -> Iterator[tuple[int, Hop]]:
    """Yield (micro-batch, hop) for `layers` of each micro-batch, so that the largest load is least.

    The micro-batches are laid end to end. Each worker takes the next layers up to a common level of load, which is
    found by bisection.

    Args:
        holders: workers that hold all these layers.
        load_s: worker -> seconds that it computes in any case; the hops are added.
        seconds: cost of a hop.
        cut: whether several workers may share a hop, which takes more messages.
    """
    count = len(micro_batches)
    chosen = sorted(sorted(holders, key=lambda worker: (load_s[worker], worker))[: _HELPERS * count])
    low_s = min(load_s[worker] for worker in chosen)
    own_s = {worker: seconds(worker, layers.start, layers.stop) for worker in chosen}
    high_s = min(load_s[worker] + count * own_s[worker] for worker in chosen) * (1 + ROUNDING)

    def dealt(level_s: float) -> list[tuple[int, LayerRange, int]] | None:
        rooms_s = [(worker, level_s - load_s[worker]) for worker in chosen]
        return _dealt(count, layers, rooms_s, seconds, cut=cut)

    for _ in range(_BISECTIONS):
        level_s = (low_s + high_s) / 2
        low_s, high_s = (level_s, high_s) if dealt(level_s) is None else (low_s, level_s)
    pieces = dealt(high_s) or []
    order = _order(pieces, layers)
    for number, part, worker in pieces:
        load_s[worker] += seconds(worker, part.start, part.stop)
        yield micro_batches[order[number]], Hop(worker, part)


def _dealt(
    count: int, layers: LayerRange, rooms_s: Iterable[tuple[int, float]], seconds: Seconds, *, cut: bool
) -> list[tuple[int, LayerRange, int]] | None:
    """Return (micro-batch number, layers, worker) of each piece; None if the time is too short.

    Each worker takes as many of the next layers as fit its time.
    """
    dealt: list[tuple[int, LayerRange, int]] = []
    number, start = 0, layers.start
    for worker, room_s in rooms_s:
        while number < count:
            least = start + 1 if cut else layers.stop
            stop = layers.stop
            while stop >= least and seconds(worker, start, stop) > room_s:
                stop -= 1
            if stop < least:
                break
            dealt.append((number, LayerRange(start, stop), worker))
            if stop < layers.stop:
                start = stop
                break
            room_s -= seconds(worker, start, stop)
            number, start = number + 1, layers.start
    return dealt if number == count else None


def _order(dealt: Sequence[tuple[int, LayerRange, int]], layers: LayerRange) -> dict[int, int]:
    """Return the position of each micro-batch, by number: those of one worker spread evenly, cut ones in the middle.

    A route through more workers takes longer, which delays the start or the end of the step if it is first or last.
    """
    uncut: dict[int, list[int]] = defaultdict(list)
    key: dict[int, tuple[float, int]] = {}
    for number, part, worker in dealt:
        if part == layers:
            uncut[worker].append(number)
        else:
            key[number] = 0.5, -1
    for worker, numbers in uncut.items():
        key.update({number: ((place + 0.5) / len(numbers), worker) for place, number in enumerate(numbers)})
    return {number: place for place, number in enumerate(sorted(key, key=lambda number: (key[number], number)))}
