"""The report on a run at one moment: what `chameleon status` prints, and the page and the metrics show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal, Self, TypeAlias, get_args

from chameleon_ft.observe.live.steps import Pace
from chameleon_ft.observe.live.workers import WorkerState
from chameleon_ft.observe.records import RunStatus, StepRecord

Condition: TypeAlias = Literal["waiting", "training", "reading", "recovering", "silent", "lost"] | RunStatus

CONDITIONS: Final[Mapping[Condition, str]] = {
    "waiting": "workers are joining, or load their layers",
    "training": "steps are committed",
    "reading": "a sample takes long to read, and no step has been committed since",
    "recovering": "a worker is lost, and no step has been committed since",
    "silent": "no record for ten usual steps, and at least ten seconds",
    "lost": "the coordinator is gone, and the run has not ended",
    "finished": "all steps are trained",
    "interrupted": "ended by its user",
    "terminated": "ended by its machines; to be resumed",
    "failed": "ended by an error",
}
"""Description of each condition of a run."""

ENDED: Final = frozenset(get_args(RunStatus))
"""Conditions of a run that has ended."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A complete checkpoint or snapshot: training would resume with `step`; `time` in Unix seconds."""

    step: int
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The failures of a run and what they cost.

    Attributes:
        failures: lost workers.
        incidents: recoveries; workers lost together share one.
        steps: cost of all incidents, in steps.
        phases_s: seconds of each phase of the stalls, and of work that was repeated.
        causes: lost workers by cause, the most frequent first.
    """

    failures: int = 0
    incidents: int = 0
    steps: float = 0.0
    phases_s: Mapping[str, float] = field(default_factory=dict)
    causes: Mapping[str, int] = field(default_factory=dict)

    @property
    def stall_s(self) -> float:
        """Seconds of all stalls."""
        return sum(seconds for phase, seconds in self.phases_s.items() if phase != "repeat")

    def with_failure(self, phases: Mapping[str, float], *, cause: str, repeated_s: float, is_first: bool) -> Self:
        """Add a lost worker. `is_first`: whether it is the first one of its incident, whose phases count."""
        causes = dict(Counter({**self.causes, cause: self.causes.get(cause, 0) + 1}).most_common())
        if not is_first:
            return replace(self, failures=self.failures + 1, causes=causes)
        added = {phase.removesuffix("_s"): seconds for phase, seconds in phases.items()} | {"repeat": repeated_s}
        total = {phase: self.phases_s.get(phase, 0.0) + seconds for phase, seconds in added.items()}
        incidents = self.incidents + 1
        return replace(self, failures=self.failures + 1, incidents=incidents, phases_s=total, causes=causes)

    def with_steps(self, steps: float) -> Self:
        """Add the cost of an incident in steps."""
        return replace(self, steps=self.steps + steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """The state of a run at one moment. Times are in Unix seconds, durations in seconds.

    Attributes:
        run: its directory.
        condition: see `CONDITIONS`.
        reason: why, or how it ended; may be empty.
        at: when this was reported.
        began: when training began first; None if it has not.
        last: the newest committed step.
        steps: those of the whole run.
        pace: of the newest steps.
        earlier: the pace to compare with.
        tokens: loss terms trained so far, each counted once.
        goodput: share of the time in which steps were trained that count, without stalls.
        eta_s: seconds until the last step, at this pace and goodput; None if it has ended or no step is committed.
        generation: of the plan in force; 0 before the first.
        policy: that proposed it.
        workers: by state.
        hosts: of workers, as far as events name them.
        speeds: of slow workers, relative to the others.
        link_speeds: of slow links, "WORKER-WORKER".
        checkpoint: the newest complete one.
        checkpoint_error: why the one after it failed, or cannot be read; None if none has.
        snapshot: the newest complete one.
        costs: of failures.
        next_failure_s: expected seconds until the next failure.
    """

    run: str
    condition: Condition
    reason: str
    at: float
    began: float | None
    last: StepRecord | None
    steps: int
    pace: Pace | None
    earlier: Pace | None
    tokens: float
    goodput: float | None
    eta_s: float | None
    generation: int
    policy: str
    workers: Mapping[WorkerState, tuple[int, ...]]
    hosts: Mapping[int, str]
    speeds: Mapping[int, float]
    link_speeds: Mapping[str, float]
    checkpoint: Saved | None
    checkpoint_error: str | None
    snapshot: Saved | None
    costs: Costs
    next_failure_s: float | None

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.condition in ENDED

    @property
    def unit(self) -> str:
        """See `StepRecord.unit`."""
        return "tokens" if self.last is None else self.last.unit

    @property
    def last_step_age_s(self) -> float | None:
        """Seconds since the newest step was committed; None before the first."""
        return None if self.last is None else max(0.0, self.at - self.last.time)

    def to_json(self) -> dict[str, Any]:
        """Return the fields, and ages of what was saved, as JSON values."""
        values = {**asdict(self), "last": None if self.last is None else self.last.to_json()}
        for name, saved in (("checkpoint", self.checkpoint), ("snapshot", self.snapshot)):
            if saved is not None:
                values[name] = {**asdict(saved), "age_s": max(0.0, self.at - saved.time)}
        values["costs"] = {**asdict(self.costs), "stall_s": self.costs.stall_s}
        return {**values, "unit": self.unit, "last_step_age_s": self.last_step_age_s}
