"""Schedules of the same workers: of other routes, under other limits and preferences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from chameleon_ft.plan.plan import Hop, Plan
from chameleon_ft.schedule._engine import Rules, Schedule
from chameleon_ft.schedule._network import Network, NetworkBuilder, builder_of
from chameleon_ft.schedule._orders import schedule
from chameleon_ft.schedule._records import Integers
from chameleon_ft.schedule.costs import CostModel
from chameleon_ft.schedule.limits import InFlightLimit, limits_of_routes

_ANY: Final = InFlightLimit(2**31, 2**31)
# Times that differ by less than this share differ by rounding only.
ROUNDING: Final = 1e-9


class Trial(NamedTuple):
    """What is tried: as in `Rules`, and by how much more a worker may have in flight, and keep, than by default: shares
    of that, and a number of micro-batches besides.
    """

    forward_first: bool
    patience: float
    in_flight: float = 0.0
    kept: float = 0.0
    extra: int = 0


# What to try, in order. The first is 1F1B or ZB-H1 where a pipeline has all its stages for itself. Each of the others
# is what made up most for some hundred plans, of presets and generated, that those before it leave something to gain.
# With room for more than ZB-H1, no waiting, and twice as much in flight at the first stage as at the default, bubbles
# become short (as ZB-H2's: Qi et al., Zero Bubble Pipeline Parallelism, 2023).
_PLAIN_SPLIT: Final = (
    Trial(True, 0.75),
    Trial(True, 0.25, 0.4, 0.5),
    Trial(True, 0.0, 0.6, 0.75),
    Trial(True, 0.1, 0.75, 0.75),
    Trial(True, 0.4, 0.25, 0.25),
    Trial(True, 0.0, 0.5, 0.75),
    Trial(False, 0.0, 1.0, 1.0),
    Trial(True, 0.1, 0.5, 0.5),
    Trial(True, 0.4),
    Trial(True, 0.0, 0.25, 1.0),
)
# The same for pipelines of so many stages, of which there may be no effort to schedule more than one or two.
_DEEP: Final = 16
_DEEP_SPLIT: Final = (
    Trial(True, 0.1, 0.5, 0.75),
    Trial(True, 0.25, 0.6, 0.75),
    Trial(True, 0.0, 0.5, 0.75),
    Trial(True, 0.25, 0.4, 0.5),
    Trial(True, 0.25, 0.25, 0.75),
    Trial(True, 0.25, 0.5, 0.5),
    Trial(False, 0.0, 0.5, 1.0),
    Trial(True, 0.75),
)
_PLAIN_FUSED: Final = (
    Trial(True, 0.0),
    Trial(True, 0.0, 1.0, 1.0),
    Trial(True, 0.0, 0.5, 0.5),
    Trial(False, 0.0, 0.5, 0.5),
    Trial(True, 0.0, 0.25, 0.25),
    Trial(True, 0.0, 0.75, 0.75),
    Trial(False, 0.0, 0.75, 0.75),
)
_SHARED_SPLIT: Final = (
    Trial(False, 0.1, 0.5, 0.5, 2),
    Trial(True, 0.0, 0.5, 0.5, 4),
    Trial(False, 0.0, 1.0, 1.0),
    Trial(False, 0.1, 0.5, 0.5),
    Trial(False, 0.1, 0.0, 0.0, 2),
    Trial(True, 0.0, 0.5, 0.5, 2),
    Trial(True, 0.0),
    Trial(False, 0.25, 0.0, 0.0, 4),
)
_SHARED_FUSED: Final = (
    Trial(False, 0.0, 0.5, 0.5, 1),
    Trial(True, 0.0, 0.5, 0.5, 4),
    Trial(True, 0.0, 1.0, 1.0),
    Trial(True, 0.0),
    Trial(False, 0.0, 0.5, 0.5, 4),
    Trial(True, 0.0, 0.0, 0.0, 2),
    Trial(True, 0.0, 0.0, 0.0, 4),
)


class Trials:
    """Schedules routes between these workers, each keeping no more than `ceiling` says.

    `operations` is the effort so far: how many have been scheduled.
    """

    def __init__(
        self, builder: NetworkBuilder, workers: tuple[int, ...], ceiling: Mapping[int, InFlightLimit] | None
    ) -> None:
        self.operations = 0
        self._ceiling = {} if ceiling is None else ceiling
        self._builder = builder.part(workers)
        self._split = builder.split_backward

    def part(self, workers: tuple[int, ...]) -> Trials:
        """Trials of some of the workers."""
        return Trials(self._builder, workers, self._ceiling)

    def ceiling_of(self, workers: Sequence[int]) -> Integers:
        """What these workers may have in flight, and keep, at the most; int64 [2, workers]."""
        limits = [self._ceiling.get(worker, _ANY) for worker in workers]
        return np.array([[limit.in_flight for limit in limits], [limit.kept for limit in limits]])

    def seconds(self, hops: Sequence[Hop]) -> tuple[list[float], ...]:
        """What operations and messages of a route take; see `NetworkBuilder.seconds`."""
        return self._builder.seconds(hops)

    def network(self, ways: Sequence[tuple[Hop, ...]], taken: Sequence[int]) -> Network:
        """Routes over these ways, and which of them each takes, as the scheduler sees them."""
        return self._builder.network(ways, taken)

    def key(self, ways: Sequence[tuple[Hop, ...]]) -> tuple[object, ...]:
        """Equal where the same routes over these ways would be scheduled alike."""
        return (
            tuple(self._builder.slots(hops).tobytes() for hops in ways),
            tuple(self._ceiling.get(worker) for worker in self._builder.workers),
        )

    def run(self, network: Network, rules: Rules) -> Schedule:
        """The schedule of this network under `rules`."""
        found = schedule(network, rules)
        # A dead end is mostly met late, and then all begins again.
        self.operations += len(network.operations) * (2 if found.dead_end else 1)
        return found

    def rules_to_try(self, ways: Sequence[tuple[Hop, ...]]) -> Iterator[Rules]:
        """The default limits and some larger ones, up to a whole pipeline depth more, with several preferences.

        More in flight than 1F1B keeps hides latency, and keeps busy the pipeline whose stage is shared with others.
        """
        shared = _SHARED_SPLIT if self._split else _SHARED_FUSED
        tried: set[Rules] = set()
        limits, depth = self._limits(ways), max(map(len, ways))
        for trial in shared if len(ways) > 1 else plain_trials(len(ways[0]), split_backward=self._split):
            rules = _rules(limits, depth, trial)
            if rules not in tried:
                tried.add(rules)
                yield rules

    def largest(self, ways: Sequence[tuple[Hop, ...]], rules: Rules) -> Rules:
        """`rules` with the largest limits of all that are tried."""
        depth = max(map(len, ways))
        return _rules(self._limits(ways), depth, Trial(rules.forward_first, rules.patience, extra=depth))

    def _limits(self, ways: Sequence[tuple[Hop, ...]]) -> _Limits:
        found = limits_of_routes(self._builder.workers, ways).values()
        default = np.array([[limit.in_flight for limit in found], [limit.kept for limit in found]])
        return _Limits(default, self.ceiling_of(self._builder.workers))


class _Limits(NamedTuple):
    """Of workers, by index, what they have in flight, and keep: by default, and at the most; int64 [2, workers]."""

    default: Integers
    ceiling: Integers


def _rules(limits: _Limits, depth: int, trial: Trial) -> Rules:
    """The default limits, raised as far as the ceiling allows, by so much as the `depth` at the most."""
    shares = np.array([[trial.in_flight], [trial.kept]])
    more = np.minimum(depth, np.ceil(shares * limits.default).astype(np.int64) + trial.extra)
    kept = limits.default[1] + more.max(axis=0)
    in_flight = np.minimum(limits.default[0] + more[0], kept)
    kept = np.minimum(kept, limits.ceiling[1])
    in_flight = np.minimum(np.minimum(in_flight, limits.ceiling[0]), kept)
    return Rules(
        in_flight=tuple(in_flight.tolist()),
        kept=tuple(kept.tolist()),
        forward_first=trial.forward_first,
        patience=trial.patience,
    )


def plain_trials(depth: int, *, split_backward: bool) -> tuple[Trial, ...]:
    """What to try for a pipeline of so many stages that has them all for itself."""
    if not split_backward:
        return _PLAIN_FUSED
    return _PLAIN_SPLIT if depth < _DEEP else _DEEP_SPLIT


def trials_of(plan: Plan, costs: CostModel, ceiling: Mapping[int, InFlightLimit] | None) -> Trials:
    """Those of all workers of a plan."""
    return Trials(builder_of(plan, costs), plan.workers, ceiling)
