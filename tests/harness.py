"""Real runs for tests: small configurations, actions during a run, and assertions on its records."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Self
from unittest import mock

import psutil

from chameleon_ft.config import (
    Batch,
    Checkpoint,
    Data,
    Failure,
    FailureKind,
    FailurePhase,
    Health,
    LlamaConfig,
    Optimizer,
    Parallel,
    Preflight,
    Recovery,
    RunConfig,
    Snapshots,
    Timeouts,
    TrainConfig,
)
from chameleon_ft.coordinator.coordinator import Coordinator
from chameleon_ft.data.corpus import prepare_data
from chameleon_ft.events.kinds import CheckpointComplete
from chameleon_ft.events.lines import Record
from chameleon_ft.events.records import FailureRecord, StepRecord
from chameleon_ft.host.fork_server import Lifeline, end_with
from chameleon_ft.launch import background
from chameleon_ft.launch.agent import create_agent
from chameleon_ft.launch.coordinator import InterruptCount, coordinate
from chameleon_ft.launch.processes import start_fork_server
from chameleon_ft.protocol.address import CoordinatorAccess
from chameleon_ft.protocol.messages import Exit
from chameleon_ft.storage.files import ControlAddress, RunDirectory
from chameleon_ft.storage.plans import read_generation_plans
from chameleon_ft.storage.recorder import View
from chameleon_ft.verify.verification import TOLERANCES, Verification, repeat_run
from tests.backends import on_backend
from tests.forked import ForkedCommand
from tests.stored import event_lines
from tests.undivided import undivided

TEXT = "the quick brown fox jumps over the lazy dog, and then it does so once more\n" * 200

TOLERANCE = TOLERANCES["fp32"]  # relative, of every step's loss

PATIENT = Timeouts(
    heartbeat_timeout_s=10.0, watchdog_min_s=15.0, watchdog_factor=50.0, collective_timeout_s=60.0, rendezvous_s=90.0
)
"""Long timeouts, so that no worker is lost only because the machine is busy."""


SLOWED = float(os.environ.get("CHAMELEON_TEST_SLOWED", "1"))
"""How many times as long as usual every worker of `small_config` computes: tests hold at any pace of the machine."""


def _slowed(failures: Sequence[Failure], workers: int) -> tuple[Failure, ...]:
    """Return failures with which every worker is so much slower, from the start on."""
    every = (Failure(step=0, worker=worker, kind="slow", factor=1 / SLOWED) for worker in range(workers))
    own = (
        each.model_copy(update={"factor": each.factor / SLOWED}) if each.kind == "slow" and each.factor else each
        for each in failures
    )
    return *every, *own


def small_config(directory: Path, **changes: Any) -> TrainConfig:
    """Return a run of about a second: six workers in three pipelines of two stages; `changes` replace whole fields.

    Its checkpoints, snapshots and shared optimizer state have to be asked for.
    """
    text = directory / "text.txt"
    text.write_text(TEXT)
    fields: dict[str, Any] = {
        "workers": 6,
        "steps": 10,
        "seed": 3,
        "parallel": Parallel(dp=3, pp=2),
        "batch": Batch(micro_batches=6, micro_batch_size=2),
        "checkpoint": Checkpoint(every=0),
        "snapshots": Snapshots(every=0),
        "timeouts": PATIENT,
        "recovery": Recovery(policy="reroute"),
        "health": Health(detect_slow=False),  # all workers share few processors, often with other tests
        "preflight": Preflight(min_speed=0.0),  # likewise
        "model": LlamaConfig(dim=32, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=64, seq_len=32),
        "data": Data(path=str(text)),
        "optimizer": Optimizer(lr=1e-3, min_lr=1e-4, warmup_steps=2),
    }
    fields |= changes
    if SLOWED > 1:
        fields["failures"] = _slowed(fields.get("failures", ()), fields["workers"])
    return on_backend(TrainConfig(**{**fields, "parallel": undivided(fields["parallel"])}))


def train_job(job: str | Path, path: Path, *, view: View | None = None, **changes: Any) -> Ended:
    """Train a job of one's own as `train_here` does: on two pipelines of two stages, with long timeouts."""
    parallel = changes.get("parallel", Parallel(dp=2, pp=2))
    fields = {
        "job": str(job),
        "workers": parallel.dp * parallel.pp,
        "parallel": parallel,
        "batch": Batch(micro_batches=4, micro_batch_size=2),
        "timeouts": PATIENT,
        "health": Health(detect_slow=False),
        "preflight": Preflight(min_speed=0.0),
    }
    return train_here(RunConfig(**{**fields, **changes}), path, view=view)


