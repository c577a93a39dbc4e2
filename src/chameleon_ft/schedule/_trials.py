"""Many schedules of the same workers: other routes, other limits, other preferences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from chameleon_ft.plan.plan import Hop, Plan
from chameleon_ft.schedule._engine import Rules, Schedule
from chameleon_ft.schedule._local_search import shortened
from chameleon_ft.schedule._network import Network, NetworkBuilder
from chameleon_ft.schedule._orders import schedule
from chameleon_ft.schedule._rank_search import reranked
from chameleon_ft.schedule.costs import CostModel
from chameleon_ft.schedule.limits import InFlightLimit, limits_of_routes

# Times that differ by less than this share differ by rounding only.
ROUNDING: Final = 1e-9


class Trials:
    """Schedules routes between the workers of `plan`, each worker keeping no more than `ceiling` says.

    `count` is how many schedules have been made.
    """

    def __init__(self, plan: Plan, costs: CostModel, ceiling: Mapping[int, InFlightLimit] | None) -> None:
        self.count = 0
        self._workers = plan.workers
        self._ceiling = ceiling
        self._builder = NetworkBuilder(plan, costs)

    def network(self, routes: Sequence[tuple[Hop, ...]]) -> Network:
        """These routes, given by their hops, as the scheduler sees them."""
        return self._builder.network(routes)

    def run(self, routes: Sequence[tuple[Hop, ...]], rules: Rules) -> Schedule:
        """The schedule of these routes under `rules`."""
        self.count += 1
        return schedule(self.network(routes), rules)

    def best(self, routes: Sequence[tuple[Hop, ...]]) -> tuple[Rules, Schedule]:
        """The first of the ranked schedules, made shorter where a search finds how.

        Micro-batches are ranked anew under its rules, then operations change places under the largest limits there are.
        """
        network = self.network(routes)
        enough_s = network.lower_bound_s() * (1 + ROUNDING)
        rules, found = self.ranked(routes)[0]
        if found.beyond_limits:
            return rules, found
        found = reranked(network, found, rules, enough_s=enough_s)
        largest = self._rules(routes, extra=max(map(len, routes)), forward_first=rules.forward_first)
        shorter = shortened(network, found, largest, enough_s=enough_s)
        return (largest, shorter) if shorter.step_s < found.step_s * (1 - ROUNDING) else (rules, found)

    def ranked(self, routes: Sequence[tuple[Hop, ...]]) -> list[tuple[Rules, Schedule]]:
        """The schedules that `rules_to_try` gives, best first; the first that meets the lower bound ends the search.

        Schedules within the limits go before those that exceed one, then the shorter, then the one tried earlier.
        """
        network = self.network(routes)
        bound_s = network.lower_bound_s() * (1 + ROUNDING)
        found: list[tuple[Rules, Schedule]] = []
        for rules in self.rules_to_try(routes):
            self.count += 1
            trial = schedule(network, rules)
            found.append((rules, trial))
            if trial.step_s <= bound_s and not trial.beyond_limits:
                break
        return sorted(found, key=lambda trial: (trial[1].beyond_limits, trial[1].step_s))

    def rules_to_try(self, routes: Sequence[tuple[Hop, ...]]) -> Iterator[Rules]:
        """The default limits and some larger ones, up to a whole pipeline depth more, with either preference.

        More in flight than 1F1B keeps hides latency, and keeps busy the pipeline whose stage is shared with others.
        """
        depth = max(map(len, routes))
        tried: set[Rules] = set()
        for forward_first in (True, False):
            for extra in (0, 1, 2, depth):
                rules = self._rules(routes, extra=extra, forward_first=forward_first)
                if rules not in tried:
                    tried.add(rules)
                    yield rules

    def _rules(self, routes: Sequence[tuple[Hop, ...]], *, extra: int, forward_first: bool) -> Rules:
        """The default limits and `extra` more, as far as the ceiling allows."""
        limits = limits_of_routes(self._workers, routes)
        raised = [self._raised(worker, limits[worker], extra) for worker in self._workers]
        return Rules(
            in_flight=tuple(limit.in_flight for limit in raised),
            kept=tuple(limit.kept for limit in raised),
            forward_first=forward_first,
        )

    def _raised(self, worker: int, limit: InFlightLimit, extra: int) -> InFlightLimit:
        in_flight, kept = limit.in_flight + extra, limit.kept + extra
        ceiling = None if self._ceiling is None else self._ceiling.get(worker)
        if ceiling is not None:
            kept = min(kept, ceiling.kept)
            in_flight = min(in_flight, ceiling.in_flight, kept)
        return InFlightLimit(in_flight, kept)
