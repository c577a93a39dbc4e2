"""Does training stand still longer on Ray when a worker is killed?

Runs with `chameleon train` and with `chameleon ray`, on a Ray cluster of a head and three nodes on this machine, take
turns. Both train the same model on the same cores, and lose one worker to SIGKILL. The stall is that of the run's own
record: from the kill to the first worker that was ready to run an operation again.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path

from benchmarks._chameleon import train
from benchmarks._common import Bar, Report, Spread, add_most_others, arguments, base_config, new_folder
from benchmarks._neighbours import Neighbours, progress
from chameleon_ft.config import Failure, FailurePhase, TrainConfig
from chameleon_ft.events.records import FailureRecord
from tests.launch.ray.clusters import ray_cluster

_PHASES: tuple[FailurePhase, ...] = ("forward", "backward", "sync", "vote", "optimizer")
_PARTS = ("detect_s", "stop_s", "decide_s", "regroup_s", "stall_s")
_NODES = 3
_MAX_RATIO = 1.2


def main() -> int:
    """Run what the flags ask for; the exit code is 1 if the bar is not reached."""
    given = _arguments()
    folder = new_folder(given.out)
    config = base_config(given.config, stamped=False, steps=given.kill_step + given.steps_after)
    neighbours = Neighbours(most=given.max_others)
    started: dict[str, Callable[..., FailureRecord]] = {"train": _here, "ray": _on_ray}
    found: dict[str, list[FailureRecord]] = {command: [] for command in started}
    places = zip(cycle(range(config.workers)), cycle(_PHASES), strict=False)
    for number, (worker, phase) in enumerate(islice(places, given.kills)):
        failure = Failure(step=given.kill_step, worker=worker, phase=phase)
        for command, measure in started.items():
            progress(f"{command}, kill {number + 1} of {given.kills}: worker {worker}, {phase}")
            measured = partial(measure, config, failure, given.timeout)
            path = folder / f"{command}-{number}"
            # The daemons of Ray would count as others that take the processors.
            found[command].append(measured(path) if command == "ray" else neighbours.undisturbed(measured, path))
    medians = {command: _spread(records, "stall_s").median for command, records in found.items()}
    ratio = medians["ray"] / medians["train"]
    report = Report(
        benchmark="ray",
        columns=("command", "kills", *(f"{part.removesuffix('_s')}, s" for part in _PARTS)),
        rows=tuple(
            (f"chameleon {command}", str(len(records)), *(_spread(records, part).shown() for part in _PARTS))
            for command, records in found.items()
        ),
        bars=(Bar(name="median stall on Ray, times that without", value=ratio, limit=_MAX_RATIO),),
        results={
            command: {part: _spread(records, part).to_json() for part in _PARTS} for command, records in found.items()
        },
        neighbours=neighbours,
    )
    return report.emit(folder, as_json=given.json)


def _here(config: TrainConfig, failure: Failure, timeout_s: float, path: Path) -> FailureRecord:
    (record,) = train(config, run=path, failures=(failure,), timeout_s=timeout_s).failures()
    return record


def _on_ray(config: TrainConfig, failure: Failure, timeout_s: float, path: Path) -> FailureRecord:
    per_node = math.ceil(config.workers / _NODES)
    with ray_cluster(*[per_node] * _NODES) as cluster:
        command = ("ray", "--address", cluster.address, "--workers-per-node", str(per_node))
        (record,) = train(config, run=path, failures=(failure,), timeout_s=timeout_s, command=command).failures()
    return record


def _spread(records: Sequence[FailureRecord], part: str) -> Spread:
    return Spread(tuple(getattr(record, part) or 0.0 for record in records))


def _arguments() -> argparse.Namespace:
    parser = arguments(__doc__, name="ray")
    add_most_others(parser)
    parser.add_argument("--kills", type=int, default=10, help="killed workers with each command")
    parser.add_argument("--kill-step", type=int, default=6, help="step in which the worker is killed")
    parser.add_argument("--steps-after", type=int, default=6, help="steps that follow")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
