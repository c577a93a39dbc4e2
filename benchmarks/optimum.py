"""How far from the best possible are the programs that run? Small rerouted plans beside the optimum of OR-tools CP-SAT.

The cases are drawn from a seed: two to four pipelines of two to four stages, unequal layers, one or two lost workers,
fused and split backward, messages that take time and such that take none, and limits on what a worker may keep. Each is
planned by `reroute` and scheduled by `best_program`, as a run would be. CP-SAT is given the same routes and times, all
of them whole numbers. It may let workers keep as much as `best_program` may: the limits given, not those chosen below
it, and where no limits are given what `best_program` promises, one pipeline depth more than the default. It need not
keep messages in order nor avoid deadlocks, as programs must, so that it can only be shorter than the best program,
never longer. Cases that it does not solve to optimality in time are counted and named, not compared.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from ortools.sat.python import cp_model

from benchmarks._common import Bar, Report, Spread, new_folder, report_arguments
from benchmarks._neighbours import progress
from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.plan import Plan, data_pipeline_plan
from chameleon_ft.recovery import reroute
from chameleon_ft.schedule import CostModel, InFlightLimit, OperationKind, best_program, check_program, default_limits
from chameleon_ft.workload import LayerCost, Workload
from tests.schedule.in_flight import exceeds

_LARGEST_GAP: Final = 0.03
_MIN_SOLVED: Final = 0.9

_Key = tuple[OperationKind, int, int]  # of an operation: kind, micro-batch, hop


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A rerouted plan with its costs, all whole numbers of seconds, and the in-flight limit of each worker."""

    name: str
    plan: Plan
    costs: CostModel
    in_flight_limits: Mapping[int, InFlightLimit] | None

    @property
    def limits(self) -> Mapping[int, InFlightLimit]:
        """Return the limits of each worker: the given ones, or the default limits of `best_program`."""
        if self.in_flight_limits is not None:
            return self.in_flight_limits
        return _raised(default_limits(self.plan), max(len(route.hops) for route in self.plan.routes))

    @property
    def operations(self) -> int:
        return sum(len(route.hops) for route in self.plan.routes) * (3 if self.plan.split_backward else 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A case with the time of its program, and the optimum if CP-SAT has proven it."""

    case: Case
    program_s: float
    optimum_s: int | None
    solved_in_s: float
    beyond_limits: bool

    @property
    def gap(self) -> float | None:
        """Relative excess of the program over the optimum."""
        return None if self.optimum_s is None else self.program_s / self.optimum_s - 1

    def to_json(self) -> dict[str, Any]:
        return {
            "case": self.case.name,
            "operations": self.case.operations,
            "program_s": self.program_s,
            "optimum_s": self.optimum_s,
            "gap": self.gap,
            "solved_in_s": self.solved_in_s,
        }


def cases(count: int, *, seed: int, max_operations: int) -> Iterator[Case]:
    """Draw `count` cases, deterministically."""
    rng = random.Random(seed)
    number = 0
    while number < count:
        case = _case(rng, number)
        if case is not None and case.operations <= max_operations:
            number += 1
            yield case


def _case(rng: random.Random, number: int) -> Case | None:
    """Return a case, or None if the losses leave layers without a holder."""
    dp, pp = rng.choice([2, 3, 3, 4]), rng.choice([2, 3, 3, 4])
    share = rng.randint(2, 5)
    lost = sorted(rng.sample(range(dp * pp), rng.choice([1, 1, 2])))
    split = rng.random() < 0.5
    latency_s = rng.choice([0, 0, 1, 3])
    extra = rng.choice([0, 1, None])
    costs = _costs(rng, pp, dp * share, dp * pp, latency_s)
    plan = data_pipeline_plan(
        layer_costs=costs.workload.layer_times_s,
        dp=dp,
        pp=pp,
        micro_batches=dp * share,
        split_backward=split,
    )
    if plan.placement.without(lost).unheld_layers:
        return None
    in_flight_limits = None if extra is None else _raised(default_limits(plan), extra)
    name = ", ".join(
        (
            f"{number}: {dp} x {pp}",
            f"{share} each",
            f"without {' and '.join(map(str, lost))}",
            "split" if split else "fused",
            f"messages {latency_s}",
            "no limits" if extra is None else f"1F1B + {extra}",
        )
    )
    return Case(
        name=name,
        plan=reroute(plan, lost, costs, in_flight_limits=in_flight_limits),
        costs=costs,
        in_flight_limits=in_flight_limits,
    )


def _costs(rng: random.Random, pp: int, micro_batches: int, workers: int, latency_s: int) -> CostModel:
    equal = rng.random() < 0.4
    first = _layer(rng)
    layers = tuple(first if equal else _layer(rng) for _ in range(pp + (0 if equal else rng.randint(0, 2))))
    link = Link(float(latency_s), float("inf"))
    # Some workers are slow; half the speed keeps all times whole.
    slow = rng.randrange(workers) if rng.random() < 0.2 else None
    crew = tuple(Worker(worker, "host", 0.5 if worker == slow else 1.0) for worker in range(workers))
    return CostModel(Workload(layers, micro_batches, 1, float(rng.choice([0, 0, 1]))), Cluster(crew, link, link))


def _layer(rng: random.Random) -> LayerCost:
    forward_s, input_s, weight_s = rng.randint(4, 12), rng.randint(4, 14), rng.randint(3, 12)
    # A fused backward may take less than its halves, and sometimes more.
    fused_s = rng.choice([None, None, input_s + weight_s - 2, input_s + weight_s + 1])
    return LayerCost(
        "layer", float(forward_s), float(input_s), float(weight_s), fused_backward_s=fused_s and float(fused_s)
    )


def _raised(limits: Mapping[int, InFlightLimit], extra: int) -> dict[int, InFlightLimit]:
    return {worker: InFlightLimit(limit.in_flight + extra, limit.kept + extra) for worker, limit in limits.items()}


def compared(case: Case, *, timeout_s: float, threads: int) -> Outcome:
    """Return the program of a run beside the optimum."""
    best = best_program(case.plan, case.costs, in_flight_limits=case.in_flight_limits)
    check_program(best.program, case.plan)
    start = time.monotonic()
    found = optimum_s(case, at_most_s=_whole(best.step_s), timeout_s=timeout_s, threads=threads)
    return Outcome(
        case=case,
        program_s=best.step_s,
        optimum_s=found,
        solved_in_s=time.monotonic() - start,
        beyond_limits=exceeds(best.program, case.limits),
    )


def optimum_s(case: Case, *, at_most_s: int, timeout_s: float, threads: int) -> int | None:
    """Return the least time of the case, or None if it is not proven in time.

    Raises RuntimeError if nothing takes `at_most_s` or less: then the model or the program that took it is wrong.
    """
    model = _Model(case, at_most_s)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = timeout_s
    solver.parameters.num_workers = threads
    status = solver.solve(model.cp)
    if status in (cp_model.INFEASIBLE, cp_model.MODEL_INVALID):
        raise RuntimeError(f"{case.name}: by the model nothing takes {at_most_s} s or less, but a program does")
    return round(solver.objective_value) if status == cp_model.OPTIMAL else None


class _Model:
    """The case as a CP-SAT model: an interval for each operation, and constraints between them."""

    def __init__(self, case: Case, horizon: int) -> None:
        self.cp = cp_model.CpModel()
        self._case = case
        self._horizon = horizon
        self._starts: dict[_Key, cp_model.IntVar] = {}
        self._durations: dict[_Key, int] = {}
        self._on_worker: dict[int, list[_Key]] = defaultdict(list)
        split = case.plan.split_backward
        self._turn = OperationKind.INPUT_GRAD if split else OperationKind.BACKWARD
        self._last = OperationKind.WEIGHT_GRAD if split else OperationKind.BACKWARD
        self._add_operations()
        self._add_order_of_tensors()
        self._add_workers()
        self._add_symmetry()
        end = self.cp.new_int_var(0, horizon, "end")
        for key in self._starts:
            self.cp.add(self._end(key) <= end)
        self.cp.minimize(end)

    def _add_operations(self) -> None:
        kinds = dict.fromkeys((OperationKind.FORWARD, self._turn, self._last))
        for route in self._case.plan.routes:
            for index, hop in enumerate(route.hops):
                for kind in kinds:
                    key = (kind, route.micro_batch, index)
                    self._durations[key] = _whole(self._case.costs.compute_s(hop.worker, kind, hop.layers))
                    self._starts[key] = self.cp.new_int_var(0, self._horizon, str(key))
                    self._on_worker[hop.worker].append(key)

    def _add_order_of_tensors(self) -> None:
        forward, turn = OperationKind.FORWARD, self._turn
        for route in self._case.plan.routes:
            m, last = route.micro_batch, len(route.hops) - 1
            for index, (hop, after) in enumerate(pairwise(route.hops)):
                num_bytes = self._case.costs.message_bytes(hop.layers.stop - 1)
                message_s = _whole(self._case.costs.message_s(hop.worker, after.worker, num_bytes))
                self._before((forward, m, index), (forward, m, index + 1), message_s)
                self._before((turn, m, index + 1), (turn, m, index), message_s)
            self._before((forward, m, last), (turn, m, last))
            if self._last is not turn:
                for index in range(last + 1):
                    self._before((turn, m, index), (self._last, m, index))

    def _add_workers(self) -> None:
        """Run one operation at a time, with no more micro-batches in flight than the limit."""
        limits = self._case.limits
        for worker, keys in self._on_worker.items():
            self.cp.add_no_overlap(
                self.cp.new_fixed_size_interval_var(self._starts[key], self._durations[key], str(key)) for key in keys
            )
            hops = [(m, hop) for kind, m, hop in keys if kind is OperationKind.FORWARD]
            self._keep(hops, self._turn, limits[worker].in_flight)
            if self._last is not self._turn:
                self._keep(hops, self._last, limits[worker].kept)

    def _keep(self, hops: list[tuple[int, int]], until: OperationKind, most: int) -> None:
        if most >= len(hops):
            return
        held = []
        for m, hop in hops:
            start, end = self._starts[OperationKind.FORWARD, m, hop], self._end((until, m, hop))
            size = self.cp.new_int_var(0, self._horizon, "")
            held.append(self.cp.new_interval_var(start, size, end, f"held {m}.{hop}"))
        self.cp.add_cumulative(held, [1] * len(held), most)

    def _add_symmetry(self) -> None:
        """Micro-batches of one route are alike, so the operations of one kind at one hop may be taken in their order:
        if they are sorted by time and dealt out anew, each still comes after what it needs.
        """
        alike: dict[object, list[int]] = defaultdict(list)
        for route in self._case.plan.routes:
            alike[route.hops].append(route.micro_batch)
        for kind, m, hop in self._starts:
            same = alike[self._case.plan.routes[m].hops]
            place = same.index(m)
            if place:
                self._before((kind, same[place - 1], hop), (kind, m, hop))

    def _end(self, key: _Key) -> cp_model.LinearExpr:
        return self._starts[key] + self._durations[key]

    def _before(self, one: _Key, other: _Key, message_s: int = 0) -> None:
        self.cp.add(self._end(one) + message_s <= self._starts[other])


def _whole(seconds: float) -> int:
    """Convert to int; times are whole here."""
    if seconds != int(seconds):
        raise ValueError(f"{seconds} s is not a whole number of seconds")
    return int(seconds)


def main() -> int:
    given = _arguments()
    folder = new_folder(given.out)
    outcomes: list[Outcome] = []
    for case in cases(given.count, seed=given.seed, max_operations=given.max_operations):
        outcome = compared(case, timeout_s=given.timeout, threads=given.threads)
        progress(f"{case.name}: {outcome.program_s:g} s, optimum {outcome.optimum_s}, {outcome.solved_in_s:.1f} s")
        outcomes.append(outcome)
    return _report(outcomes).emit(folder, as_json=given.json)


def _arguments() -> argparse.Namespace:
    parser = report_arguments(__doc__, name="optimum")
    parser.add_argument("--count", type=int, default=80, help="number of cases")
    parser.add_argument("--seed", type=int, default=0, help="from which they are drawn")
    parser.add_argument("--max-operations", type=int, default=160, help="larger cases are not drawn")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that CP-SAT may take for a case")
    parser.add_argument("--threads", type=int, default=2, help="threads of CP-SAT")
    return parser.parse_args()


def _report(outcomes: list[Outcome]) -> Report:
    solved = [(outcome.gap, outcome) for outcome in outcomes if outcome.gap is not None]
    if not solved:
        raise SystemExit("no case was solved to optimality; give CP-SAT a longer --timeout")
    gaps = Spread(tuple(gap for gap, _ in solved))
    mean = sum(gaps.values) / len(gaps.values)
    equal = sum(gap == 0 for gap in gaps.values)
    unsolved = [outcome.case.name for outcome in outcomes if outcome.gap is None]
    return Report(
        benchmark="optimum",
        columns=("case", "operations", "program, s", "optimum, s", "longer by", "solved in, s"),
        rows=(
            *(_row(outcome) for outcome in outcomes),
            (f"mean of {len(solved)} solved; {equal} are at the optimum", "", "", "", f"{mean:.2%}", ""),
        ),
        bars=(
            Bar(name="largest share by which a program is longer", value=max(gaps.values), limit=_LARGEST_GAP),
            Bar(
                name="share of cases solved to optimality",
                value=len(solved) / len(outcomes),
                limit=_MIN_SOLVED,
                at_least=True,
            ),
            Bar(
                name="programs beyond their limits",
                value=float(sum(outcome.beyond_limits for outcome in outcomes)),
                limit=0.0,
            ),
        ),
        results={
            "cases": [outcome.to_json() for outcome in outcomes],
            "gap": gaps.to_json(),
            "mean_gap": mean,
            "equal_to_optimum": equal,
            "solved": len(solved),
            "unsolved": unsolved,
        },
    )


def _row(outcome: Outcome) -> tuple[str, ...]:
    return (
        outcome.case.name,
        str(outcome.case.operations),
        f"{outcome.program_s:g}",
        "not solved" if outcome.optimum_s is None else str(outcome.optimum_s),
        "" if outcome.gap is None else f"{outcome.gap:.2%}",
        f"{outcome.solved_in_s:.1f}",
    )


if __name__ == "__main__":
    raise SystemExit(main())
