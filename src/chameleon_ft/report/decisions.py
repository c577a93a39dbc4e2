"""The decisions of a run, each with its losses and its outcome."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Self

from chameleon_ft.events.base import Event
from chameleon_ft.events.decisions import DecisionEvent, PlanInForce
from chameleon_ft.events.records import FailureCostRecord, FailureRecord, OutcomeRecord, Started


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionStory:
    """A decision with its consequences.

    Attributes:
        number: Counted from 1 over the whole run, including its resumed parts.
        session: 1 before the run was first resumed, and one more after each resumption.
        losses: Records of the workers whose loss caused it; workers lost during a recovery have later records.
        policy: The policy that was carried out; None if the run ended before.
        outcome: None if no step was committed under it, or it is a no-op.
        is_noop: Whether it let the running generation continue.
        cost: The cost of the incident that caused it; None if there was none, or its step was never committed.
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
            "time": self.decided.time,
            **self.decided.values(),
            "losses": [loss.values() for loss in self.losses],
            "policy": self.policy,
            "outcome": None if self.outcome is None else self.outcome.values(),
            "cost": None if self.cost is None else self.cost.values(),
        }


@dataclass(slots=True)
class Decisions:
    """Collects what belongs to decisions, from the events of a run in their order."""

    _session: int = 0
    _decided: list[tuple[int, DecisionEvent, bool]] = field(default_factory=list)
    _losses: dict[tuple[int, int], list[FailureRecord]] = field(default_factory=lambda: defaultdict(list))
    _policies: dict[int, str] = field(default_factory=dict)
    _outcomes: dict[int, OutcomeRecord] = field(default_factory=dict)
    _costs: dict[int, FailureCostRecord] = field(default_factory=dict)

    @classmethod
    def of(cls, events: Iterable[Event]) -> Self:
        """Return those of a whole run."""
        decisions = cls()
        for event in events:
            decisions.add(event)
        return decisions

    def add(self, event: Event) -> None:
        """Take in an event."""
        match event:
            case Started():
                self._session += 1
            case DecisionEvent(chosen=chosen, generation=generation):
                # The plan of a loss may be recorded before its decision, for which no worker waits.
                is_noop = chosen in (None, "stay") and generation in self._policies
                self._decided.append((self._session, event, is_noop))
            case PlanInForce(generation=generation, policy=policy):
                self._policies[generation] = policy
            case FailureRecord(worker=worker):
                self._losses[self._session, worker].append(event)
            case FailureCostRecord(incident_generations=numbers):
                self._costs |= dict.fromkeys(numbers, event)
            case OutcomeRecord(generation=generation):
                self._outcomes[generation] = event

    def cost_steps(self, generation: int) -> float | None:
        """Return what the incident that ended with a generation cost in steps, if that is known."""
        return None if generation not in self._costs else self._costs[generation].failure_cost_steps

    def stories(self) -> tuple[DecisionStory, ...]:
        """Return the decisions in the order in which they were recorded."""
        return tuple(
            DecisionStory(
                number=number,
                session=session,
                decided=decision,
                losses=tuple(loss for worker in decision.lost for loss in self._loss_of(worker, decision, session)),
                policy=decision.chosen if is_noop else self._policies.get(decision.generation),
                outcome=None if is_noop else self._outcomes.get(decision.generation),
                is_noop=is_noop,
                cost=None if is_noop else self._costs.get(decision.generation),
            )
            for number, (session, decision, is_noop) in enumerate(self._decided, start=1)
        )

    def _loss_of(self, worker: int, decision: DecisionEvent, session: int) -> list[FailureRecord]:
        # A worker may have come back since, and been lost again.
        found = [loss for loss in self._losses[session, worker] if loss.generation >= decision.generation][:1]
        return [
            replace(loss, failure_cost_steps=self._costs[loss.generation].failure_cost_steps)
            if loss.generation in self._costs
            else loss
            for loss in found
        ]