def newest_child(launcher: Command) -> psutil.Process:
    """Return the coordinator of a launcher, once another one has been replaced."""
    return max(psutil.Process(launcher.pid).children(), key=psutil.Process.create_time)


def fails(worker: int, *, step: int, phase: FailurePhase = "forward", kind: FailureKind = "kill") -> Failure:
    """Return an injected failure."""
    return Failure(step=step, worker=worker, phase=phase, kind=kind)


@dataclass(frozen=True, slots=True)
class Ended:
    """A run that has ended."""

    code: int
    run: RunDirectory

    @property
    def summary(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self.run.summary_file.read_text())
        return data

    @property
    def failures(self) -> list[FailureRecord]:
        return self.run.failures()

    @property
    def lost(self) -> set[int]:
        """The workers that were lost."""
        return {failure.worker for failure in self.failures}

    @property
    def steps(self) -> list[int]:
        """The committed steps, in the order of their records."""
        return [record.step for record in self.run.steps()]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in event_lines(self.run) if event["event"] == name]

    def plans(self) -> list[dict[str, Any]]:
        """Return the plans of all generations, in order."""
        return [json.loads(plan.plan.to_json()) for plan in read_generation_plans(self.run.plans).values()]


@dataclass
class ScriptedView(View):
    """Calls functions when a step is committed, a failure is recorded or a checkpoint is complete; shows nothing."""

    at_step: Mapping[int, Callable[[], None]] = field(default_factory=dict)
    at_failure: Callable[[], None] | None = None
    at_first_checkpoint: Callable[[], None] | None = None
    done: set[int] = field(default_factory=set)

    def show(self, record: Record) -> None:
        match record:
            case StepRecord(step=step) if step in self.at_step and step not in self.done:
                self.done.add(step)
                self.at_step[step]()
            case FailureRecord() if self.at_failure is not None:
                self.at_failure()
            case CheckpointComplete() if self.at_first_checkpoint is not None:
                call, self.at_first_checkpoint = self.at_first_checkpoint, None
                call()


def create_run(config: RunConfig, path: Path) -> RunDirectory:
    """Make a run directory, with the data that the workers read."""
    run = RunDirectory.create(path, config)
    if isinstance(config, TrainConfig):
        prepare_data(config, run.path)
    return run


def train_here(config: RunConfig, path: Path, *, view: View | None = None) -> Ended:
    """Train with the coordinator and the agent in this process; all runs of a process share its fork server."""
    config = on_backend(config)
    run = create_run(config, path)
    return _train(run.own(config), run, resume=False, view=view)


def resume_here(ended: Ended, *, view: View | None = None, **changes: Any) -> Ended:
    """Resume a run as `--resume` does, with `changes` to its configuration."""
    values = {**ended.run.config().model_dump(exclude={"failures", "output_dir"}), **changes}
    config = type(ended.run.config()).model_validate(values).with_horizon_of(ended.run.config())
    return _train(config, ended.run, resume=True, view=view)


def _train(config: RunConfig, run: RunDirectory, *, resume: bool, view: View | None) -> Ended:
    before = set(_children())
    config = config.model_copy(update={"output_dir": run.path})
    with mock.patch.object(background, "_NICENESS", 0):  # ranks take all cores, so that decisions would wait for long
        code = coordinate(config, run=run, resume=resume, view=view or View(), beside=partial(_agent, config))
    left = [process for process in _children() if process not in before and not _is_server(process)]
    assert not left, f"the run has left processes behind: {left}"
    return Ended(code, run)


@cache
def _lifeline() -> Lifeline:
    """Return the lifeline of all ranks that agents in this process start: they end with it."""
    return Lifeline()


@asynccontextmanager
async def _agent(
    config: RunConfig, control: ControlAddress, coordinator: Coordinator, _: InterruptCount
) -> AsyncIterator[None]:
    """Run an agent in the event loop of the coordinator."""

    def fail(serving: asyncio.Task[Exit | None]) -> None:
        if not serving.cancelled() and (error := serving.exception()) is not None:
            coordinator.end("failed", f"the agent of this machine failed: {error}")

    agent = create_agent(
        CoordinatorAccess.of(control),
        workers=config.workers,
        lifeline=_lifeline().descriptor,
    )
    serving = asyncio.create_task(agent.serve())
    serving.add_done_callback(fail)
    try:
        yield
        await serving  # which ends every rank after the coordinator's exit message
    finally:
        serving.cancel()  # the coordinator has failed, and sends no such message
        agent.kill_all()


def _children() -> list[psutil.Process]:
    return list(psutil.Process().children(recursive=True))


