"""How does the control plane scale? The real coordinator with thousands of ranks that speak the protocol only.

`chameleon coordinator` runs as for a real run, with its journal and records. Two processes speak the protocol for all
agents and ranks, eight ranks to an agent (`_control_plane_ranks`): every peer has a control connection of its own, and
nothing is computed. They share the machine with the coordinator. For each number of ranks:

  joined      seconds from the first agent's connection until the last rank has its first orders
  heartbeats  share of a core that the coordinator uses while nothing but heartbeats happens
  step        processor seconds of the coordinator for the reports of one step by all ranks
  loss        seconds from the notice of the loss of a rank until the last survivor has its new orders, and processor
              seconds of the coordinator for it: survivors are told to stop, report that they have, and wait for the
              decision. Planning is included. The ranks are between two steps, and hand over no partial sums of an
              interrupted one; forming groups of tensors is not included. Before the next loss, the ranks switch to the
              plan in which all slices of the optimizer's state have as many owners again.
  takeover    seconds from the first rank that is taken back by a coordinator that replaces a killed one until the last
              one is; none may be lost
  memory      peak resident memory of the coordinator's process, and of its helper processes at the end

The policy is `reroute`, which decides in place; the search for a better plan that follows under other policies runs
during training, in a process of its own, and is measured by `search`.
"""

from __future__ import annotations

import argparse
import json
import math
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks._chameleon import event_lines
from benchmarks._common import (
    ROOT,
    Bar,
    Report,
    Spread,
    add_most_others,
    child,
    new_folder,
    report_arguments,
    worker_environment,
    write_config,
)
from benchmarks._control_plane_picture import draw
from benchmarks._neighbours import Neighbours, progress
from chameleon_ft.config import Batch, Checkpoint, Parallel, Recovery, RunConfig, load_config
from chameleon_ft.errors import ConfigError
from chameleon_ft.protocol.address import TOKEN_VARIABLE
from chameleon_ft.storage.files import RunDirectory

_STAGES: Final = 8
_PER_HOST: Final = 8
_PROCESSES: Final = 2
_TOKEN: Final = "control-plane"
_LONGEST_S: Final = 180.0
_STEPS: Final = 2
_APART: Final = 11  # pipelines between two losses
_BARS: Final = {"joined_s": {4096: 60.0}, "loss_s": {1024: 1.0, 4096: 4.0}, "heartbeats": {4096: 0.2}}
_MAX_MEMORY: Final = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The control plane of a run with so many ranks."""

    ranks: int
    joined_s: float
    heartbeats: float
    step_s: float
    losses: Spread
    loss_processor_s: float
    takeover_s: float
    peak_bytes: int
    helper_bytes: int

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "losses": self.losses.to_json()}


@dataclass(frozen=True, slots=True)
class _Told:
    """A message from a process that simulates ranks, and when it arrived, in monotonic seconds."""

    name: str
    about: int
    at_s: float


class _Ranks:
    """The processes that speak for agents and ranks."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        self._processes = processes
        self._told: queue.SimpleQueue[_Told | None] = queue.SimpleQueue()
        self._seen: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
        for process in processes:
            threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._told.put(_Told(*json.loads(line)))
        self._told.put(None)

    def last(self, name: str, about: int) -> float:
        """Return when the last process has told this."""
        return max(self._times(name, about, processes=len(self._processes)))

    def first(self, name: str, about: int) -> float:
        """Return when the first process has told this, once all have."""
        return min(self._times(name, about, processes=len(self._processes)))

    def next(self, name: str, after: int) -> int:
        """Return the next generation of which a process tells this: one may have been given up in between."""
        until_s = time.monotonic() + _LONGEST_S
        while not (begun := [about for told, about in self._seen if told == name and about > after]):
            self._hear(f"{name} after {after}", until_s)
        return min(begun)

    def _times(self, name: str, about: int, *, processes: int) -> list[float]:
        """Return when so many processes have told this; one may be ahead, and have told what comes later."""
        until_s = time.monotonic() + _LONGEST_S
        while len(found := self._seen.get((name, about), [])) < processes:
            self._hear(f"{name} {about}", until_s)
        return found

    def _hear(self, awaited: str, until_s: float) -> None:
        try:
            told = self._told.get(timeout=max(0.0, until_s - time.monotonic()))
        except queue.Empty:
            raise SystemExit(f"{awaited}: not all ranks have come so far within {_LONGEST_S:g} s") from None
        if told is None:
            raise SystemExit(f"{awaited}: a process of ranks has ended; see ranks-*.txt")
        self._seen[told.name, told.about].append(told.at_s)

    def step(self, number: int, *, switches: bool = False) -> None:
        """Have all ranks commit a step, and wait until they have; then all may switch to what they have prepared."""
        for process in self._processes:
            self._say(process, "step", number, switches)
        self.last("committed", number)

    def lose(self, worker: int) -> float:
        """End a rank; return when its agent noticed."""
        for process in self._processes:  # one of them has it; agents get the numbers of ranks in the order they join
            self._say(process, "lose", worker)
        return self._times("lost", worker, processes=1)[0]

    def _say(self, process: subprocess.Popen[str], *words: object) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(words) + "\n")
        process.stdin.flush()


