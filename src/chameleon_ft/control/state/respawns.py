"""Workers that are started again after a loss, and those that are not because they keep dying."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

from chameleon_ft.config import Recovery
from chameleon_ft.errors import ControlError
from chameleon_ft.plan.frozen_map import FrozenMap

__all__ = ["Respawns"]

_SETTLED_STEPS: Final = 100  # an incarnation that lasts for so many steps was a good one: earlier deaths are forgotten


@dataclass(frozen=True, slots=True)
class Respawns:
    """Counts the deaths of each worker since it last lived for long, and when it is to be started again.

    Attributes:
        deaths: worker -> how often it died.
        due: worker -> when it is started again, in monotonic seconds.
    """

    recovery: Recovery
    deaths: Mapping[int, int] = FrozenMap({})
    due: Mapping[int, float] = FrozenMap({})

    def __post_init__(self) -> None:
        object.__setattr__(self, "deaths", FrozenMap(self.deaths))
        object.__setattr__(self, "due", FrozenMap(self.due))

    def died(self, worker: int, *, steps: int) -> Self:
        """Count a death, of an incarnation in which `steps` were committed."""
        before = 0 if steps >= _SETTLED_STEPS else self.deaths.get(worker, 0)
        return replace(self, deaths={**self.deaths, worker: before + 1})

    def reaped(self, worker: int, now: float) -> Self:
        """Note that nothing is left of a worker's process: from now on another one may have its place."""
        if not self.recovery.respawn or self.is_blocked(worker):
            return self
        return replace(self, due={**self.due, worker: now + self.delay_s(worker)})

    def at(self, now: float) -> tuple[Self, tuple[int, ...]]:
        """Return the workers whose time has come, which are then not due any more."""
        ready = tuple(worker for worker, due in self.due.items() if due <= now)
        if not ready:
            return self, ()
        return replace(self, due={worker: due for worker, due in self.due.items() if worker not in ready}), ready

    def delay_s(self, worker: int) -> float:
        """Seconds to wait before the next incarnation: twice as long after each death."""
        return float(self.recovery.respawn_delay_s * 2 ** max(0, self.deaths.get(worker, 0) - 1))

    def is_blocked(self, worker: int) -> bool:
        """Whether the worker is not taken again."""
        return self.deaths.get(worker, 0) > self.recovery.max_respawns

    @property
    def blocklist(self) -> tuple[int, ...]:
        """Workers that are not taken again, ascending."""
        return tuple(sorted(worker for worker in self.deaths if self.is_blocked(worker)))

    def require_welcome(self, worker: int) -> None:
        """Raise ControlError if a worker is not taken again."""
        if self.is_blocked(worker):
            raise ControlError(f"worker {worker} was lost too often and is not taken again; take another number")
