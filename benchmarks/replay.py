"""How long does a prediction take? The replay of programs, and the other computations for every considered plan.

Two programs, each with fused and with split backward: one pipeline of 16 stages with 64 micro-batches, and 8 pipelines
of 4 stages with 128 micro-batches in all, with some workers lost and their share detoured. Costs are those of Llama 2
13B on H100s, derived, so stages are unequal and messages take time. Replays share no results. The replay has bars; the
choice of the program, its check and its memory are reported for information.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks._common import Bar, Report, Spread, add_most_others, new_folder, report_arguments
from benchmarks._neighbours import Neighbours, progress
from chameleon_ft.cost.derive import derive_workload
from chameleon_ft.cost.memory import program_memory
from chameleon_ft.cost.presets import device, model_shape
from chameleon_ft.plan import Plan, data_pipeline_plan
from chameleon_ft.recovery import reroute
from chameleon_ft.schedule import CostModel, best_program, check_program, replay

_MS: Final = 1000
_QUICK_EFFORT: Final = 1_000  # one or two list schedules of a pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A plan whose program is replayed, and the limit of the time in milliseconds."""

    name: str
    plan: Plan
    costs: CostModel
    limit_ms: float


def main() -> int:
    given = _arguments()
    neighbours = Neighbours(most=given.max_others)
    folder = new_folder(given.out)
    found: list[tuple[Subject, str, Spread]] = []
    for subject in subjects(given.lost):
        for what, calls, action in _actions(subject, given.repeats):
            progress(f"{subject.name}: {what}")
            measure = partial(_times_ms, action, calls)
            found.append((subject, what, neighbours.undisturbed(measure, folder / what)))
    return _report(found, neighbours).emit(folder, as_json=given.json)


def _arguments() -> argparse.Namespace:
    parser = report_arguments(__doc__, name="replay")
    add_most_others(parser)
    parser.add_argument("--repeats", type=int, default=200, help="replays of each program; of the rest, a tenth")
    parser.add_argument(
        "--lost", type=int, nargs="+", default=[0, 5, 10, 23], help="workers of the 8 x 4 that are lost"
    )
    return parser.parse_args()


def subjects(lost: list[int]) -> list[Subject]:
    """Return the plans to time."""
    found = []
    for split_backward in (False, True):
        backward = "split" if split_backward else "fused"
        deep, costs = _planned(dp=1, pp=16, micro_batches=64, split_backward=split_backward)
        found.append(Subject(name=f"16 stages x 64, {backward}", plan=deep, costs=costs, limit_ms=5.0))
        wide, costs = _planned(dp=8, pp=4, micro_batches=128, split_backward=split_backward)
        wide = reroute(wide, lost, costs)
        name = f"32 workers x 128, {len(lost)} lost, {backward}"
        found.append(Subject(name=name, plan=wide, costs=costs, limit_ms=15.0))
    return found


def _planned(*, dp: int, pp: int, micro_batches: int, split_backward: bool) -> tuple[Plan, CostModel]:
    rates = device("h100-80g")
    workload = derive_workload(model_shape("llama2-13b"), rates, micro_batch_size=1, micro_batches=micro_batches)
    plan = data_pipeline_plan(
        layer_costs=workload.layer_times_s,
        dp=dp,
        pp=pp,
        micro_batches=micro_batches,
        split_backward=split_backward,
    )
    return plan, CostModel(workload, rates.cluster(dp * pp))


def _actions(subject: Subject, repeats: int) -> list[tuple[str, int, Callable[[], object]]]:
    """Return the name, the number of calls and the function of each timed computation."""
    plan, costs = subject.plan, subject.costs
    program = best_program(plan, costs).program
    fewer = max(3, repeats // 10)
    return [
        ("replay", repeats, lambda: replay(program, costs)),
        ("best_program", fewer, lambda: best_program(plan, costs)),
        ("best_program, quick", fewer, lambda: best_program(plan, costs, effort=_QUICK_EFFORT)),
        ("check_program", fewer, lambda: check_program(program, plan)),
        ("program_memory", fewer, lambda: program_memory(program, plan.placement, costs.workload)),
    ]


def _times_ms(action: Callable[[], object], calls: int, _: Path) -> Spread:
    """Return the milliseconds of each of `calls` calls; nothing is written."""
    action()
    times: list[float] = []
    for _call in range(calls):
        start = time.perf_counter()
        action()
        times.append((time.perf_counter() - start) * _MS)
    return Spread(tuple(times))


def _report(found: list[tuple[Subject, str, Spread]], neighbours: Neighbours) -> Report:
    return Report(
        benchmark="replay",
        columns=("program", "what", "calls", "ms: median (least to largest)"),
        rows=tuple((subject.name, what, str(len(spread.values)), spread.shown(2)) for subject, what, spread in found),
        bars=tuple(
            Bar(name=f"replay of {subject.name}, ms", value=spread.median, limit=subject.limit_ms)
            for subject, what, spread in found
            if what == "replay"
        ),
        results={"times_ms": [_json(subject, what, spread) for subject, what, spread in found]},
        neighbours=neighbours,
    )


def _json(subject: Subject, what: str, spread: Spread) -> dict[str, Any]:
    return {"program": subject.name, "what": what, **spread.to_json()}


if __name__ == "__main__":
    raise SystemExit(main())
