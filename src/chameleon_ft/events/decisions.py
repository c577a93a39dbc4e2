"""The decisions of a run, read from its events, each with its losses and its outcome."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from chameleon_ft.errors import ConfigError, describe_invalid
from chameleon_ft.events.records import FailureCostRecord, FailureRecord, OutcomeRecord


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class ScoredCandidate(_Part):
    """A candidate of a decision. Figures are None for a policy that proposed no plan."""

    policy: str
    step_s: float | None
    stall_s: float | None
    transfer_s: float | None = None
    migration_s: float = 0.0
    waves: int = 0
    moved_bytes: int | None = Field(alias="bytes")
    worker_single_points_of_failure: int = 0
    host_single_points_of_failure: int = 0
    fatal_share: float = 0.0
    return_s: float = 0.0
    shared_s: float = 0.0
    samples: float
    feasible: bool
    reason: str | None

    @model_validator(mode="after")
    def _with_figures_of_a_plan(self) -> Self:
        if self.feasible and (self.stall_s is None or not self.step_s or self.step_s < 0):
            raise ValueError("a feasible candidate needs a stall and a step above 0")
        return self

    @property
    def next_incident_s(self) -> float:
        """Expected seconds that the next incident costs."""
        return self.return_s + self.shared_s


class ObservedRate(_Part):
    """The observations and the prior that the time to the next failure was estimated from; see `FailureModel`."""

    failures: int
    worker_s: float
    prior_failures: float
    worker_mtbf_s: float
    host_failure_fraction: float | None = None
    incidents: int | None = None
    together: dict[int, int] = {}
    bursts: int = 0


class StallParts(_Part):
    """Seconds of the stall that do not depend on the choice, and the assumed cost of a return to a checkpoint."""

    repeat_s: float
    detect_s: float
    stop_s: float
    decide_s: float
    regroup_s: float
    restart_cost_s: float | None = None


class UsedCorrections(_Part):
    """Factors that predictions were corrected by; see `chameleon_ft.coordinator.decisions.calibration`."""

    operations: float
    step: float
    transfer: float
    migration: float = 1.0
    slow: dict[int, float]
    slow_links: dict[str, float] = {}


class CountedOnSnapshots(_Part):
    """Seconds of a return to a snapshot, of the steps since the last one, and of the most between two if it is set."""

    unsaved_s: float
    longest_s: float | None
    return_s: float


class Salvaged(_Part):
    """The predicted seconds of the rest of an interrupted step, and the share of its work that is repeated."""

    rest_s: float
    repeated_share: float


class DecisionEvent(_Part):
    """The fields of an event `decision`; see docs/files.md."""

    time: float
    generation: int
    search_s: float
    prepared: bool
    trigger: Literal["loss", "join", "review", "drain", "slow"] = "loss"
    step: int
    lost: tuple[int, ...]
    leaving: tuple[int, ...] = ()
    live: int
    plan: str
    rate: ObservedRate
    stall: StallParts
    snapshots: CountedOnSnapshots | None = None
    corrections: UsedCorrections
    chosen: str | None
    horizon_s: float
    candidates: tuple[ScoredCandidate, ...]
    salvaged: Salvaged | None = None

    @property
    def best(self) -> ScoredCandidate | None:
        """The chosen candidate; None if none was feasible."""
        return next((each for each in self.candidates if each.policy == self.chosen), None)

    @property
    def second(self) -> ScoredCandidate | None:
        """The best of the other feasible candidates; None if there are none."""
        others = [each for each in self.candidates if each.feasible and each.policy != self.chosen]
        return max(others, key=lambda each: each.samples, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionStory:
    """A decision with its consequences.

    Attributes:
        number: counted from 1 over the whole run, including its resumed parts.
        session: 1 before the run was first resumed, and one more after each resumption.
        losses: records of the workers whose loss caused it; workers lost during a recovery have later records.
        policy: policy that was carried out; None if the run ended before.
        outcome: None if no step was committed under it, or it is a no-op.
        is_noop: whether it let the running generation continue.
        cost: of the incident that caused it; None if there was none, or the interrupted step was never committed.
    """

    number: int
    session: int
    decided: DecisionEvent
    losses: tuple[FailureRecord, ...]
    policy: str | None
    outcome: OutcomeRecord | None
    is_noop: bool = False
    cost: FailureCostRecord | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {
            "number": self.number,
            "session": self.session,
            **self.decided.model_dump(mode="json", by_alias=True),
            "losses": [loss.to_json() for loss in self.losses],
            "policy": self.policy,
            "outcome": None if self.outcome is None else self.outcome.to_json(),
            "cost": None if self.cost is None else self.cost.to_json(),
        }


def decision_stories(events: Iterable[Mapping[str, Any]]) -> tuple[DecisionStory, ...]:
    """Collect the decisions from the events of a run, in the order they were written.

    Raises ConfigError if a decision lacks a field: it was written by another version, or the file is damaged.
    """
    session = 0
    decided: list[tuple[int, DecisionEvent, bool]] = []
    losses: dict[tuple[int, int], list[FailureRecord]] = defaultdict(list)
    policies: dict[int, str] = {}
    outcomes: dict[int, OutcomeRecord] = {}
    costs: dict[int, FailureCostRecord] = {}
    for event in events:
        match event["event"]:
            case "started":
                session += 1
            case "decision":
                found = _decision(event)
                # The plan of a loss may be recorded before its decision, for which no worker waits.
                is_noop = found.chosen in (None, "stay") and found.generation in policies
                decided.append((session, found, is_noop))
            case "plan":
                policies[event["generation"]] = event["policy"]
            case "failure":
                losses[session, event["worker"]].append(FailureRecord.from_json(event))
            case "failure_cost":
                cost = FailureCostRecord.from_json(event)
                costs |= dict.fromkeys(cost.incident_generations, cost)
            case "outcome":
                outcomes[event["generation"]] = OutcomeRecord.from_json(event)

    def loss_of(worker: int, decision: DecisionEvent, session: int) -> list[FailureRecord]:
        # A worker may have come back since, and been lost again.
        found = [loss for loss in losses[session, worker] if loss.generation >= decision.generation][:1]
        return [
            replace(loss, failure_cost_steps=costs[loss.generation].failure_cost_steps)
            if loss.generation in costs
            else loss
            for loss in found
        ]

    return tuple(
        DecisionStory(
            number=number,
            session=session,
            decided=decision,
            losses=tuple(loss for worker in decision.lost for loss in loss_of(worker, decision, session)),
            policy=decision.chosen if is_noop else policies.get(decision.generation),
            outcome=None if is_noop else outcomes.get(decision.generation),
            is_noop=is_noop,
            cost=None if is_noop else costs.get(decision.generation),
        )
        for number, (session, decision, is_noop) in enumerate(decided, start=1)
    )


def _decision(event: Mapping[str, Any]) -> DecisionEvent:
    try:
        return DecisionEvent.model_validate(event)
    except ValidationError as error:
        raise ConfigError(
            f"the decision of generation {event.get('generation')} cannot be read: {describe_invalid(error)}; the file "
            "was written by another version of chameleon or is damaged"
        ) from None
