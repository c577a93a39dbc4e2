"""Prints the tables of traces.md: `python docs/traces.py [FILE[=NODES] ...]`.

The first table has a column for each file and for each model, with the mean and standard deviation over 40 seeds. The
other tables show each file at other failure rates.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from chameleon_ft.simulate import MODELS, Trace, TraceStatistics, generate_trace, load_trace, trace_statistics

DAY_S = 86_400.0
SEEDS = range(40)
SIZES = {"spot": (24, 38_760 / DAY_S)}
"""Hosts and days of what a model is fitted to, where that is not the InfiniteHBD trace."""
INFINITE_HBD = (400, 348.0)
FACTORS = (0.1, 0.3, 1, 3, 10, 30)

FIGURES = {
    "faults_per_1000_host_days": "faults per 1,000 host-days",
    "outage_median_days": "outage, median, days",
    "outage_mean_days": "outage, mean, days",
    "outage_p90_days": "outage, 90th percentile, days",
    "gap_variation": "variation of the gaps",
    "short_gap_share": "gaps under five minutes",
    "max_hosts_down": "most hosts down at once",
    "availability": "availability",
}


def table(files: Sequence[str]) -> str:
    """Return the table as Markdown."""
    columns = {Path(file.partition("=")[0]).name: _measured(file) for file in files}
    columns |= {f"`{name}`": _generated(name) for name in MODELS}
    lines = [["", *columns], ["---"] * (len(columns) + 1)]
    for figure, name in FIGURES.items():
        lines.append([name, *(cells[figure] for cells in columns.values())])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def rates(file: str) -> str:
    """Return a table of a trace at other failure rates as Markdown."""
    trace = _read(file)
    lines = ["| factor | scaled: faults | up | variation of gaps | compressed: faults | up | days |", "|---" * 7 + "|"]
    for factor in FACTORS:
        scaled, compressed = trace_statistics(trace.scaled(factor)), trace_statistics(trace.compressed(factor))
        cells = [f"{factor:g}", f"{scaled.faults_per_1000_host_days:.2f}", f"{scaled.availability:.1%}"]
        cells += [f"{scaled.gap_variation:.2f}", f"{compressed.faults_per_1000_host_days:.2f}"]
        cells += [f"{compressed.availability:.1%}", f"{compressed.duration_days:,.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _read(file: str) -> Trace:
    path, _, nodes = file.partition("=")
    return load_trace(Path(path), nodes=int(nodes) if nodes else None)


def _measured(file: str) -> dict[str, str]:
    found = trace_statistics(_read(file))
    return {figure: _digits(getattr(found, figure)) for figure in FIGURES}


def _generated(name: str) -> dict[str, str]:
    found = [_drawn(name, seed) for seed in SEEDS]
    cells = {}
    for figure in FIGURES:
        values = [float(getattr(each, figure)) for each in found]
        cells[figure] = f"{_digits(statistics.fmean(values))} ± {_digits(statistics.pstdev(values))}"
    return cells


def _drawn(name: str, seed: int) -> TraceStatistics:
    hosts, days = SIZES.get(name, INFINITE_HBD)
    return trace_statistics(generate_trace(MODELS[name], hosts=hosts, duration_s=days * DAY_S, seed=seed))


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    print(table(sys.argv[1:]))
    for name in sys.argv[1:]:
        print(f"\n{Path(name).name}\n\n{rates(name)}")
