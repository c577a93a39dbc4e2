"""Does training continue while plans change? Steps around joins, drains and better plans of emulated workers.

A run of a Llama 2 7B loses a worker, which is started again and joins; then a worker is drained. The runs with other
seeds lose and drain other workers. A step lasts from the commit before it to its own. Measured:

  around      the longest of the ten steps before each switch and of the ten after it, over their median; of steps with
              the same routes, without the one in which a worker was lost
  migrating   the median step while layers move, over that of the others with the same routes among the ten before
  migration   the time in which layers moved, over its prediction
  stall       from the last commit before a switch to the first operation after it, in seconds
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from benchmarks._chameleon import event_lines
from benchmarks._common import ROOT, Bar, Report, Spread, add_most_others, arguments, child, new_folder, write_config
from benchmarks._live_run import Tail, end
from benchmarks._neighbours import Neighbours, progress
from chameleon_ft.config import STAND_IN_JOB, Batch, Checkpoint, Emulation, Parallel, Recovery, RunConfig, Snapshots
from chameleon_ft.events.records import StepRecord
from chameleon_ft.launch.live_run import drain, inject
from chameleon_ft.storage.files import RunDirectory

_NEAR: Final = 10  # steps before and after a switch that are looked at
_LONGEST_RATIO, _MIGRATING_RATIO, _PREDICTION_ERROR = 1.05, 1.05, 0.15
_POLL_S: Final = 0.02
_ALWAYS: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Switch:
    """A switch to a plan, by the records of its run; `migrating` and `migration` are None if no layers moved."""

    trigger: str
    around: float
    stall_s: float
    migrating: float | None
    migration: float | None


def main() -> int:
    given = _arguments()
    neighbours = Neighbours(most=given.max_others)
    folder = new_folder(given.out)
    found: list[_Switch] = []
    for number in range(given.runs):
        progress(f"run {number + 1} of {given.runs}")
        measure = partial(_observed, _config(given), lost=7 * number % given.workers, timeout_s=given.timeout)
        found += neighbours.undisturbed(measure, folder / f"run-{number}")
    return _report(found, neighbours).emit(folder, as_json=given.json)


def _config(given: argparse.Namespace) -> RunConfig:
    return RunConfig(
        job=STAND_IN_JOB,
        device="emulated",
        profile=given.profile,
        workers=given.workers,
        steps=_ALWAYS,
        parallel=Parallel(dp=given.workers // 4, pp=4, split_backward=True, optimizer_redundancy="all"),
        batch=Batch(micro_batches=4 * given.workers, micro_batch_size=1),
        checkpoint=Checkpoint(every=0),
        snapshots=Snapshots(every=0),
        recovery=Recovery(
            policy="chameleon",
            respawn=True,
            respawn_delay_s=given.respawn_delay_s,
            max_respawns=_ALWAYS,
            worker_mtbf_hours=1e6,
            host_failure_fraction=0.0,
        ),
        emulation=Emulation(time_scale=given.time_scale),
    )


def _observed(config: RunConfig, folder: Path, *, lost: int, timeout_s: float) -> list[_Switch]:
    """Run `config` through a loss, the return of the worker and the drain of another; return its switches."""
    folder.mkdir(parents=True)
    run, file = RunDirectory(folder / "run"), write_config(config, folder / "config.toml")
    command = [sys.executable, "-m", "chameleon_ft", "train", str(file), "--output-dir", str(run.path)]
    with child(command, log=folder / "run.log") as process:
        live = _Live(Tail(run.metrics_file), Tail(run.events_file), timeout_s)
        live.wait(lambda: len(live.rows) > _NEAR + 2, "first steps")
        inject(run, worker=lost, kind="kill", phase=None, step=None)
        live.wait(lambda: lost in live.joined(), "return of the worker")
        live.more_steps(2 * _NEAR)
        drain(run, workers=[(lost + 5) % config.workers])
        live.wait(lambda: any(event["event"] == "drained" for event in live.events), "drain")
        live.more_steps(_NEAR + 2)
        end(process)
    directory = RunDirectory.open(run.path)
    return switches_of(directory.steps(), event_lines(directory))


@dataclass(slots=True)
class _Live:
    """The records of a live run so far."""

    metrics: Tail
    news: Tail
    timeout_s: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    def wait(self, is_so: Callable[[], bool], awaited: str) -> None:
        deadline = time.monotonic() + self.timeout_s
        while not is_so():
            if time.monotonic() > deadline:
                raise SystemExit(f"no {awaited} within {self.timeout_s:g} s (--timeout)")
            time.sleep(_POLL_S)
            self.rows.extend(self.metrics.new())
            self.events.extend(self.news.new())

    def joined(self) -> set[int]:
        return {worker for event in self.events if event["event"] == "join" for worker in event["workers"]}

    def more_steps(self, count: int) -> None:
        until = len(self.rows) + count
        self.wait(lambda: len(self.rows) >= until, f"{count} more steps")


def switches_of(rows: Sequence[StepRecord], events: Sequence[Mapping[str, Any]]) -> list[_Switch]:
    """Return the switches of a run, in their order. Steps are compared with others of the same routes only."""
    decisions = {event["generation"]: event for event in events if event["event"] == "decision"}
    failed = {step for event in events if event["event"] == "failure" for step in (event["step"], event["resume_step"])}
    routes: dict[int, int] = {}  # generation -> the one from which its routes are
    for plan in (event for event in events if event["event"] == "plan"):
        routes[plan["generation"]] = plan["generation"] if plan["policy"] != "migration" else routes[max(routes)]
    times = [(row.step, row.time) for row in rows]
    seconds = {step: at - before for (_, before), (step, at) in pairwise(times) if step not in failed}
    generations = {row.step: row.generation for row in rows}

    def steps_like(step: int, steps: Sequence[int]) -> list[int]:
        own = routes[generations[step]]
        return [each for each in steps if each in seconds and routes[generations[each]] == own]

    found = []
    for join in (event for event in events if event["event"] == "join" and not event["stop_s"]):
        chosen = decisions[join["generation"]]
        prediction = next(each for each in chosen["candidates"] if each["policy"] == chosen["chosen"])["migration_s"]
        resume = join["resume_step"]
        moved = [event["step"] for event in events if event["event"] == "migration" and event["step"] < resume]
        begin = moved[-1] if join["migrate_s"] else resume
        before = steps_like(resume - 1, range(begin - _NEAR, resume))
        after = steps_like(resume, range(resume, resume + _NEAR))
        moving = [step for step in before if step >= begin]
        still = [step for step in before if step not in moving]
        found.append(
            _Switch(
                trigger=chosen["trigger"],
                around=max(_longest(seconds, steps) for steps in (still, moving, after)),
                stall_s=join["stall_s"],
                migrating=_ratio(seconds, moving, still) if moving and still else None,
                migration=join["migrate_s"] / prediction if join["migrate_s"] and prediction else None,
            )
        )
    return found


def _longest(seconds: dict[int, float], steps: Sequence[int]) -> float:
    times = [seconds[step] for step in steps]
    return max(times) / statistics.median(times) if times else 1.0


def _ratio(seconds: dict[int, float], steps: Sequence[int], others: Sequence[int]) -> float:
    return statistics.median(seconds[step] for step in steps) / statistics.median(seconds[step] for step in others)


def _report(found: Sequence[_Switch], neighbours: Neighbours) -> Report:
    around = Spread(tuple(each.around for each in found))
    stalls = Spread(tuple(each.stall_s for each in found))
    migrating = Spread(tuple(each.migrating for each in found if each.migrating is not None))
    migration = Spread(tuple(each.migration for each in found if each.migration is not None))
    triggers = ", ".join(
        f"{trigger} {sum(each.trigger == trigger for each in found)}" for trigger in ("join", "drain", "review")
    )
    return Report(
        benchmark="switch",
        columns=("", "number", "median (least to largest)"),
        rows=(
            ("switches", str(len(found)), triggers),
            ("longest step near a switch, over the median", str(len(around.values)), around.shown()),
            ("stall, s", str(len(stalls.values)), stalls.shown()),
            ("step while layers move, over the step before", str(len(migrating.values)), migrating.shown()),
            ("time in which layers moved, over its prediction", str(len(migration.values)), migration.shown()),
        ),
        bars=(
            Bar(name="longest step near a switch, over the median", value=max(around.values), limit=_LONGEST_RATIO),
            Bar(name="step while layers move, over the step before", value=migrating.median, limit=_MIGRATING_RATIO),
            Bar(
                name="error of the predicted migration time",
                value=statistics.mean(abs(1 / each - 1) for each in migration.values),
                limit=_PREDICTION_ERROR,
            ),
        ),
        results={"switches": [repr(each) for each in found]},
        neighbours=neighbours,
    )


def _arguments() -> argparse.Namespace:
    parser = arguments(__doc__, name="switch")
    add_most_others(parser)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=32, help="a multiple of 4")
    parser.add_argument("--profile", type=Path, default=ROOT / "profiles" / "llama2-7b-h100-80g.json")
    parser.add_argument("--time-scale", type=float, default=2.0, help="seconds that a second of the profile takes")
    parser.add_argument("--respawn-delay-s", type=float, default=6.0)
    given = parser.parse_args()
    given.profile = given.profile.resolve()
    return given


if __name__ == "__main__":
    raise SystemExit(main())
