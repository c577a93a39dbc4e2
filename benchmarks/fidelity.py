"""Does a run with failures train what a run without them trains? Its losses beside the plain loop's.

Each run loses two workers, one in a backward and one in a gradient sync, at places that differ from run to run.
`chameleon verify` then repeats all its steps in a plain, single-process PyTorch loop and compares the loss of every
step; the run itself counts the samples of its committed steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import _chameleon
from benchmarks._common import (
    ROOT,
    Bar,
    Report,
    Spread,
    arguments,
    base_config,
    new_folder,
    worker_environment,
)
from benchmarks._neighbours import progress
from chameleon_ft.config import Failure, TrainConfig

_LARGEST_DEVIATION = 1e-5


@dataclass(frozen=True, slots=True)
class Place:
    """Workers and steps of the losses: first in a backward, then in a gradient sync."""

    backward: tuple[int, int]
    sync: tuple[int, int]

    @classmethod
    def parse(cls, text: str) -> Place:
        """Parse ``WORKER@STEP,WORKER@STEP``."""
        try:
            first, second = ((int(worker), int(step)) for worker, step in (part.split("@") for part in text.split(",")))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: write it as WORKER@STEP,WORKER@STEP") from None
        return cls(first, second)

    def failures(self) -> list[Failure]:
        return [
            Failure(worker=self.backward[0], step=self.backward[1], phase="backward"),
            Failure(worker=self.sync[0], step=self.sync[1], phase="sync"),
        ]

    def __str__(self) -> str:
        return f"backward {self.backward[0]}@{self.backward[1]}, sync {self.sync[0]}@{self.sync[1]}"


# In four pipelines of two stages: different stages of different pipelines; twice the same stage; a whole pipeline;
# the first and the last worker, in two consecutive steps.
_PLACES = ("5@10,2@25", "1@8,7@30", "4@12,5@20", "0@15,7@16")


def main() -> int:
    given = _arguments()
    folder = new_folder(given.out)
    config = base_config(given.config, stamped=False, steps=given.steps)
    runs = []
    for number, place in enumerate(given.places):
        progress(f"run {number + 1} of {len(given.places)}: {place}")
        runs.append(_run(config, folder / f"run-{number}", place, given))
    deviation = Spread(tuple(run["max_relative_loss_deviation"] for run in runs))
    amiss = sum(run["samples_lost"] + run["samples_repeated"] for run in runs)
    report = Report(
        benchmark="fidelity",
        columns=("kills (worker@step)", "steps", "largest deviation of a loss", "samples lost", "repeated"),
        rows=tuple(
            (
                run["place"],
                str(run["steps"]),
                f"{run['max_relative_loss_deviation']:.1e}",
                str(run["samples_lost"]),
                str(run["samples_repeated"]),
            )
            for run in runs
        ),
        bars=(
            Bar(name="largest relative deviation of a loss", value=max(deviation.values), limit=_LARGEST_DEVIATION),
            Bar(name="samples lost or repeated", value=float(amiss), limit=0.0),
            Bar(
                name="steps committed, least",
                value=float(min(run["steps"] for run in runs)),
                limit=float(given.steps),
                at_least=True,
            ),
        ),
        results={"runs": runs, "max_relative_loss_deviation": deviation.to_json()},
    )
    return report.emit(folder, as_json=given.json)


def _arguments() -> argparse.Namespace:
    parser = arguments(__doc__, name="fidelity")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--places",
        nargs="+",
        type=Place.parse,
        default=[Place.parse(text) for text in _PLACES],
        metavar="WORKER@STEP,WORKER@STEP",
        help=f"a run for each: lost in a backward, then in a gradient sync; by default {' '.join(_PLACES)}",
    )
    return parser.parse_args()


def _run(config: TrainConfig, path: Path, place: Place, given: argparse.Namespace) -> dict[str, Any]:
    run = _chameleon.train(config, run=path, failures=place.failures(), timeout_s=given.timeout)
    summary = json.loads(run.summary_file.read_text(encoding="utf-8"))
    lost = [(failure["worker"], failure["step"]) for failure in summary["failures"]]
    if lost != [place.backward, place.sync]:
        raise SystemExit(f"{path}: lost {lost}, and should have lost {place}")
    verified = subprocess.run(
        [sys.executable, "-m", "chameleon_ft", "verify", str(path), "--json"],
        cwd=ROOT,
        env=worker_environment(),
        capture_output=True,
        text=True,
        timeout=given.timeout,
        check=False,  # its exit code, like its output, says whether the losses agree
    )
    (path / "verification.json").write_text(verified.stdout, encoding="utf-8")
    if not verified.stdout:
        raise SystemExit(f"{path}: cannot be verified: {verified.stderr}")
    return {
        "place": str(place),
        **json.loads(verified.stdout),
        **{key: summary[key] for key in ("samples_seen", "samples_lost", "samples_repeated")},
    }


if __name__ == "__main__":
    raise SystemExit(main())
