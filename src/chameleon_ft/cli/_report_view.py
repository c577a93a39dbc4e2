"""A report in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from chameleon_ft.observe.comparison import GenerationComparison
from chameleon_ft.observe.terminal import output
from chameleon_ft.quantities import duration

__all__ = ["show"]

_WORDS = {
    "profile": "its profile",
    "corrected": "its profile, corrected by earlier steps",
    "measured": "medians of its own operations",
    "assumed": "assumed costs",
}


def show(comparisons: Sequence[GenerationComparison], *, title: str) -> None:
    """Print it."""
    console, shape = output()
    console.print(title, style="bold", soft_wrap=True)
    for comparison in comparisons:
        live = len(comparison.plan.plan.workers)
        console.print(
            f"generation {comparison.generation}, from step {comparison.plan.first_step} with {live} workers; "
            f"predicted by {_WORDS[comparison.costs_from]}",
            soft_wrap=True,
        )
        console.print(_table(comparison, shape))
        if comparison.warning is not None:
            console.print(comparison.warning, style="bold yellow", soft_wrap=True)


def _table(comparison: GenerationComparison, shape: box.Box) -> Table:
    table = Table(box=shape)
    table.add_column("")
    for column in ("number", "predicted", "measured", "error", "mean |error|"):
        table.add_column(column, justify="right")
    errors = [comparison.predicted.step_s / step.step_s - 1 for step in comparison.steps]
    table.add_row(
        "step",
        str(len(comparison.steps)),
        duration(comparison.predicted.step_s),
        duration(comparison.measured_s),
        f"{comparison.error:+.2%}",
        f"{sum(map(abs, errors)) / len(errors):.2%}",
    )
    for kind in comparison.kinds:
        table.add_row(
            kind.kind.name.lower().replace("_", " "),
            str(kind.count),
            duration(kind.predicted_s),
            duration(kind.measured_s),
            f"{kind.predicted_s / kind.measured_s - 1:+.2%}" if kind.measured_s else "-",
            f"{kind.mean_error:.2%}",
        )
    return table
