"""The comparison of the paper (arXiv 2508.21613), simulated: 32 accelerators that fail one after the other.

    python -m benchmarks.paper

writes the tables of docs/paper.md and its picture anew; with `--programs own` or `--programs ours` only those of one
half. Single workers are lost at even intervals, drawn by the seed; none comes back, or each two and a half intervals
later. Decisions are those of the runtime.

Chameleon begins with the fastest plan that a search finds. Each rival is simulated from that plan, from equal
pipelines of every depth that fits (`equal_layouts`) and from the plan that Oobleck chooses. The start with most samples
in the end counts, because a fast plan may be expensive to reroute. With `own` programs all starts have fused backward
and 1F1B, as the rivals' systems do; with `ours` they have split backward and `best_program`.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Final

from benchmarks._paper_picture import draw
from chameleon_ft.cost.presets import device, model_shape
from chameleon_ft.cost.profile import derived_profile
from chameleon_ft.lab.oobleck import oobleck_plan
from chameleon_ft.lab.planned_layouts import equal_layouts
from chameleon_ft.plan import Plan
from chameleon_ft.schedule import CostModel, InFlightLimit, default_limits
from chameleon_ft.search import find_plan
from chameleon_ft.simulate import Trace
from chameleon_ft.simulate.parameters import Parameters
from chameleon_ft.simulate.results import PolicyResult
from chameleon_ft.simulate.run import simulate
from chameleon_ft.simulate.traces.trace import Fault

_ROOT: Final = Path(__file__).resolve().parent.parent
_MODEL, _DEVICE = "llama2-7b", "h100-80g"
_WORKERS, _PER_HOST, _MICRO_BATCHES = 32, 8, 128
_POLICIES: Final = {
    "own": ("chameleon", "oobleck", "recycle", "reroute", "paper"),
    "ours": ("chameleon", "oobleck", "recycle", "paper"),
}
"""Programs of the rivals. `reroute` with their own is ReCycle without its decoupled backward."""
_LOSSES: Final = 6
_INTERVALS_S: Final = {"10 minutes": 600.0, "1 hour": 3_600.0, "6 hours": 21_600.0}
_BACK_AFTER: Final = 2.5  # intervals
_CASES: Final = (*((interval, False) for interval in _INTERVALS_S), ("1 hour", True))
"""Interval between losses, and whether workers come back."""
_PUBLISHED: Final = {"oobleck": 1.229, "recycle": 1.355}
_PUBLISHED_LOSS: Final = 0.1100


@dataclass(frozen=True, slots=True)
class Found:
    """The results of all policies on one trace.

    Attributes:
        programs: "own" or "ours": the programs of the rivals.
        interval: description of the time between two losses.
        returns: whether workers come back.
        seed: of the lost workers.
        after: policy -> throughput of the plan after each loss, relative to the failure-free one.
        average: policy -> samples per second, relative to the failure-free ones.
        checkpoints: policy -> number of returns to a checkpoint.
    """

    programs: str
    interval: str
    returns: bool
    seed: int
    after: dict[str, list[float]]
    average: dict[str, float]
    checkpoints: dict[str, int]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="draws of the workers that are lost")
    parser.add_argument("--programs", choices=list(_POLICIES), nargs="+", default=list(_POLICIES), help="of the rivals")
    parser.add_argument("--page", type=Path, default=_ROOT / "docs" / "paper.md", help="page with the tables")
    parser.add_argument("--pictures", type=Path, default=_ROOT / "docs" / "pictures", help="folder for the pictures")
    parser.add_argument("--intervals", choices=list(_INTERVALS_S), nargs="+", default=list(_INTERVALS_S))
    given = parser.parse_args()
    text = given.page.read_text(encoding="utf-8")
    by_programs = {
        programs: [
            _simulated(programs, interval, seed, returns=returns)
            for seed in range(given.seeds)
            for interval, returns in _CASES
            if interval in given.intervals
        ]
        for programs in given.programs
    }
    for programs, found in by_programs.items():
        for name, lines in (("after", _after_table(found)), ("average", _average_table(found))):
            text = _replaced(text, f"{name}, {programs}", lines)
    given.page.write_text(text, encoding="utf-8")
    for programs, found in by_programs.items():
        draw(
            given.pictures / f"paper-{programs}.svg",
            after=_after(found),
            ratios=_ratios(found),
            published=_PUBLISHED,
            published_loss=_PUBLISHED_LOSS,
        )
    return 0


def _trace(interval_s: float, seed: int, *, returns: bool) -> Trace:
    lost = random.Random(f"paper {seed}").sample(range(_WORKERS), _LOSSES)
    faults = [
        Fault((worker,), number * interval_s, (number + _BACK_AFTER) * interval_s if returns else math.inf)
        for number, worker in enumerate(lost, start=1)
    ]
    duration_s = (_LOSSES + 1) * interval_s
    return Trace.from_faults(faults, workers=_WORKERS, duration_s=duration_s, workers_per_host=_PER_HOST)


def _simulated(programs: str, interval: str, seed: int, *, returns: bool) -> Found:
    profile = derived_profile(model_shape(_MODEL), device(_DEVICE), micro_batch_size=1)
    hosts = {worker: f"host{worker // _PER_HOST}" for worker in range(_WORKERS)}
    interval_s = _INTERVALS_S[interval]
    # All policies know the rate of failures as if from long observation. A return to a checkpoint, which only Oobleck
    # needs when none of its templates fits the memory, is charged at most a minute of work and no restart.
    parameters = Parameters(
        worker_mtbf_s=_WORKERS * interval_s,
        prior_failures=10.0,
        host_failure_fraction=0.0,
        restart_cost_s=0.0,
        checkpoint_interval_s=60.0,
        checkpoint_write_s=0.0,
    )
    trace = _trace(interval_s, seed, returns=returns)
    costs = CostModel(profile.workload(_MICRO_BATCHES), profile.cluster(hosts))
    run = partial(simulate, trace, costs.workload, costs.cluster, parameters=parameters)
    chameleon, *rivals = _POLICIES[programs]
    results = dict(run((chameleon,)).policies)
    failure_free = results[chameleon].failure_free_samples / trace.duration_s
    for plan, in_flight_limits in _starts(programs, costs):
        for name, own in run(rivals, start=plan, in_flight_limits=in_flight_limits).policies.items():
            results[name] = max(results.get(name, own), own, key=lambda each: each.goodput)
    print(
        f"{programs}, {interval}, seed {seed}, {'back again' if returns else 'for good'}", file=sys.stderr, flush=True
    )
    return Found(
        programs,
        interval,
        returns,
        seed,
        {name: _after_each(own, trace, interval_s, failure_free) for name, own in results.items()},
        {name: own.goodput / failure_free for name, own in results.items()},
        {name: own.decisions_by_kind.get("checkpoint", 0) for name, own in results.items()},
    )


@cache
def _starts(programs: str, costs: CostModel) -> list[tuple[Plan, Mapping[int, InFlightLimit]]]:
    """Return the starts of the rivals, each with the limits of its workers."""
    split = programs == "ours"
    found = equal_layouts(costs, split_backward=split)
    if (chosen := oobleck_plan(costs, split_backward=split)) is not None:
        found.append(chosen.found)
    fastest = find_plan(costs).best
    starts: dict[Plan, Mapping[int, InFlightLimit]] = {each.plan: each.in_flight_limits for each in found}
    if split:
        starts.setdefault(fastest.plan, fastest.in_flight_limits)
    else:
        plan = replace(fastest.plan, split_backward=False)
        limits = default_limits(plan)
        starts.setdefault(plan, {w: InFlightLimit(limit.in_flight, limit.in_flight) for w, limit in limits.items()})
    return list(starts.items())


def _after_each(own: PolicyResult, trace: Trace, interval_s: float, failure_free: float) -> list[float]:
    """Return the throughput just before the next loss, relative to the failure-free one."""
    ends_s = [(number + 1) * interval_s * (1 - 1e-9) for number in range(1, _LOSSES + 1)]
    return [_at(own, min(end_s, trace.duration_s)) / failure_free for end_s in ends_s]


def _at(own: PolicyResult, time_s: float) -> float:
    return next((each.samples_per_s for each in reversed(own.timeline) if each.time_s <= time_s), 0.0)


def _after(found: Sequence[Found]) -> dict[str, list[list[float]]]:
    """Return policy -> for each number of lost workers the values of all seeds, at the longest interval."""
    longest = max((each.interval for each in found), key=_INTERVALS_S.__getitem__)
    chosen = [each for each in found if not each.returns and each.interval == longest]
    return {
        policy: [list(values) for values in zip(*(each.after[policy] for each in chosen), strict=True)]
        for policy in found[0].average
    }


def _ratios(found: Sequence[Found]) -> dict[tuple[str, bool], dict[str, list[float]]]:
    """Return (interval, whether workers return) -> baseline -> Chameleon's average throughput / its, by seed."""
    return {
        (interval, returns): {
            policy: [
                each.average["chameleon"] / each.average[policy]
                for each in found
                if (each.interval, each.returns) == (interval, returns)
            ]
            for policy in list(found[0].average)[1:]
        }
        for interval, returns in dict.fromkeys((each.interval, each.returns) for each in found)
    }


