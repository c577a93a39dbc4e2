"""The summary of a run, derived from its records."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from chameleon_ft.events.base import Event
from chameleon_ft.events.kinds import SampleLeftOut
from chameleon_ft.events.records import FailureCostRecord, FailureRecord, OutcomeRecord, RunStatus, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Totals of a run, derived from its records; docs/files.md defines the fields."""

    status: RunStatus
    reason: str
    steps: int
    first_step: int = 0
    final_loss: float | None
    samples_seen: int
    samples_lost: int
    samples_repeated: int
    samples_skipped: int = 0
    failures: tuple[FailureRecord, ...]
    median_step_s_before: float | None
    median_step_s_after: float | None
    outcomes: tuple[OutcomeRecord, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        records = {name: [each.values() for each in getattr(self, name)] for name in ("failures", "outcomes")}
        return {**asdict(self), **records}


def failures_in(events: Iterable[Event]) -> list[FailureRecord]:
    """Return the failures among events, in their order, with what they cost."""
    events = list(events)
    costs = {
        generation: event.failure_cost_steps
        for event in events
        if isinstance(event, FailureCostRecord)
        for generation in event.incident_generations
    }
    return [
        each if each.policy == "none" else replace(each, failure_cost_steps=costs.get(each.generation))
        for each in events
        if isinstance(each, FailureRecord)
    ]


def summarize(
    steps: Iterable[StepRecord],
    events: Iterable[Event],
    *,
    samples_before: Callable[[int], int],
    first_step: int = 0,
    status: RunStatus,
    reason: str,
) -> Summary:
    """Derive the summary from the records in the order they were written.

    `samples_before` returns the samples of all steps before one, and `first_step` is that of a forked run. A step that
    was recorded twice was trained again after a return to a checkpoint; its last record counts.
    """
    steps, events = list(steps), list(events)
    failures = failures_in(events)
    committed = {record.step: record for record in steps}
    last = max(committed, default=first_step - 1)
    seen = sum(record.samples for record in committed.values())
    skipped = sum(
        samples_before(step + 1) - samples_before(step) for step, record in committed.items() if record.is_skipped
    )
    missing = (each for each in events if isinstance(each, SampleLeftOut) and not each.is_replaced)
    left_out = {(each.step, each.epoch, each.sample) for each in missing}
    skipped += sum(step in committed and not committed[step].is_skipped for step, *_ in left_out)
    losses = [committed[step].loss for step in sorted(committed) if not committed[step].is_skipped]
    interrupted = {failure.step for failure in failures}
    first_failure = min(interrupted, default=last + 1)
    return Summary(
        status=status,
        reason=reason,
        steps=len(committed),
        first_step=first_step,
        final_loss=losses[-1] if losses else None,
        samples_seen=seen,
        samples_lost=samples_before(last + 1) - samples_before(first_step) - seen - skipped,
        samples_repeated=sum(record.samples for record in steps) - seen,
        samples_skipped=skipped,
        failures=tuple(failures),
        median_step_s_before=_median(r.step_s for r in steps if r.step < first_failure),
        median_step_s_after=_median(
            r.step_s for r in steps if r.step > first_failure and r.step not in interrupted and not r.is_rest
        ),
        outcomes=tuple(each for each in events if isinstance(each, OutcomeRecord)),
    )


def _median(values: Iterable[float]) -> float | None:
    return statistics.median(found) if (found := list(values)) else None
