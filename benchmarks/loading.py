"""Does training wait for its samples? And for how long, when the process that reads a stream is lost, or its worker?

Samples of 20 ms of processor time each are read by two loaders, in turn with a plain loop over a DataLoader of two
workers. Of a stream, the reading process and then the worker that it belongs to are killed.
"""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import psutil

from benchmarks._chameleon import train
from benchmarks._common import Bar, Report, Spread, new_folder, report_arguments, write_config
from benchmarks._live_run import Tail, end
from chameleon_ft.config import Batch, Loading, Parallel, RunConfig
from chameleon_ft.storage.files import RunDirectory

_JOB: Final = f"{Path(__file__).with_name('_loading_job.py')}"
_FIRST: Final = 10
# A step that continues after a loss needs this long at most.
_LIMIT_S: Final = 1.0


def config_of(name: str, *, steps: int, workers: int) -> RunConfig:
    """Return the configuration of a run of one of the jobs."""
    return RunConfig(
        job=f"{_JOB}:{name}",
        workers=workers,
        parallel=Parallel(dp=workers, pp=1),
        batch=Batch(micro_batches=4, micro_batch_size=2),
        steps=steps,
        loading=Loading(processes=2),
    )


def step_s(run: RunDirectory) -> float:
    """Return the seconds of a step, from some first one on."""
    times = [record.time for record in run.readable_steps()[0]]
    return (times[-1] - times[_FIRST - 1]) / (len(times) - _FIRST)


def plain_step_s(steps: int) -> float:
    """Return the same of the plain loop, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks._loading_job", str(steps), str(_FIRST)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def pauses(folder: Path, *, kills: int) -> dict[str, list[float]]:
    """Kill the reader of a stream several times, and at last its worker; return the longest time between two steps."""
    path = folder / "stream"
    config = config_of("streamed", steps=100_000, workers=2)
    command = [sys.executable, "-m", "chameleon_ft", "train", str(write_config(config, folder / "stream.toml"))]
    found: dict[str, list[float]] = {"reader": [], "worker": []}
    with (folder / "stream.log").open("wb") as log:
        process = subprocess.Popen([*command, "--output-dir", str(path)], stdout=log, stderr=log)
        try:
            tail, times = Tail(path / "metrics.jsonl"), list[float]()
            _follow(tail, times, until=lambda: len(times) > 3 * _FIRST)
            for victim in ["reader"] * kills + ["worker"]:
                name = "loader stream" if victim == "reader" else "worker 0"
                (killed,) = (
                    each for each in psutil.Process(process.pid).children(recursive=True) if _name(each) == name
                )
                os.kill(killed.pid, signal.SIGKILL)
                killed_s, before = time.time(), len(times)
                _follow(tail, times, until=lambda s=killed_s: bool(times) and times[-1] > s + 5 * _LIMIT_S)
                after = [times[before - 1], *(each for each in times[before:] if each < killed_s + 5 * _LIMIT_S)]
                found[victim].append(max(later - earlier for earlier, later in itertools.pairwise(after)))
        finally:
            end(process)
    return found


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return ""


def _follow(tail: Tail, times: list[float], *, until: object) -> None:
    while not until():  # type: ignore[operator]
        times += [line["time"] for line in tail.new()]
        time.sleep(0.02)


def main() -> int:
    """Run the benchmark from the command line."""
    parser = report_arguments(__doc__, name="loading")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind, in turn")
    parser.add_argument("--steps", type=int, default=60, help="steps of each run with slow samples")
    arguments = parser.parse_args()
    folder = new_folder(arguments.out)
    ours, plain = list[float](), list[float]()
    for number in range(arguments.repeats):
        config = config_of("job", steps=arguments.steps, workers=1)
        ours.append(step_s(train(config, run=folder / f"run-{number}", timeout_s=600.0)))
        plain.append(plain_step_s(arguments.steps))
    paused = pauses(folder, kills=arguments.repeats)
    ratio = statistics.median(ours) / statistics.median(plain)
    rows = [
        ("step, two loaders", Spread(tuple(ours)).shown()),
        ("step, plain loop with a DataLoader of two workers", Spread(tuple(plain)).shown()),
        *(
            (f"longest step, {victim} of a stream killed", Spread(tuple(each)).shown())
            for victim, each in paused.items()
        ),
    ]
    return Report(
        benchmark="loading",
        columns=("time", "s"),
        rows=tuple(rows),
        bars=(
            Bar(name="step, of that of the plain loop", value=ratio, limit=1.05),
            *(
                Bar(name=f"step in which the {victim} is killed", value=max(each), limit=_LIMIT_S)
                for victim, each in paused.items()
            ),
        ),
        results={"step_s": ours, "plain_step_s": plain, "pauses_s": paused},
    ).emit(folder, as_json=arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
