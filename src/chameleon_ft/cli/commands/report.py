"""`chameleon report`: compare the measured steps of a run with the predicted ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Final

from chameleon_ft.cli.arguments import OptionalInt, OptionalPath, RunPath, Switch, parse_arguments
from chameleon_ft.cli.output import Output, require_places, tell_written, write_schedule
from chameleon_ft.errors import ConfigError
from chameleon_ft.events.base import Event
from chameleon_ft.events.records import Evaluation, FailureRecord, JoinRecord, Started
from chameleon_ft.plan.layouts import home_pipelines
from chameleon_ft.quantities import duration, in_ranges
from chameleon_ft.report.comparison import GenerationComparison, compare_generations
from chameleon_ft.report.facts import describe_damage
from chameleon_ft.report.picture import Lane
from chameleon_ft.report.view import best_of, with_evaluations
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.plans import read_generation_plans
from chameleon_ft.storage.timelines import read_recorded_steps

_MAX_EVALUATIONS: Final = 10
_SOURCES: Final = {
    "profile": "its profile",
    "corrected": "its profile, corrected by earlier steps",
    "measured": "times of its own operations and reductions",
    "assumed": "assumed costs",
}


@dataclass(frozen=True)
class ReportArguments:
    """Compare the measured operations of a run with the predicted ones: the error per step and per kind of operation.

    If the run evaluates, its evaluations follow.

    The prediction is the one the run planned by: from its profile, corrected by what the run had measured until then.
    Without a profile it is from the times of the run's own operations and reductions, and shows the error of everything
    else: waiting and messages.
    """

    run: RunPath
    """Run directory."""
    step: OptionalInt = None
    """Print only this step, which is also the one to draw and trace; by default that is the last recorded one."""
    picture: OptionalPath = None
    """Draw that step, predicted and measured: .svg, .png or .pdf."""
    trace: OptionalPath = None
    """Write that step, predicted and measured, as a trace for ui.perfetto.dev."""
    failure: OptionalInt = None
    """Draw this failure of the run instead, 1 for the first: what each worker ran before the stall and after it."""
    json: Switch = False
    """Print the report as JSON."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given = parse_arguments(ReportArguments, arguments, command="report")
    run = RunDirectory.open(given.run)
    require_places(picture=given.picture, trace=given.trace)
    if given.failure is not None and (given.picture is None or given.trace is not None or given.step is not None):
        raise ConfigError("--failure is drawn as a picture; give it with --picture, and without --trace and --step")
    plans, recorded = read_generation_plans(run.plans), read_recorded_steps(run.timelines)
    events, damaged = run.readable_events()
    if given.failure is not None and given.picture is not None:
        from chameleon_ft.report.failure_picture import draw_failure

        draw_failure(given.picture, run, given.failure, plans, recorded)
        damaged += run.readable_steps()[1]
        if given.json:
            print(json.dumps({"failure": given.failure, "damaged_lines": damaged}))
        elif damaged:
            print(describe_damage(damaged))
        tell_written(json=given.json, picture=given.picture, trace=None)
        return 0
    comparisons = compare_generations(plans, recorded)
    if not comparisons:
        raise ConfigError(
            f"{given.run}: no whole step of it was recorded; a run records some if timelines.every is above 0"
        )
    if given.step is not None:
        known = ", ".join(str(step.step) for comparison in comparisons for step in comparison.steps)
        comparisons = compare_generations(plans, [each for each in recorded if each.step == given.step])
        if not comparisons:
            raise ConfigError(f"--step {given.step}: was not recorded; those that were: {known}")
    comparison, step = [(each, step) for each in comparisons for step in each.steps][-1]
    write_schedule(
        given.picture,
        given.trace,
        title=f"{run.path.name}, step {step.step}, generation {step.generation}",
        plan=comparison.plan.plan,
        pipelines=home_pipelines([plan.plan for number, plan in plans.items() if number <= step.generation]),
        lanes=[Lane.predicted(comparison.predicted), step.lane],
        lost=_lost_until(events, step.generation),
    )
    evaluations: Mapping[int, Evaluation] = reduce(with_evaluations, events, {})
    if given.json:
        values = {
            "generations": [each.to_json() for each in comparisons],
            "evaluations": [each.to_json() for each in evaluations.values()],
            "damaged_lines": damaged,
        }
        print(json.dumps(values))
    else:
        _show(comparisons, list(evaluations.values()), title=str(run.path), damaged=damaged)
    tell_written(json=given.json, picture=given.picture, trace=given.trace)
    return 0


