"""The check of lines of `metrics.jsonl` and `events.jsonl` for what shows a run, or ends it.

A damaged line is left out, and commands say so. Commands that need all lines refuse such a run: they read the files by
`RunDirectory`, without this check, and if that fails, `damage_named` tells which line is damaged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model

from chameleon_ft.errors import ConfigError, describe_invalid
from chameleon_ft.events.decisions import DecisionEvent
from chameleon_ft.events.records import (
    FailureCostRecord,
    FailureRecord,
    JoinRecord,
    OutcomeRecord,
    RunStatus,
    StepRecord,
)
from chameleon_ft.quantities import counted
from chameleon_ft.storage.files import RunDirectory, raw_lines

_MOST: Final = 1e15  # of numbers that are written out; times are in Unix seconds
_Count: TypeAlias = Annotated[int, Field(ge=0, le=int(_MOST))]
_Positive: TypeAlias = Annotated[int, Field(ge=1, le=int(_MOST))]
_Number: TypeAlias = Annotated[float, Field(ge=-_MOST, le=_MOST)]
_Time: TypeAlias = Annotated[float, Field(ge=0, le=1e11)]  # as far as the calendar goes
_Speed: TypeAlias = Annotated[float, Field(gt=0, le=_MOST)]
_Key: TypeAlias = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
_Counts: TypeAlias = list[_Count]
_Link: TypeAlias = Annotated[list[_Count], Field(min_length=2, max_length=2)]


class _Report(BaseModel):
    model_config = ConfigDict(strict=True)

    reporter: _Count
    peer: _Count | None
    error: str


class _Origin(BaseModel):
    model_config = ConfigDict(strict=True)

    where: str
    micro_batch: _Count
    worker: _Count


_STEP: Final[Mapping[str, Any]] = {
    "step": _Count,
    "loss": float | None,
    "grad_norm": float,
    "lr": float,
    "samples": _Count,
    "tokens": Annotated[float, Field(ge=0, le=_MOST)],
    "step_s": Annotated[float, Field(gt=0, le=_MOST)],
    "workers": _Positive,
    "generation": _Count,
    "time": _Time,
}
_STEP_OPTIONAL: Final[Mapping[str, Any]] = {"is_rest": bool, "is_skipped": bool, "data_wait_s": _Number}
_SLOW: Final[Mapping[str, Any]] = {
    "speed": _Speed,
    "since_step": _Count,
    "step_s": _Number | None,
    "before_step_s": _Number | None,
}
_FIELDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "started": {"pipelines": list[_Counts], "steps": _Positive},
    "plan": {"generation": _Count, "policy": str},
    "prepared": {"generation": _Count, "losses": _Count, "prepare_s": _Number},
    "checkpoint": {"step": _Count},
    "snapshot": {"step": _Count},
    "finished": {"status": RunStatus, "reason": str},
    "respawn": {"worker": _Count, "incarnation": _Count},
    "host_joined": {"workers": _Counts},
    "joined": {"worker": _Count, "host": str},
    "draining": {"workers": _Counts},
    "drained": {"worker": _Count},
    "left": {"worker": _Count},
    "lost": {"worker": _Count},
    "hang": {"worker": _Count},
    "recovered": {"worker": _Count},
    "recovered_link": {"workers": _Link},
    "records_written": {"dropped": _Count},
    "slow": {"worker": _Count, **_SLOW},
    "slow_link": {"workers": _Link, **_SLOW},
    "took_over": {"step": _Count, "generation": _Count},
    "stalled": {"stall_s": _Number},
    "reclaimed": {"term": _Count},
    "waiting": {"worker": _Count, "doing": str, "since_s": _Number},
    "records_late": {"file": str, "reason": str},
    "state_differs": {"undecided": dict[_Key, _Counts], "step": _Count, "agreed": _Count},
    "bad_step": {
        "step": _Count,
        "why": str,
        "is_bad_again": bool,
        "changed": _Counts,
        "origins": list[_Origin],
        "action": Literal["skip", "rollback", "stop", "applied"],
    },
    "empty_step": {"step": _Count},
    "join_failed": {"worker": _Count, "cause": str},
    "blocklisted": {"worker": _Count, "deaths": _Count},
    "decision_failed": {"workers": _Counts, "error": str},
    "discarded": {"generation": _Count, "error": str},
    "drain_failed": {"workers": _Counts, "reason": str},
    "host_lost": {"host": str, "workers": _Counts},
    "host_refused": {"host": str, "reason": str},
    "not_ended": {"worker": _Count, "host": str},
    "checkpoint_late": {"step": _Count},
    "checkpoint_failed": {"step": _Count, "error": str},
    "checkpoint_unreadable": {"step": _Count, "error": str},
    "checkpoint_incomplete": {"step": _Count},
    "checkpoints_left_out": {"step": _Count, "steps": list[_Count]},
    "job_changed": {"step": _Count, "changes": list[str]},
    "snapshot_unreadable": {"step": _Count},
    "snapshots_off": {"reason": str},
    "optimizer_undivided": {"optimizer": str},
    "hint": {"message": str},
    "refused": {"address": str, "reason": str},
    "messages_failed": {"generation": _Count, "reports": list[_Report]},
}
"""Fields that reports on a run need of an event, by its name."""

_OPTIONAL: Final[Mapping[str, Any]] = {
    "host": str | None,
    "message": str | None,
    "error": str | None,
    "reason": str | None,
    "limit_s": _Number,
    "arriving": dict[_Key, str],
    "adopted": _Counts,
    "slow_links": list[_Link],
    "incarnation": _Count,
    "since": _Time | None,
    "doing": str | None,
    "place": str | None,
    "process": str | None,
    "file": str,
    "copy_s": _Number,
}
"""Fields that they take of any event that has them."""

_RECORDS: Final[Mapping[str, Any]] = {
    "failure": FailureRecord,
    "failure_cost": FailureCostRecord,
    "join": JoinRecord,
    "outcome": OutcomeRecord,
}


def readable_events(run: RunDirectory) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the events of a run in the order they were written, and a message about each line that is left out.

    Raises ConfigError if the file cannot be read.
    """
    return _readable("events", run.events_file)


