"""Do snapshots save a run, and what do they cost?

Two parts; --parts picks some.

  losses   runs that lose all holders of a drawn layer at a drawn moment, without any checkpoint: in any phase of a
           step, or while a snapshot is under way. Layout, interval, copies or parity, and whether holders share the
           optimizer's state are drawn from --seed. Each run has to go back to a snapshot that was complete, by at most
           `snapshots.every` steps, and every loss has to be that of the plain loop.
  steps    runs without failures, eight workers on the model and the layout of the quick start: without snapshots, with
           the interval that the run chooses, and with one at most every ten steps. They alternate; a step is timed from
           one commit to the next.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any, Final, Literal

from benchmarks import _chameleon
from benchmarks._chameleon import event_lines
from benchmarks._common import Bar, Report, Spread, add_most_others, arguments, base_config, new_folder
from benchmarks._neighbours import Neighbours, progress
from chameleon_ft.config import Parallel, Recovery, Snapshots
from chameleon_ft.errors import ChameleonError
from chameleon_ft.events.lines import Record
from chameleon_ft.events.records import StepRecord
from chameleon_ft.launch.live_run import inject
from chameleon_ft.plan import data_pipeline_plan
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.recorder import View
from chameleon_ft.verify.verification import Verification, repeat_run
from tests.harness import Ended, fails, small_config, train_here

_PARTS: Final = ("losses", "steps")
_LAYERS: Final = 4  # of the model of the runs that lose workers
_STEPS: Final = 30
_COMPARED: Final = 30  # steps
_TOLERANCE: Final = 1e-5
_LARGEST_STALL_S: Final = 0.5
_LARGEST_RATIO: Final = 1.02
_LAYOUTS: Final = ((1, 3), (1, 4), (2, 2), (2, 3))


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A drawn run. `delay_s`: from the commit of `step` to the kill; None: while the next snapshot is under way."""

    dp: int
    pp: int
    every: int
    mode: Literal["copy", "parity"]
    redundancy: Literal["all"] | int
    layer: int
    step: int
    delay_s: float | None

    @classmethod
    def of(cls, random: Random, mode: Literal["copy", "parity"]) -> Draw:
        """Draw a run."""
        dp, pp = random.choice(_LAYOUTS)
        every = random.choice((2, 3, 5, 8))
        return cls(
            dp=dp,
            pp=pp,
            every=every,
            mode=mode,
            redundancy=random.choice(("all", 1)) if dp > 1 else "all",
            layer=random.randrange(_LAYERS),
            step=random.randrange(1, _STEPS - 10),
            delay_s=None if random.random() < 0.4 else random.uniform(0.0, 0.1),
        )

    @property
    def holders(self) -> tuple[int, ...]:
        """The workers that are killed."""
        plan = data_pipeline_plan(layer_costs=[1.0] * _LAYERS, dp=self.dp, pp=self.pp, micro_batches=6)
        return plan.placement.holders(self.layer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The result of a run; `problem` is empty if it passed. `stall_s` is without the transfer."""

    draw: Draw
    problem: str
    repeated_steps: int = 0
    stall_s: float = 0.0
    transfer_s: float = 0.0
    deviation: float = 0.0


@dataclass
class Killer(View):
    """Kills workers some time after the commit of a step."""

    run: RunDirectory
    draw: Draw
    is_done: bool = False

    def show(self, record: Record) -> None:
        if not isinstance(record, StepRecord) or self.is_done or self.draw.delay_s is None:
            return
        if record.step >= self.draw.step:
            self.is_done = True
            for worker in self.draw.holders:
                threading.Thread(target=self._kill, args=(worker, self.draw.delay_s), daemon=True).start()

    def _kill(self, worker: int, delay_s: float) -> None:
        time.sleep(delay_s)
        inject(self.run, worker=worker, kind="kill", phase=None, step=None)


def lose(draw: Draw, folder: Path) -> Loss:
    """Train a run, and check it."""
    folder.mkdir()
    under_way = draw.delay_s is None
    config = small_config(
        folder,
        workers=draw.dp * draw.pp,
        steps=_STEPS,
        parallel=Parallel(dp=draw.dp, pp=draw.pp, optimizer_redundancy=draw.redundancy),
        snapshots=Snapshots(every=draw.every, mode=draw.mode, group=2),
        recovery=Recovery(policy="reroute"),
        failures=[fails(worker, step=draw.step, phase="snapshot") for worker in draw.holders] if under_way else (),
    )
    path = folder / "run"
    try:
        ended = train_here(config, path, view=Killer(RunDirectory(path), draw))
        return _checked(draw, ended)
    except (AssertionError, ChameleonError, OSError) as error:
        return Loss(draw=draw, problem=f"{type(error).__name__}: {error}")


def _checked(draw: Draw, ended: Ended) -> Loss:
    if ended.code != 0:
        return Loss(draw=draw, problem=f"it ended: {ended.summary['reason']}")
    last = ended.failures[-1]
    verification = Verification.of(repeat_run(ended.run, limit=_COMPARED), tolerance=_TOLERANCE)
    reached = max(record.step for record in ended.run.steps() if record.time < _time_of(ended, last.generation)) + 1
    repeated = reached - last.resume_step
    problems = list(_problems(draw, ended, repeated))
    if verification.first_step_outside is not None:
        problems.append(str(verification))
    return Loss(
        draw=draw,
        problem="; ".join(problems),
        repeated_steps=repeated,
        stall_s=last.stall_s - last.transfer_s,
        transfer_s=last.transfer_s,
        deviation=verification.max_relative_loss_deviation,
    )


def _time_of(ended: Ended, generation: int) -> float:
    """Return when the plan of a generation was recorded."""
    return next(float(event["time"]) for event in ended.events("plan") if event["generation"] == generation)


def _problems(draw: Draw, ended: Ended, repeated: int) -> Iterator[str]:
    last = ended.failures[-1]
    if ended.lost != set(draw.holders):
        yield f"workers {sorted(ended.lost)} were lost instead of {draw.holders}"
    if last.policy != "snapshot":
        yield f"it did not go back to a snapshot: {last.action}"
    taken = {event["step"] for event in ended.events("snapshot") if event["time"] < _time_of(ended, last.generation)}
    if last.resume_step not in {0, *taken}:
        yield f"it went back to step {last.resume_step}, whose snapshot was not complete"
    if not 0 <= repeated <= draw.every:
        yield f"{repeated} steps were repeated, with a snapshot every {draw.every}"
    if any(event["step"] < _STEPS for event in ended.events("checkpoint")):
        yield "there was a checkpoint before the end"


# --- steps -----------------------------------------------------------------------------------------------------------

_SETTINGS: Final[dict[str, Snapshots]] = {
    "none": Snapshots(every=0),
    "auto": Snapshots(every="auto"),
    "every 10": Snapshots(every=10),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One run without failures."""

    steps_s: tuple[float, ...]
    snapshots: int
    held_up_s: float


def timed(given: argparse.Namespace, setting: str, path: Path) -> Timed:
    """Train a run, and return the times between its commits without those of the warm-up."""
    steps = given.warmup + given.steps + 1
    config = base_config(given.config, stamped=False, steps=steps, snapshots=_SETTINGS[setting])
    run = _chameleon.train(config, run=path, timeout_s=given.timeout)
    times = [record.time for record in run.steps()]
    taken = [event for event in event_lines(run) if event["event"] == "snapshot"]
    return Timed(
        steps_s=tuple(later - earlier for earlier, later in pairwise(times))[given.warmup :],
        snapshots=len(taken),
        held_up_s=sum(event["held_up_s"] for event in taken),
    )


@dataclass(slots=True)
class _Found:
    losses: list[Loss] = field(default_factory=list)
    timed: dict[str, list[Timed]] = field(default_factory=dict)


def main() -> int:
    given = _arguments()
    folder, neighbours, found = new_folder(given.out), Neighbours(most=given.max_others), _Found()
    if "losses" in given.parts:
        random = Random(given.seed)
        for number in range(given.runs):
            draw = Draw.of(random, "copy" if number % 2 == 0 else "parity")
            progress(f"run {number + 1} of {given.runs}: {draw}")
            found.losses.append(lose(draw, folder / f"loss-{number}"))
            if found.losses[-1].problem:
                progress(f"FAILED: {found.losses[-1].problem}")
    if "steps" in given.parts:
        found.timed = {setting: [] for setting in _SETTINGS}
        for number in range(given.rounds):
            # Each goes first in turn, so that none gains from slow changes of the machine.
            names = list(_SETTINGS)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                progress(f"round {number + 1} of {given.rounds}: {name}")
                measure = partial(timed, given, name)
                found.timed[name].append(neighbours.undisturbed(measure, folder / f"{name.replace(' ', '-')}-{number}"))
    return _report(found, neighbours).emit(folder, as_json=given.json)


def _arguments() -> argparse.Namespace:
    parser = arguments(__doc__, name="snapshots")
    add_most_others(parser)
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS, help="parts to measure")
    parser.add_argument("--runs", type=int, default=30, help="runs that lose all holders of a layer")
    parser.add_argument("--seed", type=int, default=1, help="seed of what is drawn")
    parser.add_argument("--rounds", type=int, default=6, help="runs with each interval")
    parser.add_argument("--steps", type=int, default=60, help="steps of a run that are timed")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them that are not")
    return parser.parse_args()


