"""Runs that lose one worker after another at drawn moments, and the cost of each loss by the records of the run."""

from __future__ import annotations

import itertools
import json
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from benchmarks._chameleon import event_lines
from benchmarks._common import child, write_config
from benchmarks._live_run import Tail, end
from chameleon_ft.config import RunConfig
from chameleon_ft.events.records import FailureRecord, StepRecord
from chameleon_ft.launch.live_run import inject
from chameleon_ft.plan import LayerRange, Plan
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.plans import read_generation_plans

_Found = TypeVar("_Found")

_POLL_S: Final = 0.005
_RECENT: Final = 10  # steps whose median a run compares an interrupted step with


@dataclass(frozen=True, slots=True)
class Draw:
    """A loss: the worker, and the moment in a step as a share of its usual duration."""

    worker: int
    moment: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCost:
    """One loss, by the records of its run. Costs are in steps.

    Attributes:
        step: the interrupted step.
        moment: time from the commit before the loss to the loss, in median steps.
        step_s: median time between commits before the loss, under the plan that it ended.
        cost: time between the commits around the interrupted step, less `step_s`, over `step_s`.
        repeated: work that was repeated, by `step_s`.
        stall_s: from the loss to the first operation after it.
        moved_bytes: of the layers that moved during training after it.
        recorded: the cost that the run recorded; None if it recorded none.
        predicted: the cost that the run predicted; None if it predicted none.
        inconsistency: difference between `recorded` and its definition, by the rows of `metrics.jsonl`.
        is_salvaged: whether the step was completed, not repeated.
        is_first_layout: whether the loss ended a plan with the layout of the start.
        policy: what the plan after it was proposed by; `action` says it at length.
    """

    worker: int
    step: int
    moment: float
    step_s: float
    cost: float
    repeated: float
    stall_s: float
    moved_bytes: int
    recorded: float | None
    predicted: float | None
    inconsistency: float
    is_salvaged: bool
    is_first_layout: bool
    policy: str
    action: str

    @property
    def prediction_error(self) -> float | None:
        """Relative error of the predicted cost; None if there was no prediction, or nothing to compare it with."""
        if self.predicted is None or not self.recorded:
            return None
        return self.predicted / self.recorded - 1


def draws(seed: str, *, workers: int, count: int) -> tuple[Draw, ...]:
    """Draw losses; equal for equal seeds."""
    drawn = random.Random(seed)
    return tuple(Draw(drawn.randrange(workers), drawn.random()) for _ in range(count))


def observe(
    config: RunConfig, *, run: Path, losses: Sequence[Draw], settled: int, timeout_s: float
) -> tuple[LossCost, ...]:
    """Run `config` in the directory `run`, kill workers one after another, and return the costs in their order.

    Each loss waits until all workers take part in one plan and have committed `settled` steps under it. Exits if the
    run ends by itself.

    Args:
        timeout_s: longest wait for a loss and for the commit after it.
    """
    run.parent.mkdir(parents=True, exist_ok=True)
    file, log = write_config(config, run.with_suffix(".toml")), run.with_suffix(".log")
    directory = RunDirectory(run)
    with child(
        [sys.executable, "-m", "chameleon_ft", "train", str(file), "--output-dir", str(run)], log=log
    ) as process:
        live = _Live(directory, process, timeout_s)
        for number, loss in enumerate(losses):
            step_s = live.wait(partial(live.settled_step_s, config.workers, settled), "plan of all workers")
            time.sleep(max(0.0, live.commits[-1]["time"] + loss.moment * step_s - time.time()))
            inject(directory, worker=loss.worker, kind="kill", phase=None, step=None)
            live.wait(partial(live.costs_after, number), f"commit after loss {number + 1}")
        end(process)
    return costs_of(RunDirectory.open(run))


