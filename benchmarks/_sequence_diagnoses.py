"""Faults that were done to a run, beside what `chameleon diagnose` says of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from benchmarks._sequence_strikes import Struck
from chameleon_ft.events.lines import parse_event
from chameleon_ft.report.conditions import Conditions

_Events = Sequence[Mapping[str, Any]]

_CONDITIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "kill coordinator": ("took_over",),
    "kill background process": ("background_replaced",),
    "stop background process": ("background_replaced",),
    "kill agent": ("host_lost",),
    "fill disk": ("records_late", "checkpoint_failed"),
    "cut off coordinator": ("reclaimed",),
}
"""Strike -> the conditions that tell of it. Strikes that a run may get over without a sign are left out."""


def diagnosed(events: _Events, faults: _Events, struck: Sequence[Struck]) -> Iterator[tuple[str, str]]:
    """Yield (fault, what it is called), of which both are equal if the diagnosis is right.

    Args:
        events: of the run.
        faults: that were injected.
        struck: strikes that have hit something.
    """
    failures = [event for event in events if event["event"] == "failure"]
    ended = max(event.get("time", 0.0) for event in events)
    for fault in faults:
        if fault["kind"] not in ("kill", "hang", "disconnect", "stop"):
            continue  # not every worker that is slow or has spoiled state is lost
        after = (each for each in failures if each["worker"] == fault["worker"] and each["time"] >= fault["time"])
        failure = next(after, None)
        if failure is not None:  # otherwise the run has ended before
            yield "hang" if fault["kind"] == "stop" else fault["kind"], _name_of(failure)
    conditions = Conditions()
    for event in events:
        conditions.add(parse_event(json.dumps(event).encode()))
    found = conditions.found()
    for each in struck:
        name = f"{each.strike.kind} {each.strike.target}"
        if each.strike.target == "link":
            causes = {_name_of(failure) for failure in failures if each.began <= failure["time"] <= each.ended + 5.0}
            yield "cut link", ", ".join(sorted(causes)) or "nothing"
        elif name in _CONDITIONS and each.ended < ended - 1.0:
            told = {condition.kind for condition in found if each.began <= condition.since <= each.ended + 10.0}
            is_told = not told.isdisjoint(_CONDITIONS[name])
            yield name, name if is_told else ", ".join(sorted(told)) or "nothing"


def _name_of(failure: Mapping[str, Any]) -> str:
    cause = failure["cause"]
    if failure["noticed_by"] == "peer" and ("no data passes" in cause or "cannot connect" in cause):
        return "cut link"
    if "stopped" in cause or cause.startswith("hung"):
        return "hang"
    if "SIGKILL" in cause:
        return "kill"
    return "disconnect" if "connection" in cause else str(cause)
