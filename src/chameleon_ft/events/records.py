"""The records of a run, whose fields docs/files.md defines, and the summary derived from them. Times are in seconds."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Self, TypeAlias

from chameleon_ft.errors import ConfigError
from chameleon_ft.quantities import duration

NoticedBy = Literal["child", "connection", "heartbeat", "watchdog", "peer", "self", "checksum"]
"""The detection paths; see `DETECTED_BY`."""

DETECTED_BY: Final[Mapping[NoticedBy, str]] = {
    "child": "the end of its process",
    "connection": "the end of its control connection",
    "heartbeat": "missing heartbeats",
    "watchdog": "lack of progress",
    "peer": "a peer whose message to or from it failed",
    "self": "its own report of an error",
    "checksum": "a checksum of its state",
}
"""Description of each detection path."""

RunStatus = Literal["finished", "interrupted", "terminated", "failed"]

FOLLOWED_STEPS: Final = 10
"""Committed steps after which the outcome of a decision is reported, unless another one comes first."""

_STEP_TOLERANCE: Final = 0.06
"""The largest relative error of a step time that the benchmarks allow (docs/benchmarks.md). Candidates often differ by
less than that, so a larger error can change the choice."""
_STALL_TOLERANCE: Final = 0.15
"""The relative error of a stall that the benchmarks allow, which is larger because stalls are short and vary more."""
_REPROFILE: Final = (
    "measure a new profile while the machine does nothing else (`chameleon profile CONFIG --out FILE`), and give it by "
    "--profile FILE; if workers share processors, expect no better"
)
_SET_RESTART: Final = "set recovery.restart_cost_s to what a return to a checkpoint takes here"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """A flat record, written as one line of JSON."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the record with the fields of `to_json`; other keys are ignored.

        Raises ConfigError if a field without a default is missing.
        """
        try:
            values = {
                field.name: data[field.name]
                for field in dataclasses.fields(cls)
                if field.name in data or field.default is dataclasses.MISSING
            }
        except KeyError as error:
            raise ConfigError(
                f"a {cls.__name__} without {error}: the file was written by another version of chameleon or is damaged"
            ) from None
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo(_Record):
    """The model, the data and the layout of a run that starts or resumes.

    `pipelines` has the workers of each pipeline by stage, `stages` the layers of each stage, such as "0-3". `steps` are
    those of the whole run, `horizon_steps` those that the schedule of the learning rate is made for. `checkpoint` is
    the step of the restored state, None for initial weights.
    """

    model: str
    data: str
    run: str
    pipelines: tuple[tuple[int, ...], ...]
    stages: tuple[str, ...]
    first_step: int
    steps: int
    generation: int
    checkpoint: int | None = None
    horizon_steps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord(_Record):
    """One committed optimizer step. `loss` and `grad_norm` are those before the update and before clipping.

    `time` is when the first worker reported the commit, in Unix seconds. If `is_rest`, the step was interrupted and
    completed, and `step_s` is the time since the commit before it, with the stall. If `is_skipped`, the step was bad
    or had no loss terms, and has changed nothing: its loss is not a number, and no sample counts. For `data_wait_s`
    seconds of it the slowest worker read samples.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    samples: int
    tokens: float
    step_s: float
    workers: int
    generation: int
    time: float
    is_rest: bool = False
    is_skipped: bool = False
    data_wait_s: float = 0.0

    def __post_init__(self) -> None:
        if self.step < 0 or self.step_s <= 0 or self.workers < 1:
            raise ValueError(f"a step needs step >= 0, step_s > 0 and workers >= 1; got {self}")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """See `_Record`."""
        return super(StepRecord, cls).from_json({**data, "loss": math.nan} if data.get("loss", 0) is None else data)

    @property
    def number(self) -> int:
        """The number of the step, from 0."""
        return self.step

    @property
    def tokens_per_s(self) -> float:
        """Loss terms per second of wall time."""
        return self.tokens / self.step_s

    @property
    def unit(self) -> str:
        """Name of the loss terms: "samples" if each has one term, as without tokens."""
        return "samples" if self.tokens == self.samples and self.samples else "tokens"

    def to_json(self) -> dict[str, Any]:
        """Return the fields and the rate as JSON values."""
        loss = self.loss if math.isfinite(self.loss) else None
        return {**dataclasses.asdict(self), "loss": loss, "tokens_per_s": self.tokens_per_s}


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord(_Record):
    """One lost worker, and the phases of the recovery.

    The phases follow each other: `detect_s` (None if the time of the failure is unknown) until the detection, `stop_s`
    until every survivor had left its operation, `decide_s` until the plan was chosen, `transfer_s` in which layers
    moved, and `regroup_s`, the rest until the first operation. `stall_s` is their sum.

    `host` is where the worker ran; older runs have none. `repeated_s` are the seconds of a step whose work is repeated;
    if `is_salvaged`, the interrupted step was completed from what survivors held of it. `failure_cost_steps` is that of
    the record `FailureCostRecord`; None until then.
    """

    worker: int
    step: int
    cause: str
    host: str = ""
    noticed_by: NoticedBy
    detect_s: float | None
    stop_s: float
    decide_s: float
    regroup_s: float
    transfer_s: float = 0.0
    stall_s: float
    policy: str
    action: str
    generation: int
    resume_step: int
    lost_layers: tuple[int, ...] = ()
    moved_bytes: int = 0
    rounds: int = 0
    repeated_s: float | None = None
    is_salvaged: bool = False
    failure_cost_steps: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCostRecord(_Record):
    """The cost of an incident in steps, once the interrupted step is committed.

    `failure_cost_steps` is the time between the commits before and after it, less the median of the steps before, over
    that median. `predicted_steps` is the prediction, None if there was none. The incident ended `incident_generations`.
    """

    incident_generations: tuple[int, ...]
    step: int
    failure_cost_steps: float
    predicted_steps: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRecord(_Record):
    """A better plan: for new workers, of which it uses `workers` and not `spares`; without those `drained`; or both.

    The run switches to it at the end of a step, or takes it after a failure. `stop_s` begins with the order to stop; it
    is zero at a switch, for which no worker stops, and `stall_s` is the time from the last step before it to the first
    operation after it. Before that, layers of `moved_bytes` may have moved for `migrate_s` seconds during training,
    in so many `waves`. Other fields are those of a `FailureRecord`.
    """

    workers: tuple[int, ...]
    spares: tuple[int, ...]
    drained: tuple[int, ...] = ()
    stop_s: float
    decide_s: float
    regroup_s: float
    transfer_s: float
    migrate_s: float = 0.0
    waves: int = 0
    stall_s: float
    policy: str
    action: str
    generation: int
    resume_step: int
    moved_bytes: int
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeRecord(_Record):
    """Measured results of a decision beside its predictions, which are None if there were none.

    `measured_step_s` is the median over the `steps` committed under it, without the first if there are others: ten, or
    fewer if the next incident came before. `measured_stall_s` is from the last commit before to the first operation
    after, plus the time of repeated steps.
    """

    generation: int
    policy: str
    steps: int
    predicted_step_s: float | None
    measured_step_s: float
    predicted_stall_s: float | None
    measured_stall_s: float

    @property
    def step_error(self) -> float | None:
        """Relative error of the step time, measured / predicted - 1."""
        return self.measured_step_s / self.predicted_step_s - 1 if self.predicted_step_s else None

    @property
    def stall_error(self) -> float | None:
        """Relative error of the stall, measured / predicted - 1."""
        return self.measured_stall_s / self.predicted_stall_s - 1 if self.predicted_stall_s else None

    @property
    def warning(self) -> str | None:
        """See `describe_untrusted`; none if there were fewer steps than are followed, which prove little."""
        if self.steps < FOLLOWED_STEPS:
            return None
        return describe_untrusted(
            step_error=self.step_error, stall_error=self.stall_error, stall_is_restart=self.policy == "restart"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields, the errors and the warning as JSON values."""
        derived = {"step_error": self.step_error, "stall_error": self.stall_error, "warning": self.warning}
        return {**dataclasses.asdict(self), **derived}

    def describe(self) -> str:
        """Return "step 125 ms (predicted 123 ms, +1.6%), stall 100 ms (predicted 200 ms, -50.0%)"."""
        parts = []
        for name, measured_s, predicted_s, error in (
            ("step", self.measured_step_s, self.predicted_step_s, self.step_error),
            ("stall", self.measured_stall_s, self.predicted_stall_s, self.stall_error),
        ):
            share = "" if error is None else f", {error:+.1%}"
            predicted = "" if predicted_s is None else f" (predicted {duration(predicted_s)}{share})"
            parts.append(f"{name} {duration(measured_s)}{predicted}")
        return ", ".join(parts)


def describe_untrusted(
    *, step_error: float | None, stall_error: float | None = None, stall_is_restart: bool = False
) -> str | None:
    """Return a warning of relative errors beyond their tolerance, with the remedy; None if there are none.

    `stall_is_restart`: whether the predicted stall is the configured cost of a return to a checkpoint.
    """
    excesses, remedies = [], []
    for name, error, tolerance, remedy in (
        ("step time", step_error, _STEP_TOLERANCE, _REPROFILE),
        ("stall", stall_error, _STALL_TOLERANCE, _SET_RESTART if stall_is_restart else _REPROFILE),
    ):
        if error is not None and abs(error) > tolerance:
            excesses.append(f"{name} {abs(error):.1%} off, {tolerance:.0%} is tolerated")
            remedies.append(remedy)
    if not excesses:
        return None
    return f"prediction not to be trusted: {'; '.join(excesses)}. To do: {', and '.join(dict.fromkeys(remedies))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(_Record):
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
        return {**dataclasses.asdict(self), "outcomes": [outcome.to_json() for outcome in self.outcomes]}


@dataclass(frozen=True, slots=True)
class OtherRecord:
    """An event that has no record type of its own; the fields are JSON values."""

    event: str
    fields: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return dict(self.fields)


RunRecord: TypeAlias = StepRecord | FailureRecord | FailureCostRecord | JoinRecord | OutcomeRecord | OtherRecord
"""A record that is one line of a file of the run."""


def summarize(
    steps: Sequence[StepRecord],
    failures: Sequence[FailureRecord],
    outcomes: Sequence[OutcomeRecord] = (),
    *,
    samples_per_step: int,
    first_step: int = 0,
    status: RunStatus,
    reason: str,
) -> Summary:
    """Derive the summary from the records in the order they were written.

    `samples_per_step` is the size of the global batch, and `first_step` that of a forked run. A step that was recorded
    twice was trained again after a return to a checkpoint; its last record counts.
    """
    committed = {record.step: record for record in steps}
    last = max(committed, default=first_step - 1)
    seen = sum(record.samples for record in committed.values())
    skipped = samples_per_step * sum(record.is_skipped for record in committed.values())
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
        samples_lost=(last + 1 - first_step) * samples_per_step - seen - skipped,
        samples_repeated=sum(record.samples for record in steps) - seen,
        samples_skipped=skipped,
        failures=tuple(failures),
        median_step_s_before=_median(r.step_s for r in steps if r.step < first_failure),
        median_step_s_after=_median(
            r.step_s for r in steps if r.step > first_failure and r.step not in interrupted and not r.is_rest
        ),
        outcomes=tuple(outcomes),
    )


def _median(values: Iterable[float]) -> float | None:
    return statistics.median(found) if (found := list(values)) else None