def _lost_until(events: Iterable[Event], generation: int) -> set[int]:
    """Return the workers lost since the run was started or last resumed, and not back by `generation`."""
    lost: set[int] = set()
    for event in events:
        match event:
            case Started() if event.generation <= generation:
                lost.clear()
            case FailureRecord() if event.generation <= generation:
                lost.add(event.worker)
            case JoinRecord() if event.generation <= generation:
                lost.difference_update(event.workers, event.spares)
    return lost


def _show(
    comparisons: Sequence[GenerationComparison],
    evaluations: Sequence[Evaluation],
    *,
    title: str,
    damaged: Sequence[str],
) -> None:
    out = Output()
    out.text(title, "bold")
    if damaged:
        out.text(describe_damage(damaged))
    for comparison in comparisons:
        out.text(
            f"generation {comparison.generation}, from step {comparison.plan.first_step} with "
            f"{len(comparison.plan.plan.workers)} workers; predicted by {_SOURCES[comparison.costs_from]}"
        )
        right = ["number", "predicted", "measured", "error", "mean |error|"]
        out.show(out.table(_rows(comparison), left=[""], right=right))
    _show_evaluations(out, evaluations)
    if warned := [each for each in comparisons if each.warning is not None]:
        worst = max(warned, key=lambda each: abs(each.error))
        others = "" if len(warned) == 1 else f"generations {in_ranges(each.generation for each in warned)}, most in "
        out.text(f"{others}generation {worst.generation}: {worst.warning}", "bold yellow")


def _rows(comparison: GenerationComparison) -> list[tuple[str, ...]]:
    """Return the row of the whole step and one for each kind of operation."""
    step_s = comparison.predicted.step_s
    step_error = sum(abs(step_s / step.step_s - 1) for step in comparison.steps) / len(comparison.steps)
    figures = [("step", len(comparison.steps), step_s, comparison.measured_s, step_error)]
    for kind in comparison.kinds:
        name = kind.kind.name.lower().replace("_", " ")
        figures.append((name, kind.count, kind.predicted_s, kind.measured_s, kind.mean_error))
    return [
        (
            name,
            str(count),
            duration(predicted_s),
            duration(measured_s),
            f"{predicted_s / measured_s - 1:+.2%}" if measured_s else "-",
            f"{mean_error:.2%}",
        )
        for name, count, predicted_s, measured_s, mean_error in figures
    ]


def _show_evaluations(out: Output, evaluations: Sequence[Evaluation]) -> None:
    """Print the newest evaluations and the best one, if there are any."""
    if not evaluations:
        return
    best = best_of(evaluations)
    shown = [each for each in evaluations[:-_MAX_EVALUATIONS] if each is best] + [*evaluations[-_MAX_EVALUATIONS:]]
    names = list({name: None for each in shown for name in each.metrics})
    has_perplexity = any(each.perplexity is not None for each in shown)
    rows = [
        (
            f"after step {each.step}",
            *(
                "-" if value is None else f"{value:.5g}"
                for value in (
                    each.loss,
                    *([each.perplexity] if has_perplexity else []),
                    *(each.metrics.get(name) for name in names),
                )
            ),
            duration(each.seconds),
            "least loss" if each is best else "",
        )
        for each in shown
    ]
    right = ["loss", *(["perplexity"] if has_perplexity else []), *names, "time"]
    left_out = len(evaluations) - len(shown)
    out.text(f"evaluations{f', without {left_out} earlier ones' if left_out else ''}")
    out.show(out.table(rows, left=[""], right=right, last=[""]))
