"""A report on a run as names and values, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from chameleon_ft.quantities import counted, duration, in_ranges
from chameleon_ft.report.view import CONDITIONS, RunReport, Saved

_MAX_CAUSES: Final = 5
_TOLD_SHARE: Final = 0.01


def facts_of(report: RunReport) -> tuple[tuple[str, str], ...]:
    """Return the report as names and texts; unknown values are left out."""
    return tuple(_facts(report))


def describe_damage(damaged: Sequence[str]) -> str:
    """Return how many lines are left out, and the message about the first of them."""
    if len(damaged) == 1:
        return f"a line cannot be read, and is left out: {damaged[0]}"
    return f"{counted(len(damaged), 'line')} cannot be read, and are left out; the first: {damaged[0]}"


def _facts(report: RunReport) -> Iterator[tuple[str, str]]:
    yield "state", f"{report.condition}: {report.reason or CONDITIONS[report.condition]}"
    if (last := report.last) is not None:
        loss = "skipped" if last.is_skipped else f"loss {last.loss:.4f}"
        age = "" if report.last_step_age_s is None else f", {duration(report.last_step_age_s)} ago"
        share = (last.step + 1) / report.steps
        yield "step", f"{last.step:,} of {report.steps:,} ({share:.1%}), {loss}{age}"
    if (evaluation := report.evaluation) is not None:
        best = report.best_evaluation
        note = (
            "" if best is None or best is evaluation else f"; the best loss is {best.loss:.5g}, after step {best.step}"
        )
        yield "evaluation", f"{evaluation.describe()}{note}"
    unit = report.unit
    if (pace := report.pace) is not None:
        yield "pace", f"{duration(pace.step_s)} a step, {pace.tokens_per_s:,.0f} {unit}/s, over {pace.since}"
        if pace.data_share >= _TOLD_SHARE:
            yield "data wait", f"{pace.data_share:.1%} of the time of these steps, in which samples were read"
    if pace is not None and (earlier := report.earlier) is not None:
        change = f"{pace.step_s / earlier.step_s - 1:+.1%} step time"
        then = f"{duration(earlier.step_s)} a step, {earlier.tokens_per_s:,.0f} {unit}/s"
        yield f"{earlier.since}", f"{then}; {change} since"
    if report.goodput is not None:
        yield "goodput", f"{report.goodput:.1%} of the time went into steps that count; {report.tokens:,.0f} {unit}"
    if report.eta_s is not None:
        yield "ends in", f"{duration(report.eta_s)}, at this pace and goodput"
    if report.generation:
        made = "the initial one" if report.policy == "start" else f"by {report.policy}"
        yield "plan", f"generation {report.generation}, {made}"
    if report.workers:
        yield "workers", describe_workers(report)
    for worker, speed in report.speeds.items():
        where = f", on {report.hosts[worker]}" if worker in report.hosts else ""
        yield "slow", f"worker {worker} at {speed:.2f} of the speed of the others{where}"
    for link, speed in report.link_speeds.items():
        yield "slow link", f"workers {link} at {speed:.2f} of the speed of other links"
    yield from _failure_facts(report)
    yield "checkpoint", _saved(report.checkpoint, report.at)
    if report.checkpoint_error is not None:
        yield "", f"a later one failed: {report.checkpoint_error}"
    if report.snapshot is not None:
        yield "snapshot", _saved(report.snapshot, report.at)


def describe_workers(report: RunReport) -> str:
    """Return "6 live, 1 joining (7)": those that are not live by number."""
    parts = []
    for state, workers in report.workers.items():
        names = "" if state == "live" else f" ({in_ranges(workers)})"
        parts.append(f"{len(workers)} {state}{names}")
    return ", ".join(parts)


def _failure_facts(report: RunReport) -> Iterator[tuple[str, str]]:
    costs = report.costs
    expected = ""
    if report.next_failure_s is not None and report.condition == "training":
        expected = f"; the next is expected in {duration(report.next_failure_s)}"
    if not costs.incidents:
        yield "failures", f"none{expected}"
        return
    lost, incidents = counted(costs.failures, "worker"), counted(costs.incidents, "incident")
    yield "failures", f"{lost} lost in {incidents}, which cost {costs.steps:.1f} steps{expected}"
    causes = [f"{cause} ({number})" for cause, number in islice(costs.causes.items(), _MAX_CAUSES)]
    more = len(costs.causes) - len(causes)
    yield "causes", ", ".join(causes) + (f", and {counted(more, 'other')}" if more else "")
    parts = " + ".join(f"{phase} {seconds:.3f}" for phase, seconds in costs.phases_s.items() if seconds)
    yield "stalls", f"{duration(costs.stall_s)} in all; seconds by phase: {parts}"


def _saved(saved: Saved | None, now: float) -> str:
    return "none" if saved is None else f"of step {saved.step:,}, {duration(max(0.0, now - saved.time))} ago"
