"""Descriptions of records, as the terminal, `chameleon watch` and the page show them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from chameleon_ft.events.lines import Record
from chameleon_ft.events.records import (
    DETECTED_BY,
    FailureCostRecord,
    FailureRecord,
    JoinRecord,
    OutcomeRecord,
    StepRecord,
)
from chameleon_ft.quantities import counted, data_size, duration, in_ranges, listed

PHASES: Final[Mapping[str, str]] = {
    "detect_s": "detect",
    "stop_s": "stop",
    "decide_s": "decide",
    "regroup_s": "regroup",
    "transfer_s": "transfer",
}
"""Fields of a stall's phases, in their order, and the names of the phases."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A message about a record: one line, and facts below it, by name."""

    title: str
    tone: Literal["bad", "good", "note", "warning"]
    facts: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


def notices_of(record: Record) -> tuple[Notice, ...]:
    """Return the messages about a record; none about a step, or an event without a message."""
    match record:
        case FailureRecord():
            return (_failure(record),)
        case JoinRecord():
            return (_join(record),)
        case FailureCostRecord():
            predicted = "" if record.predicted_steps is None else f" (predicted {record.predicted_steps:.2f})"
            steps = record.failure_cost_steps
            text = f"step {record.step} took {abs(steps):.2f} steps {'less' if steps < 0 else 'longer'}{predicted}"
            return (Notice(text, "note"),)
        case OutcomeRecord():
            text = f"after {counted(record.steps, 'step')} of {record.policy}: {record.describe()}"
            warnings = () if record.warning is None else (Notice(record.warning, "warning"),)
            return Notice(text, "note"), *warnings
        case StepRecord():
            return ()
        case _:
            return (Notice(f"{record.name}: {record.message}", "note"),) if record.message else ()


def _failure(record: FailureRecord) -> Notice:
    facts = [("cause", record.cause), ("detected by", DETECTED_BY[record.noticed_by])]
    if record.lost_layers:
        facts.append(("lost", f"the last holder of layers {in_ranges(record.lost_layers)}"))
    facts.append(("action", f"{record.policy}: {record.action}"))
    if record.repeated_s:
        facts.append(("repeated", f"{duration(record.repeated_s)} of work of step {record.step}"))
    return Notice(f"worker {record.worker} lost in step {record.step}", "bad", (*facts, *_continued(record)))


def _join(record: JoinRecord) -> Notice:
    facts = [("action", f"{record.policy}: {record.action}")]
    if record.spares:
        facts.append(("spare", listed("worker", record.spares)))
    if record.workers or record.spares:
        title = f"{listed('worker', record.workers)} joined before step {record.resume_step}"
    elif record.drained:
        title = f"without {listed('worker', record.drained)} from step {record.resume_step}"
    else:
        title = f"a better plan from step {record.resume_step}"
    return Notice(title, "good", (*facts, *_continued(record)))


def _continued(record: FailureRecord | JoinRecord) -> tuple[tuple[str, str], ...]:
    """Describe the transfer, the stall and the point of resumption."""
    moved = (("moved", _describe_transfer(record)),) if record.moved_bytes else ()
    phases = {name: getattr(record, field, None) for field, name in PHASES.items()}
    if record.transfer_s < 0.0005:
        del phases["transfer"]
    parts = " + ".join(f"{name} {seconds:.3f}" for name, seconds in phases.items() if seconds is not None)
    stall = f"{record.stall_s:.3f} s = {parts}"
    return *moved, ("stall", stall), ("resumed", f"at step {record.resume_step} in generation {record.generation}")


def _describe_transfer(record: FailureRecord | JoinRecord) -> str:
    if isinstance(record, JoinRecord) and record.migrate_s:
        waves = f" and {record.waves} waves" if record.waves > 1 else ""
        return f"{data_size(record.moved_bytes)} during training in {duration(record.migrate_s)}{waves}"
    rate = f", {data_size(record.moved_bytes / record.transfer_s)}/s" if record.transfer_s else ""
    rounds, time = counted(record.rounds, "round"), duration(record.transfer_s)
    return f"{data_size(record.moved_bytes)} in {rounds} and {time}{rate}"
