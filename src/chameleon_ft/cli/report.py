"""`chameleon report`: what was predicted of a run beside what was measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Optional

import tyro

from chameleon_ft.cli._flags import Switch, optional_argument, parse_arguments
from chameleon_ft.cli._written import require_places, tell_written
from chameleon_ft.errors import ConfigError
from chameleon_ft.observe import RunDirectory, read_generation_plans, read_recorded_steps
from chameleon_ft.observe.comparison import GenerationComparison, MeasuredStep, compare_generations
from chameleon_ft.observe.lanes import Lane
from chameleon_ft.observe.picture import require_picture
from chameleon_ft.plan.detours import home_pipelines

__all__ = ["main"]


@dataclass(frozen=True)
class ReportArguments:
    """Lay the measured operations of a run over the predicted ones: error per step, and per kind of operation.

    Predicted is what the run itself planned by: its profile, corrected by what it had seen until then; or where it had
    none the medians of its own operations, which leaves the error of everything but the operations: waiting, messages,
    the gradients' sync.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN", help="Run directory.")]
    step: Annotated[
        Optional[int],  # noqa: UP045
        optional_argument("INT", "Step to draw and trace; by default the last that was recorded."),
    ] = None
    picture: Annotated[
        Optional[Path],  # noqa: UP045
        optional_argument("PATH", "Draw that step, predicted and measured: .svg, .png or .pdf."),
    ] = None
    trace: Annotated[
        Optional[Path],  # noqa: UP045
        optional_argument("PATH", "Write that step, predicted and measured, as a trace for ui.perfetto.dev."),
    ] = None
    json: Annotated[Switch, optional_argument("", "Print the report as JSON.")] = False


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given = parse_arguments(ReportArguments, arguments, command="report")
    run = RunDirectory.open(given.run)
    if given.picture is not None:
        require_picture(given.picture)
    require_places(picture=given.picture, trace=given.trace)
    plans = read_generation_plans(run.plans)
    comparisons = compare_generations(plans, read_recorded_steps(run.timelines))
    if not comparisons:
        raise ConfigError(
            f"{given.run}: no whole step of it was recorded; a run records some if timelines.every is above 0"
        )
    comparison, step = _chosen(comparisons, given.step)
    lanes = [Lane.predicted(comparison.predicted), step.lane]
    pipelines = home_pipelines([plan.plan for number, plan in plans.items() if number <= step.generation])
    title = f"{run.path.name}, step {step.step}, generation {step.generation}"
    if given.picture is not None:
        from chameleon_ft.observe.schedule_picture import draw_schedule

        draw_schedule(
            given.picture,
            title=title,
            plan=comparison.plan.plan,
            pipelines=pipelines,
            lanes=lanes,
            lost=_lost_until(run, step.generation),
        )
    if given.trace is not None:
        from chameleon_ft.observe.trace import write_trace

        write_trace(given.trace, plan=comparison.plan.plan, pipelines=pipelines, lanes=lanes)
    if given.json:
        print(json.dumps({"generations": [each.to_json() for each in comparisons]}))
    else:
        from chameleon_ft.cli._report_view import show

        show(comparisons, title=str(run.path))
    tell_written(json=given.json, picture=given.picture, trace=given.trace)
    return 0


def _lost_until(run: RunDirectory, generation: int) -> set[int]:
    """Workers lost since the run was started or last resumed, and not back by `generation`."""
    lost: set[int] = set()
    for event in run.events():
        if event.get("generation", 0) > generation:
            continue
        match event["event"]:
            case "started":
                lost.clear()
            case "failure":
                lost.add(event["worker"])
            case "join":
                lost.difference_update(event["workers"], event["spares"])
    return lost


def _chosen(
    comparisons: Sequence[GenerationComparison], number: int | None
) -> tuple[GenerationComparison, MeasuredStep]:
    steps = [(comparison, step) for comparison in comparisons for step in comparison.steps]
    if number is None:
        return steps[-1]
    for comparison, step in steps:
        if step.step == number:
            return comparison, step
    known = ", ".join(str(step.step) for _, step in steps)
    raise ConfigError(f"--step {number}: was not recorded; those that were: {known}")
