"""The input of a decision."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from chameleon_ft.errors import ConfigError
from chameleon_ft.estimate import StallModel
from chameleon_ft.plan import Placement, Plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.recovery.checkpoints import Checkpoints
from chameleon_ft.schedule import CostModel, InFlightLimit
from chameleon_ft.search import DEFAULT_EFFORT

__all__ = ["DecisionContext"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionContext:
    """The known facts when workers were lost, have joined or have become slower.

    Attributes:
        plan: the active plan, lost workers included.
        in_flight_limits: the most micro-batches that its workers can keep; workers that it lacks are not bounded.
        costs: costs of a step; its cluster has all live workers, spares and new ones too.
        phases: the expected stall, transfers left out.
        repeat_s: work of the interrupted step that is done again, in seconds; see `TransitionEstimate`.
        restart_s: seconds that going back to a checkpoint takes, steps since it left out.
        has_checkpoints: whether there is one to go back to when a layer loses its last holder; else the run ends then.
        step_factor: measured seconds of a step by those that its operations explain; every predicted step is as much
            longer, whatever the plan.
        transfer_factor: measured seconds of transfers by those that messages and links explain, likewise.
        effort: how much `find_plan` searches.
        holdings: what live workers hold, where that is more than their part of the plan: a transfer that was cut short
            leaves layers behind that need not be sent again.
        checkpoints: how often they are written, if there are any.
        home: the plan whose empty places idle workers may take; None if they stay idle.
        home_in_flight_limits: what workers can keep at most under it.

    Raises:
        ConfigError: seconds that are negative or not finite, or factors that are not positive.
    """

    plan: Plan
    in_flight_limits: Mapping[int, InFlightLimit]
    costs: CostModel
    phases: StallModel
    repeat_s: float
    restart_s: float
    has_checkpoints: bool = True
    step_factor: float = 1.0
    transfer_factor: float = 1.0
    effort: int | None = DEFAULT_EFFORT
    holdings: Placement | None = None
    checkpoints: Checkpoints = Checkpoints()  # noqa: RUF009 - frozen
    home: Plan | None = None
    home_in_flight_limits: Mapping[int, InFlightLimit] = field(default_factory=lambda: FrozenMap({}))
    # Asked for time and again while a decision is made.
    _live: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _lost: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _placement: Placement = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        live = {worker.id for worker in self.costs.cluster.workers}
        lost = tuple(worker for worker in self.plan.workers if worker not in live)
        object.__setattr__(self, "_live", tuple(sorted(live)))
        object.__setattr__(self, "_lost", lost)
        object.__setattr__(self, "_placement", self.plan.placement.without(lost) if lost else self.plan.placement)
        object.__setattr__(self, "in_flight_limits", FrozenMap(self.in_flight_limits))
        object.__setattr__(self, "home_in_flight_limits", FrozenMap(self.home_in_flight_limits))
        for name in ("repeat_s", "restart_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} must be zero or a positive number of seconds; got {value}")
        for name in ("step_factor", "transfer_factor"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be a positive number; got {value}")

    @property
    def live(self) -> tuple[int, ...]:
        """The live workers, ascending."""
        return self._live

    @property
    def lost(self) -> tuple[int, ...]:
        """The lost workers of the plan, ascending."""
        return self._lost

    @property
    def placement(self) -> Placement:
        """The layers that the plan gives the live workers; layers on other workers are of an earlier step."""
        return self._placement

    @property
    def held(self) -> Placement:
        """The layers that the live workers hold: these need not be sent to them, and they can send these."""
        return self.placement if self.holdings is None else self.holdings

    @property
    def saves_first(self) -> bool:
        """Whether a checkpoint is written before all go back to one: if no worker is lost, and runs may write then."""
        return self.checkpoints.write_s is not None and not self.lost and not self.held.unheld_layers

    @property
    def return_s(self) -> float:
        """Seconds that are lost if all go back to a checkpoint now, work that is done again included."""
        written_s = self.checkpoints.write_s if self.saves_first else None
        return self.restart_s + (self.checkpoints.unsaved_s if written_s is None else written_s)