def readable_steps(run: RunDirectory) -> tuple[list[StepRecord], list[str]]:
    """Return the committed steps in the order they were written, and a message about each line that is left out.

    Raises ConfigError if the file cannot be read.
    """
    lines, damaged = _readable("metrics", run.metrics_file)
    return list(map(StepRecord.from_json, lines)), damaged


@contextmanager
def damage_named(run: RunDirectory) -> Iterator[None]:
    """Raise ConfigError in place of an error in the block, if a line of the records of the run is damaged."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        damaged = _readable("metrics", run.metrics_file)[1] + readable_events(run)[1]
        if not damaged:
            raise
        raise ConfigError(f"{damaged[0]}; give a run whose records are whole") from None


def _readable(kind: Literal["metrics", "events"], file: Path) -> tuple[list[dict[str, Any]], list[str]]:
    lines: list[dict[str, Any]] = []
    damaged: list[str] = []
    for number, line in enumerate(raw_lines(file), start=1):
        try:
            lines.append(parse_line(kind, line))
        except ConfigError as error:
            if line.endswith(b"\n"):  # else it is unfinished, as a crash may leave it
                damaged.append(f"{file}, line {number}: {error}")
    return lines, damaged


def describe_damage(damaged: Sequence[str]) -> str:
    """Return how many lines are left out, and the message about the first of them."""
    if len(damaged) == 1:
        return f"a line cannot be read, and is left out: {damaged[0]}"
    return f"{counted(len(damaged), 'line')} cannot be read, and are left out; the first: {damaged[0]}"


def parse_line(kind: Literal["metrics", "events"], line: bytes) -> dict[str, Any]:
    """Return the values of a line. Raises ConfigError if it is not JSON, or a field is missing or of a wrong type."""
    try:
        values: dict[str, Any] = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError("is not JSON; the file is damaged") from None
    try:
        if kind == "metrics":
            _step().validate_json(line)
            return values
        _any_event().validate_json(line)
        record = _RECORDS.get(values["event"])
        if values["event"] == "decision":
            DecisionEvent.model_validate(values)
        elif record is None:
            _event(values["event"] if values["event"] in _FIELDS else "").validate_json(line)
        else:
            _record(record).validate_json(line, strict=True)
    except ValidationError as error:
        why = describe_invalid(error).removeprefix(": ")
        raise ConfigError(f"{why}; the file is damaged, or was written by another version of chameleon") from None
    return values


@cache
def _step() -> TypeAdapter[Any]:
    return _fields_of("step", _STEP, _STEP_OPTIONAL)


@cache
def _any_event() -> TypeAdapter[Any]:
    return _fields_of("event", {"event": str, "time": _Time}, {})


@cache
def _event(name: str) -> TypeAdapter[Any]:
    required = _FIELDS.get(name, {})
    return _fields_of(name, required, {key: value for key, value in _OPTIONAL.items() if key not in required})


@cache
def _record(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _fields_of(name: str, required: Mapping[str, Any], optional: Mapping[str, Any]) -> TypeAdapter[Any]:
    fields: dict[str, Any] = {key: (kind, ...) for key, kind in required.items()}
    fields |= {key: (kind, None) for key, kind in optional.items()}
    return TypeAdapter(create_model(name, __config__=ConfigDict(strict=True), **fields))