@dataclass(slots=True)
class _Live:
    """A live run, and the records read from it so far."""

    run: RunDirectory
    process: subprocess.Popen[bytes]
    timeout_s: float
    commits: list[dict[str, Any]] = field(default_factory=list)
    costs: int = 0
    _metrics: Tail = field(init=False)
    _events: Tail = field(init=False)

    def __post_init__(self) -> None:
        self._metrics, self._events = Tail(self.run.metrics_file), Tail(self.run.events_file)

    def wait(self, look: Callable[[], _Found | None], awaited: str) -> _Found:
        """Read new records until `look` returns something; exit if the run ends first or it takes too long."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            running = self.process.poll() is None
            self.commits.extend(self._metrics.new())
            self.costs += sum(event["event"] == "failure_cost" for event in self._events.new())
            if (found := look()) is not None:
                return found
            if not running:
                raise SystemExit(f"{self.run.path}: the run ended before the {awaited}; see its log beside it")
            if time.monotonic() > deadline:
                raise SystemExit(f"{self.run.path}: no {awaited} within {self.timeout_s:g} s (--timeout)")
            time.sleep(_POLL_S)

    def settled_step_s(self, workers: int, settled: int) -> float | None:
        """Return `settled_step_s` of the commits so far."""
        return settled_step_s(self.commits, workers, settled)

    def costs_after(self, number: int) -> int | None:
        """Return how many costs are recorded; None until there are more than `number`."""
        return self.costs if self.costs > number else None


def settled_step_s(commits: Sequence[Mapping[str, Any]], workers: int, settled: int) -> float | None:
    """Return the median time between the last commits; None until `settled` of them share a plan of all workers."""
    last = commits[-settled:]
    if len(last) < settled or any(row["workers"] != workers for row in last):
        return None
    if len({row["generation"] for row in last}) > 1:
        return None
    return _median_gap_s([row["time"] for row in last])


def costs_of(run: RunDirectory) -> tuple[LossCost, ...]:
    """Return the cost of each loss of a run whose interrupted step was committed, in their order."""
    rows, events = run.steps(), event_lines(run)
    recorded = {
        generation: event
        for event in events
        if event["event"] == "failure_cost"
        for generation in event["incident_generations"]
    }
    migrations = [event for event in events if event["event"] == "migration"]
    layouts = {number: _layout(each.plan) for number, each in read_generation_plans(run.plans).items()}
    failures = run.failures()
    completed = {(each.generation, each.resume_step) for each in failures if each.is_salvaged}
    found = []
    for failure in failures:
        before = [row for row in rows if row.generation < failure.generation]
        after = next((row for row in rows if row.generation >= failure.generation), None)
        if after is None:
            continue
        usual_s = [row.step_s for row in before if (row.generation, row.step) not in completed]
        found.append(
            _cost(
                failure,
                failed_at=failure.time - failure.stall_s,
                before=before,
                after=after,
                usual_s=statistics.median(usual_s[-_RECENT:]),
                recorded=recorded.get(failure.generation, {}),
                moved_bytes=sum(each["bytes"] for each in migrations if each["generation"] == failure.generation),
                is_first_layout=layouts.get(before[-1].generation) == layouts.get(before[0].generation),
            )
        )
    return tuple(found)


def _cost(
    failure: FailureRecord,
    *,
    failed_at: float,
    before: Sequence[StepRecord],
    after: StepRecord,
    usual_s: float,
    recorded: Mapping[str, Any],
    moved_bytes: int,
    is_first_layout: bool,
) -> LossCost:
    """Return the cost of a loss between the last row of `before` and `after`.

    Args:
        usual_s: median duration of the last steps as workers measured them, under whatever plan.
        recorded: the event with the recorded cost.
    """
    last = before[-1]
    alike = [row.time for row in before if row.generation == last.generation][-_RECENT - 1 :]
    step_s = _median_gap_s(alike)
    gap_s = after.time - last.time
    cost = recorded.get("failure_cost_steps")
    return LossCost(
        worker=failure.worker,
        step=failure.step,
        moment=(failed_at - last.time) / step_s,
        step_s=step_s,
        # A step that survivors have applied by the vote of a lost worker has no row, but took its time.
        cost=gap_s / step_s - (after.step - last.step),
        repeated=(failure.repeated_s or 0.0) / step_s,
        stall_s=failure.stall_s,
        moved_bytes=moved_bytes,
        recorded=cost,
        predicted=recorded.get("predicted_steps"),
        inconsistency=0.0 if cost is None else abs(cost - (gap_s / usual_s - 1)),
        is_salvaged=failure.is_salvaged,
        is_first_layout=is_first_layout,
        policy=failure.policy,
        action=failure.action,
    )


def _layout(plan: Plan) -> Counter[tuple[LayerRange, ...]]:
    """Return the micro-batches of each partition of the layers, whichever workers compute them."""
    return Counter(tuple(hop.layers for hop in route.hops) for route in plan.routes)


def _median_gap_s(times: Sequence[float]) -> float:
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(times))


def write_costs(costs: Sequence[LossCost], path: Path) -> None:
    """Write the costs of a run for `read_costs`."""
    path.write_text(json.dumps([asdict(each) for each in costs], indent=1) + "\n", encoding="utf-8")


def read_costs(path: Path) -> tuple[LossCost, ...]:
    """Read costs that `write_costs` wrote."""
    return tuple(LossCost(**each) for each in json.loads(path.read_text(encoding="utf-8")))
