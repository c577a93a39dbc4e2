"""How long does training stand still when a worker hangs (SIGSTOP): alive, connected, and doing nothing?

Each run stops one worker, which only the lack of progress reveals. The stall is from the stop to the first forward of
the first layer in the repeated step, in units of the median step before it.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import cycle, islice
from pathlib import Path

from benchmarks import _chameleon
from benchmarks._common import Bar, Report, Spread, add_most_others, arguments, base_config, new_folder
from benchmarks._neighbours import Neighbours, progress
from chameleon_ft.config import Failure, FailurePhase, TrainConfig

_PHASES: tuple[FailurePhase, ...] = ("forward", "sync", "backward", "vote")
_MAX_STEPS = 3.0


def main() -> int:
    given = _arguments()
    neighbours = Neighbours(most=given.max_others)
    folder = new_folder(given.out)
    config = base_config(given.config, steps=given.hang_step + given.steps_after)
    places = islice(zip(cycle(range(0, config.workers, 3)), cycle(_PHASES), strict=False), given.hangs)
    hangs = []
    for number, (worker, phase) in enumerate(places):
        progress(f"hang {number + 1} of {given.hangs}: worker {worker}, {phase}")
        failure = Failure(step=given.hang_step, worker=worker, phase=phase, kind="hang")
        measure = partial(_hang, config, failure, given)
        hangs.append(neighbours.undisturbed(measure, folder / f"hang-{number}"))
    seconds = Spread(tuple(hang.stall_s for hang in hangs))
    detection = Spread(tuple(hang.detect_s for hang in hangs))
    step = Spread(tuple(hang.step_before_s for hang in hangs))
    steps = Spread(tuple(hang.stall_s / hang.step_before_s for hang in hangs))
    report = Report(
        benchmark="hang",
        columns=("", "hangs", "median (least to largest)"),
        rows=tuple(
            (name, str(len(hangs)), spread.shown())
            for name, spread in (
                ("until training continues, s", seconds),
                ("of which detection, s", detection),
                ("median step before, s", step),
                ("until training continues, steps", steps),
            )
        ),
        bars=(
            Bar(name="median, in median steps", value=steps.median, limit=_MAX_STEPS),
            Bar(name="largest, in median steps", value=max(steps.values), limit=_MAX_STEPS),
        ),
        results={
            "hangs": [hang.to_json() for hang in hangs],
            "stall_s": seconds.to_json(),
            "detect_s": detection.to_json(),
            "median_step_s": step.to_json(),
            "stall_in_steps": steps.to_json(),
        },
        neighbours=neighbours,
    )
    return report.emit(folder, as_json=given.json)


def _hang(config: TrainConfig, failure: Failure, given: argparse.Namespace, path: Path) -> _chameleon.Recovery:
    run = _chameleon.train(config, run=path, failures=[failure], salvage=False, timeout_s=given.timeout)
    return _chameleon.recovery_of(run, failure)


def _arguments() -> argparse.Namespace:
    parser = arguments(__doc__, name="hang")
    add_most_others(parser)
    parser.add_argument("--hangs", type=int, default=8, help="runs, each with one hang")
    parser.add_argument("--hang-step", type=int, default=25, help="so that the watchdog knows the step time")
    parser.add_argument("--steps-after", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