def _is_server(process: psutil.Process) -> bool:
    """Return whether it is the fork server or the resource tracker, which are kept for all runs of this process."""
    try:
        is_tracker = "resource_tracker" in " ".join(process.cmdline())
        return process.parent() == psutil.Process() and (is_tracker or process.pid == start_fork_server().pid)
    except psutil.NoSuchProcess:
        return True


def assert_trained_as_if_nothing_failed(ended: Ended, *, repeated_steps: int = 0) -> None:
    """Check that all steps are committed, only expected samples are repeated, and every loss is the plain loop's."""
    config = ended.run.config()
    summary = ended.summary
    assert ended.code == 0, summary["reason"]
    assert summary["status"] == "finished"
    assert summary["steps"] == config.steps
    assert summary["samples_seen"] == config.batch.samples_before(config.steps)
    assert summary["samples_lost"] == 0
    assert summary["samples_repeated"] == repeated_steps * config.batch.samples
    assert not ended.events("refused"), "no connection was refused"
    assert_as_the_plain_loop(ended)


def assert_as_the_plain_loop(ended: Ended, *, steps: int | None = None) -> None:
    """Check the loss and gradient norm of every step, or of the first `steps`, against one plain loop.

    Over some hundred steps rounding errors grow beyond any useful tolerance.
    """
    tolerance = TOLERANCES[ended.run.config().precision]
    verification = Verification.of(repeat_run(ended.run, limit=steps), tolerance=tolerance)
    assert verification.first_step_outside is None, str(verification)
    assert (verification.max_relative_grad_norm_deviation or 0.0) < 10 * tolerance, str(verification)


def in_thread(function: Callable[[], object]) -> Callable[[], None]:
    """Return a function that runs `function` in a thread, in which it may wait for the coordinator of this process."""

    def start() -> None:
        threading.Thread(target=function, daemon=True).start()

    return start


_MAX_LINES = 5000


class Command:
    """A `chameleon` command in its own process and session.

    That process is forked from one that has loaded all modules, or starts an interpreter, which takes some seconds.

    Args:
        environ: changes to the environment.
        prefix: a command that executes it.
        network: namespace of the network in which it runs.
        own_interpreter: whether it starts an interpreter, as it always does with a prefix and with other paths of
            modules; None: not in a test.
    """

    def __init__(
        self,
        *arguments: str | int | Path,
        environ: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        network: str | None = None,
        own_interpreter: bool | None = None,
    ):
        words, changes = [*map(str, arguments)], environ or {}
        self._process: subprocess.Popen[str] | ForkedCommand
        if own_interpreter is None:
            own_interpreter = "PYTEST_CURRENT_TEST" not in os.environ
        if own_interpreter or prefix or "PYTHONPATH" in changes:
            inside = () if network is None else ("ip", "netns", "exec", network)
            self._process = subprocess.Popen(
                [*inside, *prefix, sys.executable, "-m", "chameleon_ft", *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, **changes},
                start_new_session=True,
                preexec_fn=partial(end_with, os.getpid()),
            )
        else:
            self._process = ForkedCommand(words, environ={**os.environ, **changes}, network=network)
        self.printed = ""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def read_until(self, pattern: str) -> re.Match[str]:
        """Read the output up to a line that matches `pattern`, which is one of the next `_MAX_LINES`."""
        for line in itertools.islice(self._lines(), _MAX_LINES):
            if (found := re.search(pattern, line)) is not None:
                return found
        raise AssertionError(f"the command has not printed {pattern!r}, but:\n{self.printed}")

    def wait(self) -> int:
        """Read the rest of the output and return the exit code, which is negative for a signal."""
        for _ in self._lines():
            pass
        return self._process.wait()

    def rest(self) -> str:
        """Wait for the end, and return all that it has printed."""
        self.wait()
        return self.printed

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def interrupt_all(self) -> None:
        """Send SIGINT to every process of the session, as a terminal does at Ctrl-C."""
        os.killpg(self.pid, signal.SIGINT)

    def session(self) -> list[psutil.Process]:
        """Return the live processes of the session."""
        return [process for process in psutil.process_iter() if _session_of(process) == self.pid]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.session():
            process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _lines(self) -> Iterator[str]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.printed += line
            yield line


def _session_of(process: psutil.Process) -> int | None:
    try:
        return None if process.status() == psutil.STATUS_ZOMBIE else os.getsid(process.pid)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return None


@contextmanager
def every_process_ends(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """Check that `processes` end by themselves after the block."""
    yield
    _, left = psutil.wait_procs(processes, timeout=30)
    for process in left:
        process.kill()
    assert not left, f"still there: {left}"
