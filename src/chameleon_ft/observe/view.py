"""What a user sees of a run while it trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from chameleon_ft.observe.records import FailureRecord, JoinRecord, OutcomeRecord, StepRecord, Summary

__all__ = ["NullView", "RunInfo", "View"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What is trained, on what, by whom."""

    model: str
    """The model in a few words."""
    data: str
    """The data in a few words."""
    run: str
    """The run directory."""
    pipelines: tuple[tuple[int, ...], ...]
    """The workers of each pipeline, by stage."""
    stages: tuple[str, ...]
    """The layers of each stage, such as "0-3"."""
    first_step: int
    steps: int
    """Steps of the whole run."""
    generation: int
    checkpoint: int | None = None
    """Step of the checkpoint that the state is from; None for fresh weights."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return dataclasses.asdict(self)


class View(Protocol):
    """Shows what a Recorder records. Called from one thread."""

    def started(self, info: RunInfo) -> None:
        """Training begins or goes on."""

    def step(self, record: StepRecord) -> None:
        """A step is committed."""

    def failure(self, record: FailureRecord) -> None:
        """A worker was lost, and what to do about it is done."""

    def outcome(self, record: OutcomeRecord) -> None:
        """It is known what came of a decision."""

    def join(self, record: JoinRecord) -> None:
        """There was a stop for workers that have come."""

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Something else happened."""

    def finished(self, summary: Summary) -> None:
        """The run has ended."""


class NullView:
    """Shows nothing."""

    def started(self, info: RunInfo) -> None:
        """Show nothing."""

    def step(self, record: StepRecord) -> None:
        """Show nothing."""

    def failure(self, record: FailureRecord) -> None:
        """Show nothing."""

    def outcome(self, record: OutcomeRecord) -> None:
        """Show nothing."""

    def join(self, record: JoinRecord) -> None:
        """Show nothing."""

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Show nothing."""

    def finished(self, summary: Summary) -> None:
        """Show nothing."""