def main() -> int:
    given = _arguments()
    folder = new_folder(given.out)
    neighbours = Neighbours(most=given.max_others)
    measured = []
    for ranks in given.ranks:
        progress(f"{ranks} ranks")
        one = partial(measure, ranks, losses=given.losses, heartbeats_s=given.heartbeats_s)
        measured.append(neighbours.undisturbed(one, folder / str(ranks)))
    if given.picture is not None:
        draw(given.picture, measured)
    report = Report(
        benchmark="control_plane",
        columns=(
            "ranks",
            "joined s",
            "loss s",
            "loss, processor s",
            "takeover s",
            "heartbeats, cores",
            "step, processor s",
            "peak MiB",
            "helpers MiB",
        ),
        rows=tuple(map(_row, measured)),
        bars=tuple(_bars(measured)),
        results={"measured": [each.to_json() for each in measured]},
        neighbours=neighbours,
    )
    return report.emit(folder, as_json=given.json)


def measure(ranks: int, folder: Path, *, losses: int, heartbeats_s: float) -> Measured:
    """Measure the control plane of a run with so many ranks, whose directory is then `folder / "run"`.

    Args:
        losses: ranks that are lost, one after the other.
        heartbeats_s: seconds for which heartbeats are measured.
    """
    folder.mkdir()
    run = RunDirectory(folder / "run")
    config = write_config(_config(ranks), folder / "config.toml")
    command = [sys.executable, "-m", "chameleon_ft", "coordinator", str(config), "--output-dir", str(run.path)]
    with ExitStack() as stack:
        log, token = folder / "coordinator.txt", {TOKEN_VARIABLE: _TOKEN}
        first = stack.enter_context(child(command, log=log, environment=token))
        coordinator = psutil.Process(first.pid)
        address = _address(run, coordinator)
        peers = _started(stack, address, ranks, folder)
        generation, begun_s = 1, peers.first("begun", 0)
        joined_s = peers.last("orders", generation) - begun_s
        peers.last("started", generation)
        _rest(coordinator)
        heartbeats = _share(coordinator, heartbeats_s)
        before_s = _processor_s(coordinator)
        for step in range(_STEPS):
            peers.step(step)
        _rest(coordinator)
        step_s = (_processor_s(coordinator) - before_s) / _STEPS
        losses_s, processor_s, step = [], [], _STEPS
        for number in range(losses):
            before_s = _processor_s(coordinator)
            noticed_s = peers.lose(number % _STAGES + number * _APART * _STAGES % ranks)
            generation = peers.next("orders", generation)
            losses_s.append(peers.last("orders", generation) - noticed_s)
            processor_s.append(_processor_s(coordinator) - before_s)
            peers.last("started", generation)
            peers.step(step)
            # Slices of the optimizer's state get the owners back that they have lost, while the ranks train.
            generation = peers.next("switching", generation)
            peers.last("switching", generation)
            peers.step(step + 1, switches=True)
            peers.last("started", generation)
            _rest(coordinator)
            step += 2
            progress(f"{ranks} ranks: loss {losses_s[-1]:.2f} s")
        helpers = sum(each.memory_info().rss for each in coordinator.children(recursive=True))
        peak = _peak_bytes(coordinator.pid)
        lost = _lost(run)
        first.kill()
        first.wait()
        stack.enter_context(child([*command[:4], "--take-over", str(run.path)], log=log, environment=token))
        takeover_s = peers.last("returned", 2) - peers.first("returning", 2)
        peers.step(step)
        if _lost(run) != lost:
            raise SystemExit(f"ranks were lost in the takeover; see {run.events_file}")
        progress(f"{ranks} ranks: takeover {takeover_s:.2f} s")
        return Measured(
            ranks=ranks,
            joined_s=joined_s,
            heartbeats=heartbeats,
            step_s=step_s,
            losses=Spread(tuple(losses_s)),
            loss_processor_s=statistics.median(processor_s),
            takeover_s=takeover_s,
            peak_bytes=peak,
            helper_bytes=helpers,
        )


def _lost(run: RunDirectory) -> list[int]:
    return [event["worker"] for event in event_lines(run) if event["event"] == "lost"]


