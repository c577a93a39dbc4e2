"""The decisions of a run, as its events tell them: what was known, what was weighed, what was done, what came."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from chameleon_ft.errors import ConfigError
from chameleon_ft.observe.records import FailureRecord, OutcomeRecord

__all__ = [
    "DecisionEvent",
    "DecisionStory",
    "ObservedRate",
    "StallParts",
    "UsedCorrections",
    "WeighedCandidate",
    "decision_stories",
]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class WeighedCandidate(_Part):
    """One of the candidates. Without a plan, there are no figures."""

    policy: str
    step_s: float | None
    stall_s: float | None
    transfer_s: float | None = None
    moved_bytes: int | None = Field(alias="bytes")
    last_holders: int = 0
    last_hosts: int = 0
    fatal_share: float = 0.0
    return_s: float = 0.0
    samples: float
    feasible: bool
    reason: str | None


class ObservedRate(_Part):
    """Figures that the time to the next failure was estimated from; see `FailureModel`."""

    failures: int
    worker_s: float
    prior_failures: float
    worker_mtbf_s: float
    host_share: float | None = None
    incidents: int | None = None
    together: dict[int, int] = {}
    bursts: int = 0


class StallParts(_Part):
    """Seconds of the stall that do not depend on what is chosen; and what a return to a checkpoint is taken to cost."""

    repeat_s: float
    detect_s: float
    stop_s: float
    decide_s: float
    regroup_s: float
    restart_s: float | None = None


class UsedCorrections(_Part):
    """Factors by which predictions had been corrected; see `chameleon_ft.control.decisions.calibration`."""

    operations: float
    step: float
    transfer: float
    slow: dict[int, float]


class DecisionEvent(_Part):
    """An event `decision`, field by field; see docs/files.md."""

    time: float
    generation: int
    search_s: float
    prepared: bool
    trigger: Literal["loss", "join"] = "loss"
    step: int
    lost: tuple[int, ...]
    live: int
    plan: str
    rate: ObservedRate
    stall: StallParts
    corrections: UsedCorrections
    chosen: str | None
    horizon_s: float
    candidates: tuple[WeighedCandidate, ...]

    @property
    def best(self) -> WeighedCandidate | None:
        """What was chosen; None where nothing could be."""
        return next((each for each in self.candidates if each.policy == self.chosen), None)

    @property
    def second(self) -> WeighedCandidate | None:
        """The best of what could have been chosen as well; None where there is nothing else."""
        others = [each for each in self.candidates if each.feasible and each.policy != self.chosen]
        return max(others, key=lambda each: each.samples, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionStory:
    """A decision and what belongs to it.

    Attributes:
        number: counted from 1 over the whole run, lives that it was resumed in included.
        life: how often the run had begun or been resumed until then.
        decided: the decision.
        losses: the records of the workers that it was about; those that are lost in a recovery have theirs later on.
        policy: what was carried out; None if the run ended before that.
        outcome: what came of it; None if no step was committed under it, or no worker stopped for it.
        goes_on: whether no worker stopped for it: its generation was under way, and went on.
    """

    number: int
    life: int
    decided: DecisionEvent
    losses: tuple[FailureRecord, ...]
    policy: str | None
    outcome: OutcomeRecord | None
    goes_on: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "number": self.number,
            "life": self.life,
            **self.decided.model_dump(mode="json", by_alias=True),
            "losses": [loss.to_json() for loss in self.losses],
            "policy": self.policy,
            "outcome": None if self.outcome is None else self.outcome.to_json(),
        }


def decision_stories(events: Iterable[Mapping[str, Any]]) -> tuple[DecisionStory, ...]:
    """Put together what the events of a run, in the order they were written, say of each decision.

    Raises ConfigError where a decision lacks a field: it was written by another version, or the file is damaged.
    """
    life = 0
    decided: list[tuple[int, DecisionEvent, bool]] = []
    losses: dict[tuple[int, int], list[FailureRecord]] = defaultdict(list)
    policies: dict[int, str] = {}
    outcomes: dict[int, OutcomeRecord] = {}
    for event in events:
        match event["event"]:
            case "started":
                life += 1
            case "decision":
                decision = _decision(event)
                decided.append((life, decision, decision.generation in policies))
            case "plan":
                policies[event["generation"]] = event["policy"]
            case "failure":
                failure = FailureRecord.from_json(event)
                losses[life, failure.worker].append(failure)
            case "outcome":
                outcome = OutcomeRecord.from_json(event)
                outcomes[outcome.generation] = outcome
    return tuple(
        DecisionStory(
            number=number,
            life=life,
            decided=decision,
            losses=tuple(
                loss for worker in decision.lost for loss in _first_since(decision.generation, losses[life, worker])
            ),
            policy=decision.chosen if goes_on else policies.get(decision.generation),
            outcome=None if goes_on else outcomes.get(decision.generation),
            goes_on=goes_on,
        )
        for number, (life, decision, goes_on) in enumerate(decided, start=1)
    )


def _first_since(generation: int, losses: Iterable[FailureRecord]) -> list[FailureRecord]:
    """The loss of a worker that a decision was about: it may have come back since, and been lost again."""
    return [loss for loss in losses if loss.generation >= generation][:1]


def _decision(event: Mapping[str, Any]) -> DecisionEvent:
    try:
        return DecisionEvent.model_validate(event)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"the decision of generation {event.get('generation')} cannot be told: {where}: {first['msg']}; the file "
            "was written by another version of chameleon or is damaged"
        ) from None