def _report(found: _Found, neighbours: Neighbours) -> Report:
    rows, bars, results = [], [], dict[str, Any]()
    for mode in ("copy", "parity"):
        own = [loss for loss in found.losses if loss.draw.mode == mode]
        if not own:
            continue
        passed = [loss for loss in own if not loss.problem]
        rows += list(_loss_rows(mode, passed, len(own)))
        bars.append(Bar(name=f"{mode}: runs that passed", value=len(passed) / len(own), limit=1.0, at_least=True))
        if passed:
            largest_s = max(loss.stall_s for loss in passed)
            bars.append(Bar(name=f"{mode}: longest stall without transfer, s", value=largest_s, limit=_LARGEST_STALL_S))
    results["losses"] = [asdict(loss) for loss in found.losses]
    if found.timed:
        plain = found.timed["none"]
        for name, runs in found.timed.items():
            steps = Spread(tuple(step for run in runs for step in run.steps_s))
            taken = sum(run.snapshots for run in runs)
            rows.append((f"steps, {name}: step, s", f"{len(steps.values)} steps, {taken} snapshots", steps.shown()))
            results[name] = {"step_s": steps.to_json(), "held_up_s": sum(run.held_up_s for run in runs)}
            if name == "none":
                continue
            ratios = Spread(tuple(mean(a.steps_s) / mean(b.steps_s) for a, b in zip(runs, plain, strict=True)))
            rows.append((f"steps, {name}: ratio of means of a round", f"{len(runs)} rounds", ratios.shown()))
            results[name]["ratio_by_round"] = ratios.to_json()
            bars.append(
                Bar(
                    name=f"{name}: median of the rounds' ratios of mean steps",
                    value=ratios.median,
                    limit=_LARGEST_RATIO,
                )
            )
    return Report(
        benchmark="snapshots",
        columns=("", "number", "median (least to largest)"),
        rows=tuple(rows),
        bars=tuple(bars),
        results=results,
        neighbours=neighbours if found.timed else None,
    )


def _loss_rows(mode: str, passed: Sequence[Loss], runs: int) -> Iterator[tuple[str, str, str]]:
    yield f"{mode}: passed", f"{runs} runs", str(len(passed))
    if passed:
        for name, values, digits in (
            ("steps repeated", [float(loss.repeated_steps) for loss in passed], 0),
            ("stall without transfer, s", [loss.stall_s for loss in passed], 3),
            ("transfer, s", [loss.transfer_s for loss in passed], 3),
        ):
            yield f"{mode}: {name}", f"{len(passed)} runs", Spread(tuple(values)).shown(digits)
        yield f"{mode}: largest deviation of a loss", f"{len(passed)} runs", f"{max(e.deviation for e in passed):.1e}"


if __name__ == "__main__":
    raise SystemExit(main())
