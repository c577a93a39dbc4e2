"""Has a change made training or recovery slower? The quick start in this checkout and in another one, in turns.

Runs of both alternate, each with the code and the example of its own checkout, so both meet the same moments of the
machine. Each loses two workers. Compared, of each pair of runs:

  step   the median step before the first failure, without the first ones
  stall  the mean stall of the failures
  cost   the mean cost of the failures, in steps

A figure counts as worse if it is so in three quarters of the pairs. Make the other checkout by
`git worktree add --detach DIRECTORY COMMIT`.
"""

from __future__ import annotations

import json
import statistics
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks._common import ROOT, Bar, Report, Spread, add_most_others, new_folder, report_arguments, run_child
from benchmarks._neighbours import Neighbours, progress

_WARM_UP: Final = 5
_FIGURES: Final = {"step": "s", "stall": "s", "cost": "steps"}

_Figures = Mapping[str, float]


def main() -> int:
    given = _parser().parse_args()
    neighbours, folder = Neighbours(most=given.max_others), new_folder(given.out)
    checkouts = {"this": ROOT, "other": given.other.resolve()}
    runs: dict[str, list[_Figures]] = {name: [] for name in checkouts}
    for number in range(given.rounds):
        for name in list(checkouts)[:: 1 if number % 2 == 0 else -1]:
            progress(f"round {number + 1} of {given.rounds}: {name}")
            measure = partial(_run, checkouts[name], given)
            runs[name].append(neighbours.undisturbed(measure, folder / f"{name}-{number}"))
    return _report(runs, neighbours).emit(folder, as_json=given.json)


def _run(checkout: Path, given: Namespace, path: Path) -> _Figures:
    example = checkout / "examples" / "quickstart.toml"
    command = [sys.executable, "-m", "chameleon_ft", "train", str(example), "--output-dir", str(path)]
    environment = {"PYTHONPATH": str(checkout / "src")}
    run_child(command, log=path.with_suffix(".log"), timeout_s=given.timeout, environment=environment)
    # Another checkout may have other types of records.
    rows, events = (
        [json.loads(line) for line in (path / name).read_text(encoding="utf-8").splitlines()]
        for name in ("metrics.jsonl", "events.jsonl")
    )
    failures = [event for event in events if event["event"] == "failure"]
    first = min(event["step"] for event in failures)
    return {
        "step": statistics.median(row["step_s"] for row in rows if _WARM_UP <= row["step"] < first),
        "stall": statistics.fmean(event["stall_s"] for event in failures),
        "cost": statistics.fmean(e["failure_cost_steps"] for e in events if e["event"] == "failure_cost"),
    }


def _report(runs: Mapping[str, list[_Figures]], neighbours: Neighbours) -> Report:
    def of(name: str, figure: str) -> Spread:
        return Spread(tuple(each[figure] for each in runs[name]))

    more = {
        figure: Spread(tuple(a - b for a, b in zip(of("this", figure).values, of("other", figure).values, strict=True)))
        for figure in _FIGURES
    }
    lower_quartiles = {figure: own.to_json()["quartiles"][0] for figure, own in more.items()}
    return Report(
        benchmark="commits",
        columns=("median (least to largest)", "this", "other", "more in a pair"),
        rows=tuple(
            (f"{figure}, {unit}", of("this", figure).shown(), of("other", figure).shown(), more[figure].shown())
            for figure, unit in _FIGURES.items()
        ),
        bars=tuple(
            Bar(name=f"{figure}: lower quartile of what it is more in a pair", value=value, limit=0.0)
            for figure, value in lower_quartiles.items()
        ),
        results={"runs": runs, "more": {figure: own.to_json() for figure, own in more.items()}},
        neighbours=neighbours,
    )


def _parser() -> ArgumentParser:
    parser = report_arguments(__doc__, name="commits")
    add_most_others(parser)
    parser.add_argument("--other", type=Path, required=True, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=6, help="pairs of runs")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one run may take")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
