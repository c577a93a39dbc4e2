"""The content of the page, as JSON values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from chameleon_ft.errors import ConfigError
from chameleon_ft.events.base import Event
from chameleon_ft.events.records import FailureRecord
from chameleon_ft.quantities import in_ranges
from chameleon_ft.report.comparison import GenerationComparison, compare_generations
from chameleon_ft.report.facts import describe_damage, facts_of
from chameleon_ft.report.picture import Lane
from chameleon_ft.report.story import notices_of
from chameleon_ft.report.view import RunReport, RunView
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.plans import readable_generation_plans
from chameleon_ft.storage.timelines import readable_recorded_steps

MAX_POINTS: Final = 600
"""Points of a curve when a page is opened."""
_MAX_LANES: Final = 64
"""Workers whose schedule is drawn."""


def overview(report: RunReport, damaged: Sequence[str]) -> dict[str, Any]:
    """Return the report, with a description of its facts and of the damaged lines that are left out."""
    values = report.to_json()
    values["workers"] = {state: in_ranges(workers) for state, workers in report.workers.items()}
    values["counts"] = {state: len(workers) for state, workers in report.workers.items()}
    del values["hosts"]
    facts = facts_of(report)
    if damaged:
        facts = (*facts, ("damaged", describe_damage(damaged)))
    return {**values, "facts": facts}


def evaluations(view: RunView) -> dict[str, list[float | None]]:
    """Return the steps and the results of the evaluations, by name; of many, a part."""
    found = list(view.evaluations.values())
    found = found[:: -(-len(found) // MAX_POINTS) or 1]
    columns: dict[str, list[float | None]] = {
        "step": [each.step for each in found],
        "loss": [each.loss for each in found],
    }
    for name in {name: None for each in found for name in each.metrics}:
        columns[name] = [each.metrics.get(name) for each in found]
    return columns


def grid(view: RunView, report: RunReport) -> dict[str, Any]:
    """Return the workers with their hosts, states and layers."""
    plan = view.plan
    ranges = {} if plan is None else plan.plan.placement.ranges
    rows = [
        {
            "worker": worker,
            "host": report.hosts.get(worker, ""),
            "state": worker_state,
            "layers": [(each.start, each.stop) for each in ranges.get(worker, ())],
            "arriving": view.arriving.get(worker, ""),
        }
        for worker_state, workers in report.workers.items()
        for worker in workers
    ]
    rows.sort(key=lambda row: row["worker"])
    return {"num_layers": 0 if plan is None else plan.plan.placement.num_layers, "workers": rows}


def news(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Return what the terminal prints of these events, with their times."""
    return [{"time": event.time, **notice.to_json()} for event in events for notice in notices_of(event)]


def incidents(view: RunView) -> list[dict[str, Any]]:
    """Return the incidents, newest first: the lost workers, the decision with its candidates, and the outcome.

    Decisions without a failure, for newcomers or slow workers, are among them.
    """
    decisions = {story.number: story.to_json() for story in view.decisions.stories()}
    failures = [event for event in view.events if isinstance(event, FailureRecord)]
    found: list[dict[str, Any]] = []
    for diagnosis in view.incidents.diagnoses(view.decisions):
        decision = None if diagnosis.decision is None else decisions.pop(diagnosis.decision, None)
        workers = {culprit.worker for culprit in diagnosis.culprits}
        own = [each for each in failures if each.worker in workers and each.step == diagnosis.step]
        time = min((culprit.since for culprit in diagnosis.culprits), default=0.0)
        found.append({"time": time, "diagnosis": diagnosis.to_json(), "decision": decision, "told": news(own)})
    found += [
        {"time": decision["time"], "diagnosis": None, "decision": decision, "told": []}
        for decision in decisions.values()
    ]
    return sorted(found, key=lambda each: float(each["time"]), reverse=True)


def schedule(run: RunDirectory) -> dict[str, Any] | None:
    """Return the newest recorded step, measured and predicted, and what is damaged; None if none was recorded.

    Raises ConfigError if all of them are damaged, or a file cannot be read.
    """
    plans, damaged = readable_generation_plans(run.plans)
    recorded, damaged_lines = readable_recorded_steps(run.timelines)
    damaged += damaged_lines
    for generation in reversed(plans):
        own = [each for each in recorded if each.generation == generation]
        try:
            found = compare_generations(plans, own)
        except ConfigError as error:
            damaged.append(str(error))
            continue
        if found:
            return {**_compared(found[-1]), "damaged": damaged}
    if damaged:
        raise ConfigError(damaged[0])
    return None


def _compared(comparison: GenerationComparison) -> dict[str, Any]:
    step = comparison.steps[-1]
    lanes = [Lane.predicted(comparison.predicted), step.lane]
    workers = sorted(comparison.plan.plan.workers)
    return {
        "step": step.step,
        "generation": step.generation,
        "predicted_s": comparison.predicted.step_s,
        "measured_s": step.step_s,
        "costs_from": comparison.costs_from,
        "left_out": max(0, len(workers) - _MAX_LANES),
        "workers": workers[:_MAX_LANES],
        "lanes": [_lane(lane, workers[:_MAX_LANES]) for lane in lanes],
    }


def _lane(lane: Lane, workers: Sequence[int]) -> dict[str, Any]:
    operations = lane.operations()
    return {
        "name": lane.name,
        "step_s": lane.step_s,
        "operations": {
            str(worker): [
                (each.operation.kind.value, each.operation.micro_batch, round(each.start_s, 6), round(each.end_s, 6))
                for each in operations.get(worker, ())
            ]
            for worker in workers
        },
        "reductions": [
            (each.worker, round(each.start_s, 6), round(each.end_s, 6))
            for each in lane.reductions
            if each.worker in set(workers)
        ],
    }


def what_if(view: RunView, report: RunReport) -> list[dict[str, Any]]:
    """Return for each host what its loss would take: its workers, and layers that no other worker holds."""
    plan = view.plan
    if plan is None:
        return []
    placement, hosts = plan.plan.placement, report.hosts
    by_host: dict[str, list[int]] = {}
    for worker in plan.plan.workers:
        by_host.setdefault(hosts.get(worker, f"worker {worker}"), []).append(worker)
    held: dict[int, set[int]] = {layer: set() for layer in range(placement.num_layers)}
    for worker, ranges in placement.ranges.items():
        for layers in ranges:
            for layer in layers:
                held[layer].add(worker)
    found = []
    for host, workers in sorted(by_host.items(), key=lambda each: min(each[1])):
        gone = [layer for layer, holders in held.items() if holders and holders <= set(workers)]
        found.append({"host": host, "workers": in_ranges(workers), "count": len(workers), "layers": in_ranges(gone)})
    return found
