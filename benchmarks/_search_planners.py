"""`find_plan` beside the published planners, with fused and with split backward: part `planners` of the search.

Cases are small generated instances (unequal layers, workers, memory, messages; no gradient sync), and presets after
losses, with gradient sync. Times are processor times of this process, which other processes affect little.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from benchmarks._common import Bar, Spread
from benchmarks._neighbours import progress
from benchmarks._search_cases import PartReport, preset_costs, spread_losses
from chameleon_ft.lab.oobleck import oobleck_plan
from chameleon_ft.lab.paper import paper_plan
from chameleon_ft.lab.planned_layouts import BaselinePlan
from chameleon_ft.schedule import CostModel
from chameleon_ft.search import InfeasibleError, find_plan
from tests.search.instances import instance

_ROUNDING: Final = 1e-9
_PROGRESS_EVERY: Final = 50
_GENERATED: Final = "generated"
_PRESETS: Final = "presets"

Planner = Callable[[CostModel], BaselinePlan | None]


@dataclass(frozen=True, slots=True)
class Rival:
    """A published planner, named with its backward mode."""

    name: str
    plan: Planner


_RIVALS: Final = tuple(
    Rival(f"{name}, {'split' if split else 'fused'}", partial(planner, split_backward=split))
    for name, planner in (("paper", paper_plan), ("oobleck", oobleck_plan))
    for split in (True, False)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Versus:
    """One instance and one rival: seconds of both steps, infinite if no plan was found, and of both searches."""

    group: str
    instance: str
    rival: str
    rival_s: float
    found_s: float
    rival_search_s: float
    found_search_s: float

    @property
    def comparable(self) -> bool:
        """Whether the rival has found a plan."""
        return self.rival_s < math.inf

    @property
    def ratio(self) -> float:
        """The rival's step / ours; below 1 the rival is better."""
        return self.rival_s / self.found_s

    @property
    def worse(self) -> bool:
        """Whether our step is slower."""
        return self.comparable and self.ratio < 1 - _ROUNDING

    def to_json(self) -> dict[str, Any]:
        seconds = {"step_s": self.rival_s, "ratio": self.ratio} if self.comparable else {}
        searches = {"search_s": self.rival_search_s, "find_plan_search_s": self.found_search_s}
        return {"group": self.group, "instance": self.instance, "rival": self.rival, **seconds, **searches}


def compared_planners(
    *, instances: int, models: Sequence[str], sizes: Sequence[int], losses: Sequence[int]
) -> PartReport:
    """Compare on `count` generated instances, and on the presets of these sizes after losses."""
    every: list[Versus] = []
    for number, (name, costs) in enumerate(_generated(instances)):
        if number % _PROGRESS_EVERY == 0:
            progress(f"planners: instance {number + 1} of {instances}")
        every += compare(costs, _RIVALS, group=_GENERATED, name=name)
    for name, costs in _presets(models, sizes, losses):
        progress(f"planners: {name}")
        every += compare(costs, _RIVALS, group=_PRESETS, name=name)
    rows = [
        _row(group, rival.name, [each for each in every if (each.group, each.rival) == (group, rival.name)])
        for group in (_GENERATED, _PRESETS)
        for rival in _RIVALS
    ]
    return PartReport(
        rows=tuple(row for row in rows if row is not None),
        bars=(
            Bar(
                name="plans of the published planners that are faster",
                value=sum(each.worse for each in every),
                limit=0,
            ),
        ),
        results={"planners": [each.to_json() for each in every]},
    )


def compare(costs: CostModel, rivals: Iterable[Rival], *, group: str, name: str) -> list[Versus]:
    """Run `find_plan` once, and each rival."""
    found_s, found_search_s = _timed(lambda: find_plan(costs).best.step_s)
    every = []
    for rival in rivals:
        rival_s, rival_search_s = _timed(partial(_step_s, rival.plan, costs))
        versus = Versus(
            group=group,
            instance=name,
            rival=rival.name,
            rival_s=rival_s,
            found_s=found_s,
            rival_search_s=rival_search_s,
            found_search_s=found_search_s,
        )
        if versus.worse:
            progress(f"planners: {name}: {rival.name} takes {rival_s:.6g} s, found were {found_s:.6g} s")
        every.append(versus)
    return every


def _timed(step_s: Callable[[], float]) -> tuple[float, float]:
    """Return the seconds of the step that is found, infinite if none is, and of the search."""
    start = time.process_time()
    try:
        found_s = step_s()
    except InfeasibleError:
        found_s = math.inf
    return found_s, time.process_time() - start


def _step_s(plan: Planner, costs: CostModel) -> float:
    chosen = plan(costs)
    return math.inf if chosen is None else chosen.found.step_s


def _generated(count: int) -> Iterator[tuple[str, CostModel]]:
    for seed in range(count):
        rng = random.Random(f"planners {seed}")
        equal = seed % 2 == 0
        yield (
            f"seed {seed}",
            instance(
                rng,
                workers=rng.randint(1, 16),
                layers=rng.randint(1, 10),
                micro_batches=rng.randint(1, 24),
                kinds=1 if equal else rng.randint(2, 3),
                memory=rng.random() < 0.6,
            ),
        )


def _presets(models: Sequence[str], sizes: Sequence[int], losses: Sequence[int]) -> Iterator[tuple[str, CostModel]]:
    for model in models:
        for workers in sizes:
            for count in losses:
                if count < workers:
                    yield f"{model} on {workers - count}", preset_costs(model, workers, spread_losses(workers, count))


def _row(group: str, rival: str, every: Sequence[Versus]) -> tuple[str, str, str] | None:
    compared = [each for each in every if each.comparable]
    if not compared:
        return None
    theirs_ms = Spread(tuple(1000 * each.rival_search_s for each in compared))
    ours_ms = Spread(tuple(1000 * each.found_search_s for each in compared))
    worse = sum(each.worse for each in compared)
    return (
        f"step of {rival}, over ours, {group}",
        Spread(tuple(each.ratio for each in compared)).shown(),
        f"{worse} of {len(compared)} below 1; {len(every) - len(compared)} without a plan; "
        f"search ms {theirs_ms.shown(0)}, ours {ours_ms.shown(0)}",
    )