def _config(ranks: int) -> RunConfig:
    config = load_config(ROOT / "examples" / "emulated.toml")
    return config.model_copy(
        update={
            "workers": ranks,
            "steps": 1_000_000,
            "profile": ROOT / "profiles" / "llama2-7b-h100-80g.json",
            "parallel": Parallel(dp=ranks // _STAGES, pp=_STAGES),
            "batch": Batch(micro_batches=ranks, micro_batch_size=1),
            "checkpoint": Checkpoint(every=0),
            "recovery": Recovery(policy="reroute"),
            "failures": (),
        }
    )


def _address(run: RunDirectory, coordinator: psutil.Process) -> str:
    """Return where the coordinator listens, once it does."""
    until_s = time.monotonic() + _LONGEST_S
    while time.monotonic() < until_s and coordinator.status() != psutil.STATUS_ZOMBIE:
        try:
            return run.read_control().address
        except ConfigError:
            time.sleep(0.05)
    raise SystemExit(f"the coordinator does not listen; see {run.path.parent / 'coordinator.txt'}")


def _started(stack: ExitStack, address: str, ranks: int, folder: Path) -> _Ranks:
    hosts, processes = ranks // _PER_HOST, []
    shares = [range(hosts * i // _PROCESSES, hosts * (i + 1) // _PROCESSES) for i in range(_PROCESSES)]
    for number, own in enumerate(shares):
        command = [sys.executable, "-m", "benchmarks._control_plane_ranks", "--address", address]
        command += ["--first", str(own.start), "--stop", str(own.stop), "--per-host", str(_PER_HOST)]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**worker_environment(), TOKEN_VARIABLE: _TOKEN},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stack.enter_context((folder / f"ranks-{number}.txt").open("w")),
            text=True,
        )
        stack.enter_context(process)
        stack.callback(process.kill)
        processes.append(process)
    return _Ranks(processes)


def _rest(coordinator: psutil.Process) -> None:
    """Wait until the coordinator has done what it has to do: it uses no more than for heartbeats."""
    least, until_s = math.inf, time.monotonic() + _LONGEST_S
    while time.monotonic() < until_s:
        share = _share(coordinator, 0.5)
        if share < 0.1 or (share < 0.7 and share > least * 0.9):
            return
        least = min(least, share)


def _share(coordinator: psutil.Process, seconds: float) -> float:
    before_s, begun_s = _processor_s(coordinator), time.monotonic()
    time.sleep(seconds)
    return (_processor_s(coordinator) - before_s) / (time.monotonic() - begun_s)


def _processor_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def _row(each: Measured) -> tuple[str, ...]:
    return (
        str(each.ranks),
        f"{each.joined_s:.1f}",
        each.losses.shown(2),
        f"{each.loss_processor_s:.2f}",
        f"{each.takeover_s:.1f}",
        f"{each.heartbeats:.3f}",
        f"{each.step_s:.2f}",
        f"{each.peak_bytes / 2**20:.0f}",
        f"{each.helper_bytes / 2**20:.0f}",
    )


def _bars(measured: Sequence[Measured]) -> Iterator[Bar]:
    for each in measured:
        values = {"joined_s": each.joined_s, "loss_s": each.losses.median, "heartbeats": each.heartbeats}
        for name, value in values.items():
            if (limit := _BARS[name].get(each.ranks)) is not None:
                yield Bar(name=f"{name} at {each.ranks} ranks", value=value, limit=limit)
        memory = each.peak_bytes + each.helper_bytes
        yield Bar(name=f"memory in MiB at {each.ranks} ranks", value=memory / 2**20, limit=_MAX_MEMORY / 2**20)
    least, most = min(measured, key=_ranks_of), max(measured, key=_ranks_of)
    if most.ranks > least.ranks:
        for name, growth in (
            ("joined", most.joined_s / least.joined_s),
            ("loss", most.losses.median / least.losses.median),
        ):
            name = f"growth of {name} from {least.ranks} to {most.ranks} ranks"
            yield Bar(name=name, value=growth, limit=most.ranks / least.ranks)


def _ranks_of(each: Measured) -> int:
    return each.ranks


def _multiple(text: str) -> int:
    ranks = int(text)
    if ranks < 2 * _STAGES * _PROCESSES or ranks % _STAGES:
        raise argparse.ArgumentTypeError(
            f"{ranks}: give a multiple of {_STAGES} that is at least {2 * _STAGES * _PROCESSES}"
        )
    return ranks


def _arguments() -> argparse.Namespace:
    parser = report_arguments(__doc__, name="control_plane")
    parser.add_argument("--ranks", nargs="+", type=_multiple, default=[256, 1024, 4096], help="numbers of ranks")
    parser.add_argument("--losses", type=int, default=5, help="ranks that are lost, one after the other")
    parser.add_argument("--heartbeats-s", type=float, default=20.0, help="seconds for which heartbeats are measured")
    parser.add_argument("--picture", type=Path, default=None, help="SVG or PNG file for the growth with the ranks")
    add_most_others(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
