"""Workers that are started again after they were lost, and those that are not because they keep dying."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from chameleon_ft.config import Recovery
from chameleon_ft.control.state.members import Members, Worker
from chameleon_ft.errors import ControlError
from chameleon_ft.observe import Recorder

__all__ = ["BackOff", "Respawns"]

_SETTLED_STEPS = (
    100  # an incarnation in which so many steps were committed was a good one: earlier deaths are forgotten
)


@dataclass(slots=True)
class BackOff:
    """Counts the deaths of each worker since it last lived for long. Reads no clock."""

    recovery: Recovery
    _deaths: Counter[int] = field(default_factory=Counter)

    def died(self, worker: int, *, steps: int) -> int:
        """Count a death, after an incarnation in which `steps` were committed; return how many there are now."""
        if steps >= _SETTLED_STEPS:
            del self._deaths[worker]
        self._deaths[worker] += 1
        return self._deaths[worker]

    def delay_s(self, worker: int) -> float:
        """Seconds to wait before its next incarnation: twice as long after each death."""
        return float(self.recovery.respawn_delay_s * 2 ** max(0, self._deaths[worker] - 1))

    def is_banned(self, worker: int) -> bool:
        """Whether it is not taken again."""
        return self._deaths[worker] > self.recovery.max_respawns


class Respawns:
    """Has lost workers started again by the agents that ran them, if the run is told to. Times are monotonic."""

    def __init__(self, members: Members, recorder: Recorder, recovery: Recovery) -> None:
        self._members = members
        self._recorder = recorder
        self._is_on = recovery.respawn
        self._back_off = BackOff(recovery)
        self._due: dict[int, float] = {}

    def died(self, worker: Worker, *, committed: int) -> None:
        """A worker was lost, after so many steps of the run."""
        steps = 0 if worker.first_step is None else committed - worker.first_step
        was_banned = self._back_off.is_banned(worker.id)
        deaths = self._back_off.died(worker.id, steps=steps)
        if self._back_off.is_banned(worker.id) and not was_banned:
            times = "once" if deaths == 1 else f"{deaths} times"
            self._recorder.event(
                "banned",
                worker=worker.id,
                deaths=deaths,
                message=f"worker {worker.id} was lost {times} and is not taken again; see recovery.max_respawns",
            )

    def reaped(self, worker: Worker, now: float) -> None:
        """Nothing is left of a worker's process: from now on another one may have its place."""
        if self._is_on and not self._back_off.is_banned(worker.id):
            self._due[worker.id] = now + self._back_off.delay_s(worker.id)

    def start_due(self, now: float) -> None:
        """Have those started whose time has come."""
        for number in [number for number, due in self._due.items() if due <= now]:
            del self._due[number]
            worker = self._members[number]
            if not worker.lost or worker.agent is None:
                continue  # somebody else has taken the number, or its host is gone
            self._members.respawn(worker)
            incarnation = self._members[number].incarnation
            self._recorder.event(
                "respawn",
                worker=number,
                incarnation=incarnation,
                message=f"worker {number} is started again, as incarnation {incarnation}",
            )

    @property
    def banned(self) -> tuple[int, ...]:
        """Workers that are not taken again, ascending."""
        return tuple(worker.id for worker in self._members if self._back_off.is_banned(worker.id))

    def require_welcome(self, worker: int) -> None:
        """Raise ControlError where a worker is not taken again."""
        if self._back_off.is_banned(worker):
            raise ControlError(f"worker {worker} was lost too often and is not taken again; take another number")
