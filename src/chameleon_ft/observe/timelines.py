"""When each operation of a step was run, as the ranks record it for some of the steps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from chameleon_ft.errors import ConfigError
from chameleon_ft.observe.files import open_for_appending, read_lines

__all__ = ["RecordedReduction", "RecordedStep", "TimelineLog", "read_recorded_steps"]


@dataclass(frozen=True, slots=True)
class RecordedReduction:
    """The all-reduce of the gradients of layers `start` up to `stop`; seconds since the step's start on this worker."""

    start: int
    stop: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """One worker's part of one step.

    Attributes:
        time: when the step began on this worker, in Unix seconds; all else is in seconds since then.
        operations: (start, end) of the computing of each operation, in the order of the worker's program.
        reductions: from the issue of each all-reduce to when it was found done.
        vote_s: (start, end) of the vote.
        end_s: when the update was applied.
    """

    generation: int
    step: int
    worker: int
    time: float
    operations: tuple[tuple[float, float], ...]
    reductions: tuple[RecordedReduction, ...]
    vote_s: tuple[float, float]
    end_s: float

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values, in seconds to the microsecond."""
        rounded: dict[str, Any] = json.loads(json.dumps(asdict(self)), parse_float=lambda text: round(float(text), 6))
        return rounded

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RecordedStep:
        """Read what `to_json` gave."""
        return cls(
            generation=data["generation"],
            step=data["step"],
            worker=data["worker"],
            time=data["time"],
            operations=tuple((start, end) for start, end in data["operations"]),
            reductions=tuple(RecordedReduction(**each) for each in data["reductions"]),
            vote_s=(data["vote_s"][0], data["vote_s"][1]),
            end_s=data["end_s"],
        )


class TimelineLog:
    """Appends one worker's recorded steps to a file of lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._has_written = False

    def append(self, step: RecordedStep) -> None:
        """Write one step; on its way to the file system when this returns."""
        self._path.parent.mkdir(exist_ok=True)
        # The first time a line may be cut off that a crash has left unfinished.
        with self._path.open("a", encoding="utf-8") if self._has_written else open_for_appending(self._path) as file:
            file.write(json.dumps(step.to_json()) + "\n")
        self._has_written = True


def read_recorded_steps(folder: Path) -> list[RecordedStep]:
    """Read what all workers of a run recorded, by step, generation and worker.

    Raises ConfigError with the place of what is no such record.
    """
    steps = [step for path in folder.glob("worker-*.jsonl") for step in _steps_of(path)]
    return sorted(steps, key=lambda step: (step.step, step.generation, step.worker))


def _steps_of(path: Path) -> Iterator[RecordedStep]:
    for number, line in enumerate(read_lines(path), start=1):
        try:
            yield RecordedStep.from_json(_Record.model_validate(line).model_dump())
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigError(f"{path}, record {number}: {where}: {first['msg']}; the file is damaged") from None


class _Record(BaseModel):
    """The form of a line, by which a damaged one is told."""

    generation: int
    step: int
    worker: int
    time: float
    operations: list[tuple[float, float]]
    reductions: list[RecordedReduction]
    vote_s: tuple[float, float]
    end_s: float
