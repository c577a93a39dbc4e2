"""Bad steps, whose loss or gradient is bad also when the step is computed again: they are recorded and counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from chameleon_ft.coordinator.handlers.draft import Draft
from chameleon_ft.coordinator.state.state import Ending
from chameleon_ft.events import kinds
from chameleon_ft.protocol import messages
from chameleon_ft.quantities import counted, listed

MAX_IN_A_ROW: Final = 5
"""Bad steps one after the other, after which the run ends: leaving out samples does not help."""

_ORDER: Final = ("data", "forward", "backward")
# A message names so many places; the record has all.
_NAMED: Final = 3
_ACTIONS: Final = {
    "skip": "its samples are left out",
    "rollback": "all return to the newest snapshot or checkpoint, and leave its samples out",
    "stop": "the run ends, with a checkpoint of the state before it",
}


def record_all(draft: Draft) -> None:
    """Record the bad steps that not all workers have reported, because some are lost."""
    for step in sorted(draft.state.health.reporting):
        record(draft, step)


def record(draft: Draft, step: int) -> None:
    """Record a bad step that workers have reported, and forget the reports."""
    reports = draft.state.health.reports_of(step)
    draft.state = replace(draft.state, health=draft.state.health.without_reports_of(step))
    report = next(iter(reports.values()))
    action = draft.state.settings.health.on_bad_step if report.is_bad_again else "applied"
    draft.record(
        kinds.BadStep(
            step=step,
            why=report.why,
            is_bad_again=report.is_bad_again,
            action=action,
            changed=tuple(worker for worker, each in sorted(reports.items()) if each.has_changed),
            origins=tuple(
                kinds.BadOrigin(where, micro_batch, worker, (start, stop))
                for micro_batch, start, stop, where, worker in _origins(reports)
            ),
            message=describe(reports, action=action),
        )
    )


def describe(reports: Mapping[int, messages.BadStep], *, action: str) -> str:
    """Describe a bad step and what follows in one sentence."""
    report = next(iter(reports.values()))
    text = f"{report.why} in step {report.step}"
    if not report.is_bad_again:
        changed = [worker for worker, each in sorted(reports.items()) if each.has_changed]
        who = f"the contribution of {listed('worker', changed)} differed" if changed else "no worker is known"
        return f"{text}, but not when it was computed again, so the hardware is at fault: {who}"
    places = [
        f"the {where} of micro-batch {micro_batch} in layers {start}-{stop - 1} on worker {worker}"
        for micro_batch, start, stop, where, worker in _origins(reports)
    ]
    first = f", first in {', '.join(places[:_NAMED])}" if places else ""
    more = f" and {counted(len(places) - _NAMED, 'more place')}" if len(places) > _NAMED else ""
    return f"{text}, also when it was computed again{first}{more}; {_ACTIONS[action]}"


def _origins(reports: Mapping[int, messages.BadStep]) -> list[tuple[int, int, int, str, int]]:
    """Return the places where values became bad, with their workers: those of the data first, of a backward last."""
    found = [(*origin, worker) for worker, report in sorted(reports.items()) for origin in report.origins]
    return sorted(found, key=lambda place: (_ORDER.index(place[3]), place))


def skipped(draft: Draft, step: int) -> None:
    """Count a step that was skipped; end the run with a checkpoint if there are too many in a row."""
    health = draft.state.health
    known = health.skipped | {step}
    draft.state = replace(draft.state, health=replace(health, skipped=known))
    in_a_row = set(range(step - MAX_IN_A_ROW + 1, step + 1))
    if not in_a_row <= known or draft.state.ending is not None:
        return
    reason = (
        f"{counted(MAX_IN_A_ROW, 'step')} in a row were bad, at last step {step}: leaving samples out does not help; "
        "lower the learning rate, or clip the gradient"
    )
    draft.state = replace(draft.state, ending=Ending("failed"), health=replace(draft.state.health, ending=reason))
    draft.tell_live(messages.Finish())
