"""The events of plans: decisions with all that they were made by, and what becomes of the chosen plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter

from chameleon_ft.events.base import Count, Event, Link, Number, Workers, event


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredCandidate:
    """A candidate of a decision. Figures are None for a policy that proposed no plan."""

    policy: str
    step_s: float | None
    stall_s: float | None
    transfer_s: float | None = None
    migration_s: float = 0.0
    waves: int = 0
    bytes: int | None
    worker_single_points_of_failure: int = 0
    host_single_points_of_failure: int = 0
    fatal_share: float = 0.0
    return_s: float = 0.0
    shared_s: float = 0.0
    samples: float
    feasible: bool
    reason: str | None

    def __post_init__(self) -> None:
        if self.feasible and (self.stall_s is None or not self.step_s or self.step_s < 0):
            raise ValueError("a feasible candidate needs a stall and a step above 0")

    @property
    def next_incident_s(self) -> float:
        """Expected seconds that the next incident costs."""
        return self.return_s + self.shared_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRate:
    """The observations and the prior that the time to the next failure was estimated from; see `FailureModel`."""

    failures: int
    worker_s: float
    prior_failures: float
    worker_mtbf_s: float
    host_failure_fraction: float | None = None
    incidents: int | None = None
    together: dict[int, int] = field(default_factory=dict)
    bursts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StallParts:
    """Seconds of the stall that do not depend on the choice, and the assumed cost of a return to a checkpoint."""

    repeat_s: float
    detect_s: float
    stop_s: float
    decide_s: float
    regroup_s: float
    restart_cost_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedCorrections:
    """Factors that predictions were corrected by; see `chameleon_ft.coordinator.decisions.calibration`."""

    operations: float
    step: float
    transfer: float
    migration: float = 1.0
    slow: dict[int, float]
    slow_links: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedOnSnapshots:
    """Seconds of a return to a snapshot, of the steps since the last one, and of the most between two if it is set."""

    unsaved_s: float
    longest_s: float | None
    return_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Salvaged:
    """The predicted seconds of the rest of an interrupted step, and the share of its work that is repeated."""

    rest_s: float
    repeated_share: float


@event("decision")
class DecisionEvent(Event):
    """A decision is made, in `search_s` seconds or beforehand (`prepared`), that starts `generation`: see below.

    The `trigger` is `loss`; `join`, for new workers; `review`, for a better plan than one chosen in a hurry; `drain`;
    or `slow`, for workers or links that have become slow or recovered. If `stay` was chosen, the running generation
    continues.
    """

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

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> DecisionEvent:
        """Return the event with these fields, which are JSON values."""
        return TypeAdapter(DecisionEvent).validate_python(fields)


@event("plan")
class PlanInForce(Event):
    """A plan is in force from here: `generation`, `policy`, and its `file`.

    The policy is also `start`, `migration` on the way to a plan, or `cancelled-migration` back from it.
    """

    generation: Count
    policy: str
    file: str = ""


@event("prepared")
class Prepared(Event):
    """The decision for each of `losses` single losses is ready, after `prepare_s` seconds; or `error`: none will be."""

    generation: Count
    losses: Count
    prepare_s: Number
    error: str | None = None


@event("transition")
class Transition(Event):
    """Layers have moved to other workers before `generation` trains; see [transition.md](transition.md).

    The fields are the number of `workers` that took part, `layers`, `messages` and `rounds`, `planned_bytes` by the
    costs of the plan, `moved_bytes` that workers have received (fewer before the first update, because the optimizer
    has no state yet), and `transfer_s`.
    """

    generation: Count
    workers: Count
    layers: Count
    messages: Count
    rounds: Count
    planned_bytes: Count
    moved_bytes: Count
    transfer_s: Number


@event("migration")
class Migration(Event):
    """Layers begin to move while `generation` trains, in or after `step`; see [transition.md](transition.md#migration).

    So many `layers`, and `slices` of optimizer state; `bytes` are those of the layers by the costs of the plan, and
    `arriving` the layers by the worker that they move to.
    """

    generation: Count
    step: Count
    layers: Count
    bytes: Count
    slices: Count = 0
    arriving: Mapping[Count, str] = field(default_factory=dict)


@event("discarded")
class Discarded(Event):
    """A `generation` could not be prepared because of an `error`; training continues without it."""

    generation: Count
    error: str


@event("stay")
class Stay(Event):
    """No other plan is better.

    The workers `slow` and the links `slow_links` are slow; both are empty if none is any longer.
    """

    slow: Workers = ()
    slow_links: tuple[Link, ...] = ()


@event("decision_failed")
class DecisionFailed(Event):
    """The decision about new or slow `workers`, or `slow_links`, failed with an `error`.

    New workers stay spares, and the plan stays.
    """

    workers: Workers
    slow_links: tuple[Link, ...] = ()
    error: str
