"""Measure what the loss of the coordinator costs a run, at drawn moments.

Each run trains with a coordinator that is killed, or stopped and later continued, at a drawn moment:

  training    in any step
  checkpoint  within 0.1 s of the commit before a checkpoint
  worker      together with a worker
  recovery    within 0.5 s after the loss of a worker
  join        within 1 s after a worker that was started again is ready: it joins, and layers migrate to it

The launcher of `chameleon train` replaces it (--by launcher), or a coordinator that stands by at another address
(--by standby), where a stopped one is continued once the other leads. A run passes if it finishes, every step has one
line in metrics.jsonl with the loss of the plain loop, no worker is lost but the killed one, and no process is left.

Printed for each kind: the runs that passed, the seconds from the signal to the takeover (after a stop less the lease),
and of the steps within 2 s of the takeover the longest one over the median step, in runs that lost no worker. Beside it
is the longest of the steps in which the other checkpoints were written, because these are longer without a takeover.
Where a worker was lost together with the coordinator, it is the time from the takeover to the first commit without that
worker, less a median step.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import psutil

from benchmarks._chameleon import event_lines
from benchmarks._common import ROOT, markdown_table
from benchmarks._live_run import Tail
from benchmarks._neighbours import progress
from chameleon_ft.config import (
    Batch,
    Checkpoint,
    Control,
    Optimizer,
    Parallel,
    Recovery,
    RunConfig,
    Snapshots,
    config_to_toml,
    load_config,
)
from chameleon_ft.storage.files import FaultLog, RunDirectory
from chameleon_ft.verify.verification import Verification, repeat_run
from tests.harness import Command, small_config

_KINDS: Final = ("training", "checkpoint", "worker", "recovery", "join")
_LEASE_S: Final = 3.0
_NEAR_S: Final = 2.0
_POLL_S: Final = 0.005
_CHECKPOINT_EVERY: Final = 10
_LONGEST_S: Final = 240.0  # of a run
_COMPARED: Final = 60  # steps, after which rounding errors have grown


@dataclass(frozen=True, slots=True)
class Draw:
    """A drawn run: when its coordinator is lost, how, and which worker is lost as well."""

    kind: str
    by: str
    is_stopped: bool
    step: int
    delay_s: float
    worker: int

    @classmethod
    def of(cls, random: Random, kind: str, by: str, workers: int, steps: int) -> Draw:
        """Draw a run."""
        longest_s = {"checkpoint": 0.1, "recovery": 0.5, "join": 1.0}.get(kind, 0.05)
        is_stopped = by == "standby" and random.random() < 0.5
        step = random.randrange(5, steps // 3)
        return cls(kind, by, is_stopped, step, random.uniform(0.0, longest_s), random.randrange(workers))

    @property
    def loses_a_worker(self) -> bool:
        return self.kind in ("worker", "recovery", "join")


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a run; `problem` is empty if it passed."""

    draw: Draw
    problem: str
    takeover_s: float = 0.0
    longest: float | None = None  # step near the takeover, over the median
    others: float | None = None  # longest step that begins with another checkpoint, over the median
    recovered_s: float | None = None  # from the takeover to the first commit without the worker, less a median step


