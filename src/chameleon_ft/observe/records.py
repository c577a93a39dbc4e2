"""What a run leaves behind: one record per committed step and per failure, and the summary derived from them."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

from chameleon_ft.errors import ConfigError
from chameleon_ft.observe.accuracy import describe_untrusted
from chameleon_ft.quantities import duration

__all__ = [
    "DETECTED_BY",
    "FailureRecord",
    "JoinRecord",
    "NoticedBy",
    "OutcomeRecord",
    "RunStatus",
    "StepRecord",
    "Summary",
    "summarize",
]

NoticedBy = Literal["child", "connection", "heartbeat", "watchdog", "peer", "self"]
"""The detection paths: process reaped, connection closed, heartbeats stopped, no progress, a peer's message failed,
and the worker's own last words."""

DETECTED_BY: Final[Mapping[NoticedBy, str]] = {
    "child": "the end of its process",
    "connection": "the end of its control connection",
    "heartbeat": "missing heartbeats",
    "watchdog": "lack of progress",
    "peer": "a peer whose message to or from it failed",
    "self": "its own report of an error",
}
"""The detection paths in words."""

RunStatus = Literal["finished", "interrupted", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """A flat record that goes to and comes from a line of JSON."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the record that `to_json` gave; keys that are not its fields are passed over.

        Raises ConfigError where a field is missing: the file is not one of ours, or of another version.
        """
        try:
            return cls(
                **{
                    field.name: _frozen(data[field.name])
                    for field in dataclasses.fields(cls)
                    if field.name in data or field.default is dataclasses.MISSING
                }
            )
        except KeyError as error:
            raise ConfigError(
                f"a {cls.__name__} without {error}: the file was written by another version of chameleon or is damaged"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord(_Record):
    """One committed optimizer step."""

    step: int
    """Number of the step, counted from 0."""
    loss: float
    """Mean over the loss terms of the global batch, before the update."""
    grad_norm: float
    """Global norm of the gradient before clipping."""
    lr: float
    samples: int
    """Samples whose loss is in the gradient, counted by the workers that ran them."""
    tokens: int
    """Loss terms of the global batch; for a language model its target tokens."""
    step_s: float
    """Wall time of the step in seconds, from its first operation to its commit."""
    workers: int
    """Workers that took part."""
    generation: int

    def __post_init__(self) -> None:
        if self.step < 0 or self.step_s <= 0 or self.workers < 1:
            raise ValueError(f"a step needs step >= 0, step_s > 0 and workers >= 1; got {self}")

    @property
    def tokens_per_s(self) -> float:
        """Loss terms per second of wall time."""
        return self.tokens / self.step_s

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, with the rate that follows from them."""
        return {**dataclasses.asdict(self), "tokens_per_s": self.tokens_per_s}


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord(_Record):
    """One lost worker, from the moment it failed to the first operation that was run again. Times are in seconds."""

    worker: int
    step: int
    """Step that was running."""
    cause: str
    """What happened to the worker, as far as it is known: "SIGKILL", "exit code 1", "hung"."""
    noticed_by: NoticedBy
    detect_s: float | None
    """From the failure to its detection; None where the moment of the failure is not known."""
    stop_s: float
    """From the detection until every survivor had left its operation."""
    decide_s: float
    """From there until the new plan was chosen."""
    regroup_s: float
    """From there until the first operation of the step was run again, but for `transfer_s`."""
    transfer_s: float = 0.0
    """In which layers moved to other workers, until all had confirmed that they hold theirs."""
    stall_s: float
    """All of it; without `detect_s` where that is None."""
    policy: str
    """What was chosen: "reroute", "checkpoint", or "stop" where the run had to end."""
    action: str
    """The choice in words, for the banner."""
    generation: int
    """Generation that training went on with."""
    resume_step: int
    """Step that training went on with; lower than `step` after a fall back to a checkpoint."""
    lost_layers: tuple[int, ...] = ()
    """Layers that lost their last holder."""
    moved_bytes: int = 0
    """State that workers received from others, in bytes."""
    rounds: int = 0
    """In which it was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeRecord(_Record):
    """What came of a decision, beside what was predicted of it. Times are in seconds."""

    generation: int
    """Generation that the decision led to."""
    policy: str
    """What was chosen."""
    steps: int
    """Steps committed under it until now: ten, or fewer where something else came before."""
    predicted_step_s: float | None
    """None where nothing was predicted."""
    measured_step_s: float
    """Median of these steps; the first one is left out if there are others."""
    predicted_stall_s: float | None
    measured_stall_s: float
    """From the last commit before it to the first operation after it, as it was predicted; repeated steps on top."""

    @property
    def step_error(self) -> float | None:
        """By which share of the prediction the step took longer."""
        return _relative(self.measured_step_s, self.predicted_step_s)

    @property
    def stall_error(self) -> float | None:
        """By which share of the prediction the stall took longer."""
        return _relative(self.measured_stall_s, self.predicted_stall_s)

    @property
    def warning(self) -> str | None:
        """That the prediction is too far off to be trusted, and what to do; None if it is not."""
        return describe_untrusted(
            step_error=self.step_error, stall_error=self.stall_error, stall_is_restart=self.policy == "restart"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, with what follows from them."""
        derived = {"step_error": self.step_error, "stall_error": self.stall_error, "warning": self.warning}
        return {**dataclasses.asdict(self), **derived}

    def describe(self) -> str:
        """Write "step 125 ms (predicted 123 ms, +1.6%), stall 100 ms (predicted 200 ms, -50.0%)"."""
        step = _compared(self.measured_step_s, self.predicted_step_s, self.step_error)
        return f"step {step}, stall {_compared(self.measured_stall_s, self.predicted_stall_s, self.stall_error)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRecord(_Record):
    """What became of workers that have come, in the stop that they were reckoned with in; times are in seconds.

    That is one at the end of a step, for them; or one that a loss or a failed message made before it came to that.
    """

    workers: tuple[int, ...]
    """Those that the new plan has a place for."""
    spares: tuple[int, ...]
    """Those that it has none for."""
    stop_s: float
    """From the moment when everyone was told to stop until all had left their operations."""
    decide_s: float
    """From there until the new plan was chosen."""
    regroup_s: float
    """From there until the first operation, but for `transfer_s`."""
    transfer_s: float
    """In which layers moved to other workers, until all had confirmed that they hold theirs."""
    stall_s: float
    """All of it."""
    policy: str
    """What was chosen."""
    action: str
    """The choice in words, for the banner."""
    generation: int
    """Generation that training went on with."""
    resume_step: int
    """Step that training went on with."""
    moved_bytes: int
    """State that workers received from others, in bytes."""
    rounds: int
    """In which it was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(_Record):
    """What a run did, derived from its records. Times are in seconds."""

    status: RunStatus
    reason: str
    """Why the run ended, in words."""
    steps: int
    """Steps committed, each counted once."""
    final_loss: float | None
    samples_seen: int
    """Samples of the committed steps."""
    samples_lost: int
    """Samples up to the last committed step that are in no committed step."""
    samples_repeated: int
    """Samples of steps that were trained again after a fall back to a checkpoint."""
    failures: tuple[FailureRecord, ...]
    median_step_s_before: float | None
    """Median step time before the first failure; of all steps where there was none."""
    median_step_s_after: float | None
    """Median step time after the first failure, without the steps that a failure interrupted."""
    outcomes: tuple[OutcomeRecord, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {**dataclasses.asdict(self), "outcomes": [outcome.to_json() for outcome in self.outcomes]}


def summarize(
    steps: Sequence[StepRecord],
    failures: Sequence[FailureRecord],
    outcomes: Sequence[OutcomeRecord] = (),
    *,
    samples_per_step: int,
    status: RunStatus,
    reason: str,
) -> Summary:
    """Derive the summary from the records in the order they were written.

    `samples_per_step` is the size of the global batch. A step that was recorded twice was trained again after a fall
    back to a checkpoint; its last record is the one that counts.
    """
    committed = {record.step: record for record in steps}
    last = max(committed, default=-1)
    seen = sum(record.samples for record in committed.values())
    interrupted = {failure.step for failure in failures}
    first_failure = min(interrupted, default=last + 1)
    return Summary(
        status=status,
        reason=reason,
        steps=len(committed),
        final_loss=committed[last].loss if committed else None,
        samples_seen=seen,
        samples_lost=(last + 1) * samples_per_step - seen,
        samples_repeated=sum(record.samples for record in steps) - seen,
        failures=tuple(failures),
        median_step_s_before=_median(r.step_s for r in steps if r.step < first_failure),
        median_step_s_after=_median(r.step_s for r in steps if r.step > first_failure and r.step not in interrupted),
        outcomes=tuple(outcomes),
    )


def _median(values: Iterable[float]) -> float | None:
    values = list(values)
    return statistics.median(values) if values else None


def _relative(measured: float, predicted: float | None) -> float | None:
    return measured / predicted - 1 if predicted else None


def _compared(measured_s: float, predicted_s: float | None, error: float | None) -> str:
    if predicted_s is None:
        return duration(measured_s)
    share = "" if error is None else f", {error:+.1%}"
    return f"{duration(measured_s)} (predicted {duration(predicted_s)}{share})"


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
