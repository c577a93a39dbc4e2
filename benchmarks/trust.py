"""How true is the simulator? Every run of `benchmarks.policies` beside a simulation with the same failures.

The simulator is given the prior knowledge of the run (profile, cluster, configuration, initial plan) and its events:
the times at which workers were killed and returned. Stall phases, the overhead of a step and the factor of migrations
are medians over the runs of other scenarios, of the same policy if they have them. Nothing is taken from the run
itself: no step, stall or decision.

  real, simulated   samples per second over the window, as `benchmarks.policies` counts them
  stalls            seconds of stalls in the window, both ways
  others            share of the machine that other processes took during the run; with --max-others 0.05 such runs are
                    left out, and give no constants

Samples per second and seconds are those of the emulated devices. A return to a checkpoint takes `--restart-s` of
`benchmarks.policies` in both, and repeated steps count as trained, as there. With --by-class every run is simulated a
second time like clusters of more than 32 workers, and the last column has the error of that.
--markdown FILE writes the table of docs/simulator.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks._common import Bar, Report, markdown_table, new_folder, report_arguments
from benchmarks._neighbours import progress
from benchmarks._trust_picture import draw
from benchmarks._trust_replay import Made, Replayed, constants, made_in, mean_error, replayed

_COLUMNS: Final = (
    "scenario",
    "policy",
    "lost",
    "real samples/s",
    "simulated",
    "error",
    "stalls, s",
    "simulated",
    "others",
)
_MEAN, _WORST = 0.03, 0.06


def main() -> int:
    given = _arguments()
    runs = [made for made in made_in(given.runs) if _counts(made, given)]
    if not runs:
        raise SystemExit(
            f"--runs {' '.join(map(str, given.runs))}: there are no runs of benchmarks.policies that count"
        )
    folder = new_folder(given.out)
    found = []
    for made in runs:
        progress(f"{made.scenario}, {made.policy}")
        found.append(replayed(made, constants(made, runs), by_class=given.by_class))
    draw(folder / "trust.svg", found)
    if given.markdown is not None:
        given.markdown.write_text(_markdown(found), encoding="utf-8")
    return _report(found, by_class=given.by_class).emit(folder, as_json=given.json)


def _counts(made: Made, given: argparse.Namespace) -> bool:
    disturbed = made.observed.others_share > given.max_others
    return not disturbed and (not given.scenarios or made.scenario in given.scenarios)


def _report(found: Sequence[Replayed], *, by_class: bool) -> Report:
    worst = max(found, key=lambda each: abs(each.error))
    where = f"{worst.made.scenario}, {worst.made.policy}"
    return Report(
        benchmark="trust",
        columns=(*_COLUMNS, *(("by class",) if by_class else ())),
        rows=tuple(each.row() for each in found),
        bars=(
            Bar(name=f"mean |error| of {len(found)} runs", value=mean_error(found), limit=_MEAN),
            Bar(name=f"worst |error| ({where})", value=abs(worst.error), limit=_WORST),
        ),
        results={"emulated": True, "runs": [each.to_json() for each in found]},
    )


def _markdown(found: Sequence[Replayed]) -> str:
    """Return a row for each scenario, a column for each policy, and the mean absolute errors below."""
    policies = list(dict.fromkeys(each.made.policy for each in found))
    scenarios = list(dict.fromkeys(each.made.scenario for each in found))
    cells = {(each.made.scenario, each.made.policy): f"{each.real_per_s:.1f}, {each.error:+.1%}" for each in found}
    rows = [
        *([scenario, *(cells.get((scenario, policy), "") for policy in policies)] for scenario in scenarios),
        [
            "mean size of the error",
            *(f"{mean_error(each for each in found if each.made.policy == policy):.1%}" for policy in policies),
        ],
    ]
    return markdown_table(["real samples/s, error", *(f"`{policy}`" for policy in policies)], rows)


def _arguments() -> argparse.Namespace:
    parser = report_arguments(__doc__, name="trust")
    parser.add_argument(
        "--runs", type=Path, nargs="+", required=True, metavar="DIR", help="folders that benchmarks.policies made"
    )
    parser.add_argument("--scenarios", nargs="+", metavar="NAME", help="only these")
    parser.add_argument(
        "--max-others", type=float, default=1.0, help="leave out runs with which others interfered more"
    )
    parser.add_argument("--by-class", action="store_true", help="simulate pipelines by class too")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table for the docs")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
