"""Schedules of the same workers: of other routes, under other limits and preferences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from chameleon_ft.plan.plan import Hop, Plan
from chameleon_ft.schedule._engine import Rules, Schedule
from chameleon_ft.schedule._network import Network, NetworkBuilder, builder_of
from chameleon_ft.schedule._orders import schedule
from chameleon_ft.schedule.costs import CostModel
from chameleon_ft.schedule.limits import InFlightLimit, limits_of_routes

# Times that differ by less than this share differ by rounding only.
ROUNDING: Final = 1e-9

# Whether forwards go first, and how much more than by default is kept; None is a whole pipeline depth.
_PLAIN: Final = ((True, 0), (True, 1), (True, 2), (True, None), (False, 0), (False, 1), (False, 2), (False, None))
# Where routes share stages: what is most often best first.
_SPLIT: Final = ((False, 2), (False, 3), (False, 1), (False, None), (True, 2), (True, None), (True, 0), (False, 0))
_FUSED: Final = ((True, None), (True, 3), (True, 2), (False, 2), (True, 1), (False, None), (True, 0), (False, 0))


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
        """The default limits and some larger ones, up to a whole pipeline depth more, with either preference.

        More in flight than 1F1B keeps hides latency, and keeps busy the pipeline whose stage is shared with others.
        Where routes share stages, what has most often been best comes first; elsewhere, what keeps least.
        """
        depth = max(map(len, ways))
        shared = _SPLIT if self._split else _FUSED
        tried: set[Rules] = set()
        for forward_first, extra in shared if len(ways) > 1 else _PLAIN:
            rules = self.rules(ways, extra=depth if extra is None else min(extra, depth), forward_first=forward_first)
            if rules not in tried:
                tried.add(rules)
                yield rules

    def rules(self, ways: Sequence[tuple[Hop, ...]], *, extra: int, forward_first: bool) -> Rules:
        """The default limits of routes over these ways and `extra` more, as far as the ceiling allows."""
        limits = limits_of_routes(self._builder.workers, ways)
        raised = [self._raised(worker, limits[worker], extra) for worker in self._builder.workers]
        return Rules(
            in_flight=tuple(limit.in_flight for limit in raised),
            kept=tuple(limit.kept for limit in raised),
            forward_first=forward_first,
        )

    def _raised(self, worker: int, limit: InFlightLimit, extra: int) -> InFlightLimit:
        in_flight, kept = limit.in_flight + extra, limit.kept + extra
        ceiling = self._ceiling.get(worker)
        if ceiling is not None:
            kept = min(kept, ceiling.kept)
            in_flight = min(in_flight, ceiling.in_flight, kept)
        return InFlightLimit(in_flight, kept)


def trials_of(plan: Plan, costs: CostModel, ceiling: Mapping[int, InFlightLimit] | None) -> Trials:
    """Those of all workers of a plan."""
    return Trials(builder_of(plan, costs), plan.workers, ceiling)