def _after_table(found: Sequence[Found]) -> Iterable[str]:
    after = _after(found)
    yield "| lost of 32 | live share | " + " | ".join(f"`{policy}`" for policy in after) + " |"
    yield "|" + "---|" * (len(after) + 2)
    for index in range(_LOSSES):
        cells = [_spread(after[policy][index], "{:.1%}") for policy in after]
        yield f"| {index + 1} | {1 - (index + 1) / _WORKERS:.1%} | " + " | ".join(cells) + " |"


def _average_table(found: Sequence[Found]) -> Iterable[str]:
    chameleon, *rivals = found[0].average
    yield (
        f"| a loss every | workers | `{chameleon}`, of failure-free | "
        + " | ".join(f"by `{policy}`'s" for policy in rivals)
        + " | returns to a checkpoint |"
    )
    yield "|" + "---|" * (len(rivals) + 4)
    for (interval, returns), ratios in _ratios(found).items():
        chosen = [each for each in found if (each.interval, each.returns) == (interval, returns)]
        share = _spread([each.average[chameleon] for each in chosen], "{:.1%}")
        cells = [_spread(ratios[policy], "{:.3f}") for policy in rivals]
        gone = {policy: sum(each.checkpoints[policy] for each in chosen) for policy in (chameleon, *rivals)}
        returned = ", ".join(f"{policy} {count}" for policy, count in gone.items() if count) or "none"
        kind = "back after 2.5 intervals" if returns else "lost for good"
        yield f"| {interval} | {kind} | {share} | " + " | ".join(cells) + f" | {returned} |"


def _spread(values: Sequence[float], form: str) -> str:
    """Return the mean, and the extremes if they differ."""
    mean, least, most = (form.format(value) for value in (statistics.fmean(values), min(values), max(values)))
    return mean if least == most else f"{mean} ({least} to {most})"


def _replaced(text: str, name: str, lines: Iterable[str]) -> str:
    before, begin, rest = text.partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    if not begin or not end:
        raise SystemExit(f"the page has no place for the table {name!r}")
    return before + begin + "\n".join(lines) + "\n" + end + after


if __name__ == "__main__":
    raise SystemExit(main())
