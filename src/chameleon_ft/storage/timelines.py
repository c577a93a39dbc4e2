"""Start and end of each operation, which the ranks record for some of the steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

from chameleon_ft.errors import ConfigError, describe_invalid
from chameleon_ft.storage.file_queue import FileQueue
from chameleon_ft.storage.files import parsed_lines

_LONGEST_BYTES: Final = 4 << 20

_MAX_TIME: Final = 1e11
_Number: TypeAlias = Annotated[int, Field(ge=0)]
_Seconds: TypeAlias = Annotated[float, Field(ge=-_MAX_TIME, le=_MAX_TIME)]

StepPart: TypeAlias = Literal["whole", "interrupted", "rest"]
"""A step from its beginning to its update, or until a failure interrupted it, or from then on."""


@dataclass(frozen=True, slots=True)
class RecordedReduction:
    """The all-reduce of the gradients of layers `start` up to `stop`; seconds since the step's start on this worker."""

    start: _Number
    stop: _Number
    start_s: _Seconds
    end_s: _Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """One worker's part of one step.

    Attributes:
        time: start of the step on this worker, in Unix seconds; other times are in seconds since then.
        operations: (start, end) of the computation of each operation, in the order of the worker's program.
        reductions: from the issue of each all-reduce until it was observed complete.
        vote_s: (start, end) of the vote.
        end_s: when the update was applied, or the step was interrupted.
        part: See `StepPart`.
        kinds: a letter for each operation, as in F, B, I, W, if the program is not the one of the generation's plan.
    """

    generation: _Number
    step: _Number
    worker: _Number
    time: _Seconds
    operations: tuple[tuple[_Seconds, _Seconds], ...]
    reductions: tuple[RecordedReduction, ...]
    vote_s: tuple[_Seconds, _Seconds]
    end_s: Annotated[float, Field(ge=0, le=_MAX_TIME)]
    part: StepPart = "whole"
    kinds: Annotated[str, Field(pattern=r"^[FBIW]*$")] = ""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, times rounded to microseconds."""
        rounded: dict[str, Any] = json.loads(json.dumps(asdict(self)), parse_float=lambda text: round(float(text), 6))
        return rounded


class TimelineLog:
    """Appends one worker's recorded steps to a file of lines. Training does not wait for a disk, nor depend on it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files = FileQueue(longest_bytes=_LONGEST_BYTES)
        self._deferred: list[RecordedStep] = []

    def defer(self, step: RecordedStep) -> None:
        """Write a step with the next one, because a recovery must not wait for it."""
        self._deferred.append(step)

    def append(self, step: RecordedStep) -> None:
        """Write one step."""
        steps, self._deferred = [*self._deferred, step], []
        self._write(steps)

    def write_deferred(self) -> None:
        """Write the steps that wait for another one, because none follows."""
        steps, self._deferred = self._deferred, []
        if steps:
            self._write(steps)

    def _write(self, steps: Sequence[RecordedStep]) -> None:
        self._files.append(self._path, "".join(json.dumps(each.to_json()) + "\n" for each in steps))


def read_recorded_steps(folder: Path) -> list[RecordedStep]:
    """Read the recorded steps of all workers of a run, sorted by step, generation and worker.

    Raises ConfigError that names the file and the line of an invalid record.
    """
    steps, damaged = readable_recorded_steps(folder)
    if damaged:
        raise ConfigError(damaged[0])
    return steps


def readable_recorded_steps(folder: Path) -> tuple[list[RecordedStep], list[str]]:
    """As `read_recorded_steps`, but leave out the invalid records; also return what is wrong with each."""
    steps: list[RecordedStep] = []
    damaged: list[str] = []
    for path in folder.glob("worker-*.jsonl"):
        found, wrong = parsed_lines(path, _recorded_step)
        steps += found
        damaged += [f"{each}; the file is damaged" for each in wrong]
    return sorted(steps, key=lambda step: (step.step, step.generation, step.worker)), damaged


_adapter: Final = cache(partial(TypeAdapter, RecordedStep))


def _recorded_step(line: bytes) -> RecordedStep:
    """Return the step of a line. Raises ConfigError if it is invalid."""
    try:
        step = _adapter().validate_python(json.loads(line))
    except ValidationError as error:
        raise ConfigError(describe_invalid(error)) from None
    except (ValueError, RecursionError):
        raise ConfigError("is not JSON") from None
    if why := _contradiction(step):
        raise ConfigError(why)
    return step


def _contradiction(step: RecordedStep) -> str | None:
    """Return why the parts of a record cannot be true together; None if they can."""
    if step.part == "whole" and not step.end_s:
        return "a whole step takes no time"
    if step.part != "whole" and len(step.kinds) != len(step.operations):
        return f"{len(step.operations)} operations of {len(step.kinds)} kinds"
    if any(each.start >= each.stop for each in step.reductions):
        return "a reduction of no layers"
    return None
