"""The records that measure a run: its steps, incidents, switches and decisions. Times are in seconds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from chameleon_ft.events.base import Count, Event, Number, Positive, Time, Workers, event
from chameleon_ft.quantities import duration

FORMAT: Final = 2
"""Version of the records, in the event `started`. A field that is added with a default does not change it."""

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


@event("started")
class Started(Event):
    """Training begins or resumes: `model`, `data`, `run`, `pipelines`, `stages`, `first_step`, `steps`, `generation`.

    `pipelines` has the workers of each pipeline by stage, `stages` the layers of each stage, such as "0-3". `steps` are
    those of the whole run, `horizon_steps` those that the schedule of the learning rate is made for. `checkpoint` is
    the step of the restored state; null for fresh weights. `format` is the version of the records of the run.
    """

    format: Annotated[int, Field(le=FORMAT)] = 1
    model: str = ""
    data: str = ""
    run: str = ""
    pipelines: tuple[Workers, ...]
    stages: tuple[str, ...] = ()
    first_step: Count = 0
    steps: Positive
    generation: Count = 0
    checkpoint: Count | None = None
    horizon_steps: Count | None = None


def _nan_for_none(value: object) -> object:
    return math.nan if value is None else value


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One line of `metrics.jsonl`: a committed optimizer step.

    Attributes:
        step: Number of the step. After a return to a checkpoint a step occurs again, and the later line counts.
        loss: Mean over the loss terms of the global batch, before the update, with the auxiliary losses of layers; null
            in the file if it is no number.
        grad_norm: Global norm of the gradient, before clipping.
        lr: Learning rate of the update.
        samples: Samples whose loss is in the gradient, as counted by the workers.
        tokens: Loss terms, or the sum of their weights; for a language model the target tokens.
        step_s: From the first operation of the step to its commit; of an interrupted step that was completed, from the
            commit before it, so that the stall is included.
        workers: Workers that took part.
        generation: Generation that ran the step, or its rest.
        time: When the first worker reported the commit, in Unix seconds.
        is_rest: Whether the step was interrupted by a failure and completed.
        is_skipped: Whether the step was [bad](corruption.md#bad-steps) or had no loss terms: it has changed nothing,
            its `loss` is null, and it has no samples.
        data_wait_s: Seconds of the step in which the slowest worker read samples.
        auxiliary_loss: The part of `loss` that is auxiliary losses.
        metrics: Means of what layers have logged, by name; null if they are no finite number.
    """

    step: Count
    loss: Annotated[float, BeforeValidator(_nan_for_none)]
    grad_norm: float
    lr: float
    samples: Count
    tokens: Annotated[float, Field(ge=0, le=1e15)]
    step_s: Annotated[float, Field(gt=0, le=1e15)]
    workers: Positive
    generation: Count
    time: Time
    is_rest: bool = False
    is_skipped: bool = False
    data_wait_s: Number = 0.0
    auxiliary_loss: float = 0.0
    metrics: Mapping[str, Number | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.step < 0 or self.step_s <= 0 or self.workers < 1:
            raise ValueError(f"a step needs step >= 0, step_s > 0 and workers >= 1; got {self}")

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


@event("failure")
class FailureRecord(Event):
    """A worker was lost, and the recovery is complete: see below.

    The phases follow each other: `detect_s` until the detection, `stop_s` until every survivor had left its operation,
    `decide_s` until the plan was chosen, `transfer_s` in which layers moved, and `regroup_s`, the rest until the first
    operation.

    Attributes:
        host: Where the worker ran; older runs have none.
        detect_s: None if the time of the failure is unknown.
        stall_s: The sum of the phases.
        lost_layers: Layers without any holder left.
        moved_bytes, rounds: Of the state that moved to other workers.
        repeated_s: Seconds of a step whose work is repeated.
        is_salvaged: Whether the interrupted step was completed from what survivors held of it.
        failure_cost_steps: That of the `FailureCostRecord`; None until then.
    """

    worker: Count
    step: Count
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


@event("failure_cost")
class FailureCostRecord(Event):
    """An interrupted `step` is committed: `failure_cost_steps`, the cost of the incident in usual steps.

    That is the time between the commits before and after it, less the median of the steps before, over that median.
    `predicted_steps` is the prediction, null if there was none; and `incident_generations` the generations that
    followed the incidents in this step.
    """

    incident_generations: tuple[int, ...]
    step: int
    failure_cost_steps: float
    predicted_steps: float | None


@event("join")
class JoinRecord(Event):
    """The run has switched to another plan: for new workers, without drained ones, or because it is better.

    Or new workers were considered after a loss: see below. `stop_s` begins with the order to stop; it is zero at a
    switch, for which no worker stops, and `stall_s` is the time from the last step before it to the first operation
    after it. Before that, layers of `moved_bytes` may have moved for `migrate_s` seconds during training, in so many
    `waves`. Other fields are those of a `FailureRecord`.

    Attributes:
        workers: New workers that the plan uses.
        spares: New workers that it does not use.
        drained: Workers that it does without.
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


@event("evaluation")
class Evaluation(Event):
    """The held-out samples were [evaluated](evaluation.md) with the weights after `step`.

    `loss` and the job's own `metrics` are means over the loss `terms` of `samples`, null if they are no finite number.
    `perplexity` is that of a language model: of whole numbers as targets, of which a sample has several. It took
    `seconds`, in `generation`.
    """

    step: Count
    loss: Number | None
    perplexity: Number | None = None
    metrics: Mapping[str, Number | None] = field(default_factory=dict)
    samples: Count
    terms: Number
    seconds: Number
    generation: Count

    @property
    def results(self) -> Mapping[str, Number | None]:
        """Loss, perplexity and metrics by name."""
        return {"loss": self.loss, "perplexity": self.perplexity, **self.metrics}

    def describe(self) -> str:
        """Return "after step 99: loss 2.3026, perplexity 10.00, accuracy 0.1"."""
        values = ", ".join(
            f"{name} {'is no finite number' if value is None else f'{value:.5g}'}"
            for name, value in self.results.items()
            if value is not None or name != "perplexity"
        )
        return f"after step {self.step}: {values}"


@event("outcome")
class OutcomeRecord(Event):
    """Measured results of the decision of `generation`, beside its predictions, which are null if there were none.

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

    def values(self) -> dict[str, Any]:
        """Return the fields, the errors and the warning as JSON values."""
        derived = {"step_error": self.step_error, "stall_error": self.stall_error, "warning": self.warning}
        return {**Event.values(self), **derived}

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