class _Experiment:
    """One run after the other, each in a folder of its own."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self._given = given
        self._folder = folder

    def run(self, number: int, draw: Draw) -> Result:
        """Train one run, and check it."""
        directory = self._folder / f"run-{number}"
        directory.mkdir()
        (directory / "config.toml").write_text(config_to_toml(self._config(directory, draw)))
        run = RunDirectory(directory / "run")
        with ExitStack() as stack:
            commands = self._start(stack, draw, directory, run)
            timer = threading.Timer(_LONGEST_S, _kill, [commands])
            stack.callback(timer.cancel)
            timer.start()
            try:
                problem = self._strike(draw, run, commands)
                codes = [command.wait() for command in commands]
                problem = problem or _problem(draw, run, commands, codes)
            except Exception as error:  # noqa: BLE001 - one run of many
                problem = f"{type(error).__name__}: {error}"
            for name, command in zip(("first", "second", "third"), commands, strict=False):
                (directory / f"{name}.txt").write_text(command.printed)
        if problem:
            return Result(draw, problem)
        return _measured(draw, run)

    def _config(self, directory: Path, draw: Draw) -> RunConfig:
        recovery = Recovery(respawn=draw.kind == "join", respawn_delay_s=0.2)
        common: dict[str, Any] = {
            "steps": self._given.steps,
            "checkpoint": Checkpoint(every=_CHECKPOINT_EVERY if draw.kind == "checkpoint" else 0),
            "snapshots": Snapshots(every=0),
            "recovery": recovery,
            "control": Control(lease_s=_LEASE_S),
        }
        if not self._given.emulated:
            parallel, batch = (
                Parallel(dp=2, pp=2, optimizer_redundancy="all"),
                Batch(micro_batches=8, micro_batch_size=4),
            )
            optimizer = Optimizer(lr=1e-3, min_lr=1e-4, warmup_steps=2)
            fields = {"workers": 4, "parallel": parallel, "batch": batch, "optimizer": optimizer, **common}
            return small_config(directory, **fields)
        config = load_config(ROOT / "examples" / "emulated.toml")
        parallel = Parallel(dp=self._given.emulated // 4, pp=4, optimizer_redundancy="all")
        batch = Batch(micro_batches=self._given.emulated, micro_batch_size=1)
        fields = {"workers": self._given.emulated, "parallel": parallel, "batch": batch, "failures": (), **common}
        return config.model_copy(update=fields)

    def _start(self, stack: ExitStack, draw: Draw, directory: Path, run: RunDirectory) -> list[Command]:
        """Start the processes of a run; the first one has the coordinator that is lost."""
        file, workers = directory / "config.toml", self._given.emulated or 4
        if draw.by == "launcher":
            return [stack.enter_context(Command("train", file, "--output-dir", run.path))]
        first = stack.enter_context(Command("coordinator", file, "--output-dir", run.path))
        first.read_until("waiting for")
        standby = Command("coordinator", "--standby", run.path, "--host", "127.0.0.2")
        stack.enter_context(standby)
        standby.read_until("standing by at")
        agent = stack.enter_context(Command("agent", "--run", run.path, "--workers", workers))
        return [first, standby, agent]

    def _strike(self, draw: Draw, run: RunDirectory, commands: list[Command]) -> str:
        """Wait for the moment of a draw, and lose the coordinator; return what went wrong."""
        rows, events, committed = Tail(run.metrics_file), Tail(run.events_file), -1
        step = draw.step
        if draw.kind == "checkpoint":
            step += _CHECKPOINT_EVERY - 1 - step % _CHECKPOINT_EVERY
        until_s = time.monotonic() + _LONGEST_S
        while committed < step:
            committed = max([committed, *(row["step"] for row in rows.new())])
            time.sleep(_POLL_S)
            if time.monotonic() > until_s or not commands[0].is_running:
                return f"step {step} was not reached"
        pid = run.read_control().pid
        lost = _worker(draw.worker, commands) if draw.loses_a_worker else None
        if lost is not None and draw.kind != "worker":
            _kill_worker(run, draw.worker, lost)
        if draw.kind == "join":
            while not any(event["event"] == "joined" for event in events.new()):
                time.sleep(_POLL_S)
                if time.monotonic() > until_s:
                    return "no worker has joined"
        time.sleep(draw.delay_s)
        (run.path.parent / "struck.txt").write_text(str(time.time()))
        os.kill(pid, signal.SIGSTOP if draw.is_stopped else signal.SIGKILL)
        if lost is not None and draw.kind == "worker":
            _kill_worker(run, draw.worker, lost)
        if draw.is_stopped:
            commands[1].read_until("took_over")
            os.kill(pid, signal.SIGCONT)
        return ""


def _worker(number: int, commands: list[Command]) -> psutil.Process:
    for command in commands:
        for process in command.session():
            with_log = Path(f"/proc/{process.pid}/fd/1")
            if with_log.exists() and with_log.readlink().name == f"worker-{number}.log":
                return process
    raise RuntimeError(f"worker {number} has no process")


def _kill_worker(run: RunDirectory, number: int, process: psutil.Process) -> None:
    FaultLog(run.faults_file).append(worker=number, kind="kill", phase=None, step=None)
    process.kill()


def _kill(commands: list[Command]) -> None:
    for command in commands:
        command.signal(signal.SIGKILL)


def _problem(draw: Draw, run: RunDirectory, commands: list[Command], codes: list[int]) -> str:
    """Return what is wrong with a run that has ended; empty if nothing is."""
    lost = {"launcher": [], "standby": [69 if draw.is_stopped else -signal.SIGKILL]}[draw.by]
    if codes != [*lost, *[0] * (len(codes) - len(lost))]:
        return f"exit codes {codes}"
    steps = [record.step for record in run.steps()]
    if steps != list(range(len(steps))) or len(steps) != run.config().steps:
        return f"{len(steps)} lines of steps, {len(set(steps))} of them different"
    verification = Verification.of(repeat_run(run, limit=_COMPARED), tolerance=1e-5)
    if verification.first_step_outside is not None:
        return str(verification)
    workers = [failure.worker for failure in run.failures()]
    if workers != ([draw.worker] if draw.loses_a_worker else []):
        return f"the workers {workers} were lost"
    left = [process for command in commands for process in command.session()]
    return f"{left} are left behind" if left else ""


def _measured(draw: Draw, run: RunDirectory) -> Result:
    struck_s = float((run.path.parent / "struck.txt").read_text())
    took_over_s = next(event["time"] for event in event_lines(run) if event["event"] == "took_over")
    takeover_s = took_over_s - struck_s - (_LEASE_S if draw.is_stopped else 0.0)
    steps = run.steps()
    median_s = statistics.median(each.step_s for each in steps)
    if draw.loses_a_worker:
        generation = run.failures()[0].generation
        until_commit_s = next(each.time for each in steps if each.generation >= generation) - took_over_s
        return Result(
            draw, "", takeover_s, recovered_s=max(0.0, until_commit_s - median_s) if draw.kind == "worker" else None
        )
    is_near = {each.step: struck_s - _NEAR_S <= each.time <= took_over_s + _NEAR_S for each in steps}
    near = [each.step_s for each in steps if is_near[each.step] and each.step > 2]
    others = [
        each.step_s
        for each in steps
        if draw.kind == "checkpoint" and each.step % _CHECKPOINT_EVERY == 0 and each.step > 0 and not is_near[each.step]
    ]
    longest, longest_other = (max(found) / median_s if found else None for found in (near, others))
    return Result(draw, "", takeover_s, longest, longest_other)


def main() -> int:
    """Run what the flags ask for; the exit code is 1 if any run did not pass."""
    given = _arguments()
    folder = Path(tempfile.mkdtemp(prefix="takeover-", dir=given.out))
    random, results = Random(given.seed), []
    kinds = [kind for kind in _KINDS if not given.kinds or kind in given.kinds]
    experiment = _Experiment(given, folder)
    for number in range(given.runs):
        by = given.by if given.by != "both" else ("launcher", "standby")[number // len(kinds) % 2]
        draw = Draw.of(random, kinds[number % len(kinds)], by, given.emulated or 4, given.steps)
        result = experiment.run(number, draw)
        results.append(result)
        how = "stopped" if draw.is_stopped else "killed"
        progress(f"run {number}: {draw.by}, {draw.kind}, {how} in step {draw.step}: {result.problem or 'passed'}")
    columns = ("coordinator", "runs", "passed", "takeover s", "longest step", "with other checkpoints", "recovered s")
    print(markdown_table(columns, _rows(results)))
    print(f"the runs are in {folder}")
    return int(any(result.problem for result in results))


def _rows(results: list[Result]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    groups = sorted({(each.draw.by, each.draw.kind, each.draw.is_stopped) for each in results})
    for by, kind, is_stopped in groups:
        own = [
            each for each in results if (each.draw.by, each.draw.kind, each.draw.is_stopped) == (by, kind, is_stopped)
        ]
        passed = [each for each in own if not each.problem]
        takeovers = [each.takeover_s for each in passed]
        longest = [each.longest for each in passed if each.longest is not None]
        others = [each.others for each in passed if each.others is not None]
        recovered = [each.recovered_s for each in passed if each.recovered_s is not None]
        rows.append(
            (
                f"{'stopped' if is_stopped else 'killed'} ({kind}), replaced by the {by}",
                str(len(own)),
                str(len(passed)),
                f"{statistics.median(takeovers):.2f}, at most {max(takeovers):.2f}" if takeovers else "-",
                f"{max(longest):.2f} of the median" if longest else "-",
                f"{max(others):.2f} of the median" if others else "-",
                f"{statistics.median(recovered):.2f}, at most {max(recovered):.2f}" if recovered else "-",
            )
        )
    return rows


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--by", choices=("launcher", "standby", "both"), default="both")
    parser.add_argument("--kinds", nargs="*", choices=_KINDS, default=())
    parser.add_argument("--emulated", type=int, default=0, help="emulated workers, a multiple of 4; 0: 4 real ones")
    parser.add_argument("--out", default=None, help="where to make the folder of the runs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
