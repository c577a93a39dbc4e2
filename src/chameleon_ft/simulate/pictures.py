"""Pictures of simulations: throughput over time with what is missing, and sweeps."""

from __future__ import annotations

from pathlib import Path

from chameleon_ft.errors import ConfigError
from chameleon_ft.report.picture import require_picture, save_picture
from chameleon_ft.simulate.results import Results
from chameleon_ft.simulate.run import Sweep
from chameleon_ft.simulate.traces.trace import Trace


def draw_results(path: Path, *, title: str, results: Results, trace: Trace) -> None:
    """Draw the results of each policy on a trace, a row for each, the best first, below the live workers.

    A row has the throughput over time as a share of the failure-free one, beside the oracle's if that was simulated,
    with a mark at every loss; and a bar of the samples that it lacks to the failure-free ones, by their cause.

    Args:
        path: file to write; its suffix gives the kind: .svg, .png or .pdf. An existing file is replaced.
        title: What is simulated, in one line.
        results: The results of the policies on the trace.
        trace: events of the workers.

    Raises:
        ConfigError: another suffix, matplotlib is not installed, or the file cannot be written.
    """
    require_picture(path)
    from chameleon_ft.simulate.figures import figure_of_results

    save_picture(figure_of_results(title, results, trace), path, title=title)


def draw_sweep(path: Path, *, title: str, sweep: Sweep) -> None:
    """Draw the goodput of each policy by the value, and its gap to the oracle's or else the failure-free samples.

    Values without results are left out.

    Raises:
        ConfigError: as `draw_results`, or no value has results.
    """
    require_picture(path)
    from chameleon_ft.simulate.figures import figure_of_sweep

    if not sweep.policies:
        raise ConfigError(
            f"{path}: there is nothing to draw, because nothing could be trained at any value of {sweep.name}"
        )
    save_picture(figure_of_sweep(title, sweep), path, title=title)
