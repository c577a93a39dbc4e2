"""Simulations as pictures: throughput over time with what is missing, and sweeps."""

from __future__ import annotations

from pathlib import Path

from chameleon_ft.errors import ConfigError
from chameleon_ft.observe.picture import require_picture, save_picture
from chameleon_ft.simulate.accounting.results import Results
from chameleon_ft.simulate.sweep import Sweep
from chameleon_ft.simulate.traces.trace import Trace

__all__ = ["draw_results", "draw_sweep"]


def draw_results(path: Path, *, title: str, results: Results, trace: Trace) -> None:
    """Draw what each policy made of a trace, a row for each, the best first.

    On top the live workers. Each row has the throughput over time, averaged over what a point of the picture shows, by
    the failure-free one, beside the oracle's where that was simulated, with a mark at every failure; and a bar of what
    is missing from the failure-free samples: stalls, work that was done in vain, checkpoints, time without enough
    workers, and steps that took longer.

    Args:
        path: file to write, whose suffix says of which kind: .svg, .png or .pdf. What is there is replaced.
        title: what is simulated, in a line.
        results: of the policies on the trace.
        trace: what happened.

    Raises:
        ConfigError: another suffix, matplotlib is not installed, or the file cannot be written.
    """
    require_picture(path)
    from chameleon_ft.simulate.pictures.results_figure import figure_of_results

    save_picture(figure_of_results(title, results, trace), path, title=title)


def draw_sweep(path: Path, *, title: str, sweep: Sweep) -> None:
    """Draw a sweep: the goodput of each policy by the value, and how much it lacks to the oracle's.

    Without the oracle, how much it lacks to the failure-free samples. Values without results are left out.

    Raises ConfigError as `draw_results` does, and where no value has results.
    """
    require_picture(path)
    from chameleon_ft.simulate.pictures.sweep_figure import figure_of_sweep

    if not sweep.policies:
        raise ConfigError(
            f"{path}: there is nothing to draw, for at no value of {sweep.name} could anything be trained"
        )
    save_picture(figure_of_sweep(title, sweep), path, title=title)
