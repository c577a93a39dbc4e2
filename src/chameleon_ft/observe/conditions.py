"""Conditions of a run that are no loss.

These are slow workers, coordinators that were replaced or held up, late records, and workers that wait for a disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from chameleon_ft.quantities import duration

__all__ = ["Condition", "conditions"]

_ENDED_BY: Final[Mapping[str, str]] = {"slow": "recovered", "records_late": "records_written"}
_KINDS: Final = frozenset({*_ENDED_BY, "took_over", "stalled", "waiting"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One condition, from its detection on.

    Attributes:
        kind: name of the event that reports it.
        subject: the worker, the coordinator, or the file.
        since: when it was noticed, in Unix seconds.
        lasted_s: seconds until its end; None if it has not ended, or happened at once.
        why: what was observed.
        action: what was done.
    """

    kind: str
    subject: str
    since: float
    lasted_s: float | None
    why: str
    action: str

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


def conditions(events: Sequence[Mapping[str, Any]]) -> tuple[Condition, ...]:
    """Find the conditions in the events of a run, in their order."""
    return tuple(
        _condition(event, events[index + 1 :])
        for index, event in enumerate(events)
        if event["event"] in _KINDS and not _is_repeated(event, events[index + 1 :])
    )


def _is_repeated(event: Mapping[str, Any], later: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a wait is reported once more, when it has become twice as long."""
    if event["event"] != "waiting":
        return False
    same = (each for each in later if each["event"] == "waiting" and each["worker"] == event["worker"])
    after = next(same, None)
    return after is not None and after["doing"] == event["doing"] and after["since_s"] == 2 * event["since_s"]


def _condition(event: Mapping[str, Any], later: Sequence[Mapping[str, Any]]) -> Condition:
    kind, worker = event["event"], event.get("worker")
    end = next((e for e in later if e["event"] == _ENDED_BY.get(kind) and e.get("worker") == worker), None)
    match kind:
        case "slow":
            subject = f"worker {worker}"
            why = f"it computes at {event['speed']:.2f} of the speed of others since step {event['since_step']}"
            if event["step_s"] is not None:
                why += f"; a step takes {duration(event['step_s'])} instead of {duration(event['before_step_s'])}"
            action = _answer_to_slowness(later if end is None else later[: later.index(end)])
        case "took_over":
            subject = "the coordinator"
            why = "the one before was lost"
            action = f"another one continued in step {event['step']} and generation {event['generation']}"
        case "stalled":
            subject = "the coordinator"
            why = f"it did not run for {duration(event['stall_s'])}"
            action = "no worker was given up for that"
        case "waiting":
            subject = f"worker {worker}"
            why = f"it has been {event['doing']} for {duration(event['since_s'])} or longer"
            action = "none; there is no limit to that"
        case _:
            subject = event["file"]
            why = event["reason"]
            action = "training went on; the records waited in memory"
            if end is not None:
                lost = f", but for {end['dropped']} lines that are lost" if end["dropped"] else ""
                action += f" and are written{lost}"
    lasted_s = None if end is None else end["time"] - event["time"]
    return Condition(kind=kind, subject=subject, since=event["time"], lasted_s=lasted_s, why=why, action=action)


def _answer_to_slowness(later: Sequence[Mapping[str, Any]]) -> str:
    """Return what the run did about a slow worker, from the events until it recovered."""
    for index, event in enumerate(later):
        if event["event"] == "stay":
            return "the plan stays as it is, because no other is better"
        if event["event"] == "decision" and event["trigger"] == "slow":
            joins = [each for each in later[index:] if each["event"] == "join"]
            if joins:
                return f"{joins[0]['policy']}: {joins[0]['action']}"
    return "none"
