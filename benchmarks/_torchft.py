"""Training under torchft: starting a lighthouse and its replicas, and reading their records."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from benchmarks._common import child, write_config
from benchmarks._stamped_job import read_stamps
from chameleon_ft.config import TrainConfig
from chameleon_ft.data.corpus import prepare_data
from chameleon_ft.storage.files import FaultLog

_OF_A_REPLICA = ("heartbeat_ms", "timeout_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Timeouts by which torchft detects lost replicas; None leaves its default."""

    heartbeat_ms: int | None = None
    """Interval of a replica's heartbeats."""
    timeout_ms: int | None = None
    """How long an operation of a replica may take, an all-reduce that waits for the others included."""
    heartbeat_timeout_ms: int | None = None
    """Silence after which the lighthouse takes a replica for lost."""
    join_timeout_ms: int | None = None
    """How long the lighthouse waits for replicas that live but have not asked for the next quorum."""
    quorum_tick_ms: int | None = None
    """How often the lighthouse looks."""

    def lighthouse_flags(self) -> list[str]:
        given = {name: value for name, value in asdict(self).items() if name not in _OF_A_REPLICA}
        return [f"--{name}={value}" for name, value in given.items() if value is not None]

    def replica_flags(self) -> list[str]:
        given = {name: value for name, value in asdict(self).items() if name in _OF_A_REPLICA}
        return [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]

    def __str__(self) -> str:
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return ", ".join(f"{name} {value}" for name, value in given.items()) or "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt of a replica at a step."""

    time: float
    step: int
    committed: bool
    participants: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """The recovery of torchft from a kill. Times are in seconds."""

    replica: int
    until_commit_s: float
    """From the kill to the first update after it."""
    lost_s: float
    """`until_commit_s` less one median step of the survivors."""
    step_after_s: float
    """Median step of the survivors."""


def train(
    config: TrainConfig,
    *,
    python: Path,
    out: Path,
    replicas: int,
    settings: Settings,
    timeout_s: float,
    kill: tuple[int, int] | None = None,
) -> int:
    """Train in the new directory `out` with a kill of (replica, step); return how many survivors reached the end."""
    out.mkdir(parents=True)
    prepare_data(config, out)
    file = write_config(config, out / "config.toml")
    port = _free_port()
    lighthouse = [str(python.with_name("torchft_lighthouse")), "--min_replicas=1", f"--bind=[::]:{port}"]
    environment = {"TORCHFT_LIGHTHOUSE": f"http://localhost:{port}", "RUST_LOG": "info"}
    with ExitStack() as stack:
        stack.enter_context(
            child([*lighthouse, *settings.lighthouse_flags()], log=out / "lighthouse.log", environment=environment)
        )
        _wait_for_port(port)
        processes = []
        for number in range(replicas):
            command = [str(python), "-m", "benchmarks._torchft_replica", "--config", str(file), "--out", str(out)]
            command += ["--replica", str(number), "--replicas", str(replicas), *settings.replica_flags()]
            if kill is not None and kill[0] == number:
                command += ["--kill-step", str(kill[1])]
            processes.append(
                stack.enter_context(child(command, log=out / f"replica-{number}.log", environment=environment))
            )
        survivors = [process for number, process in enumerate(processes) if kill is None or kill[0] != number]
        return _reached_the_end(survivors, timeout_s=timeout_s)


def attempts_of(out: Path, replica: int) -> list[Attempt]:
    """Return the attempts of a replica, in order."""
    file = out / f"replica-{replica}.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [Attempt(**json.loads(line)) for line in lines]


def exclusion_of(out: Path, *, replica: int) -> Exclusion | None:
    """Return the recovery of the run in `out` from the kill of `replica`; None if no step was made without it."""
    fault = FaultLog(out / "faults.jsonl").last(replica)
    if fault is None:
        raise SystemExit(f"{out}: the kill was not recorded")
    failed_at = float(fault["time"])
    updates: dict[int, float] = {}
    for stamp in read_stamps(out):
        if stamp.step is not None and stamp.time > failed_at and stamp.step >= fault["step"]:
            updates.setdefault(stamp.step, stamp.time)
    times = [updates[step] for step in sorted(updates)]
    if len(times) < 3:
        return None
    step_s = median(later - earlier for earlier, later in pairwise(times))
    return Exclusion(
        replica=replica,
        until_commit_s=times[0] - failed_at,
        lost_s=times[0] - failed_at - step_s,
        step_after_s=step_s,
    )


def together(out: Path, *, replica: int, replicas: int) -> bool:
    """Return whether all replicas made every step before the kill of `replica`, at once, and all survivors the last."""
    fault = FaultLog(out / "faults.jsonl").last(replica)
    if fault is None:
        return False
    attempts = {number: attempts_of(out, number) for number in range(replicas)}
    before = [attempt for found in attempts.values() for attempt in found if attempt.step < fault["step"]]
    last = [found[-1] for number, found in attempts.items() if number != replica and found]
    return all(attempt.committed and attempt.participants == replicas for attempt in before) and all(
        attempt.participants == replicas - 1 for attempt in last
    )


def _reached_the_end(processes: list[subprocess.Popen[bytes]], *, timeout_s: float) -> int:
    deadline = time.monotonic() + timeout_s
    good = 0
    for process in processes:
        try:
            good += process.wait(max(0.0, deadline - time.monotonic())) == 0
        except subprocess.TimeoutExpired:
            continue
    return good


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for_port(port: int, *, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection(("localhost", port), timeout=1.0).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return
