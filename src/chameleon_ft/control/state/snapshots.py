"""The snapshots in the memory of workers: the complete one, and the one that is being taken."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Self

from chameleon_ft.control.state.checkpoint_schedule import CheckpointSchedule
from chameleon_ft.plan.snapshots import Restoration, SnapshotLayout


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state after `step` updates, and what live workers have of it."""

    step: int
    layout: SnapshotLayout

    @property
    def restoration(self) -> Restoration | None:
        """How the state comes back; None if too many workers are lost."""
        return self.layout.restoration()


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshots:
    """Counts what workers report. Only a snapshot that all workers of its generation have confirmed is ever used.

    Attributes:
        complete: the newest complete one.
        taking: the one that is being taken.
        unconfirmed: workers that have not reported their part of it.
        held_up_s: longest time for which training on some worker has waited for it.
        begun_at_s: when it was begun, in monotonic seconds.
        is_fresh: whether the run has begun with fresh weights, and no snapshot has been complete yet; false once it
            has trained under a plan without snapshots.
        schedule: when the next one is requested, if the run chooses that itself.
    """

    complete: Snapshot | None = None
    taking: Snapshot | None = None
    unconfirmed: frozenset[int] = frozenset()
    held_up_s: float = 0.0
    begun_at_s: float = 0.0
    is_fresh: bool = False
    schedule: CheckpointSchedule = field(default_factory=CheckpointSchedule)

    @property
    def restorable(self) -> Snapshot | None:
        """The newest complete snapshot, if live workers still have all of it."""
        complete = self.complete
        return None if complete is None or complete.restoration is None else complete

    def begun(self, step: int, layout: SnapshotLayout, workers: Collection[int], *, now_s: float) -> Self:
        """Note that these workers take a snapshot."""
        return replace(
            self,
            taking=Snapshot(step, layout),
            unconfirmed=frozenset(workers),
            held_up_s=0.0,
            begun_at_s=now_s,
        )

    def confirmed(self, worker: int, held_up_s: float) -> Self:
        """Note that a worker has its part of the snapshot that is being taken; the last one makes it complete."""
        unconfirmed, held_up_s = self.unconfirmed - {worker}, max(self.held_up_s, held_up_s)
        if unconfirmed:
            return replace(self, unconfirmed=unconfirmed, held_up_s=held_up_s)
        return replace(
            self, complete=self.taking, taking=None, unconfirmed=frozenset(), held_up_s=held_up_s, is_fresh=False
        )

    def given_up(self) -> Self:
        """Note that the snapshot that is being taken will not be complete."""
        return replace(self, taking=None, unconfirmed=frozenset(), schedule=self.schedule.interrupted())

    def without(self, worker: int) -> Self:
        """Note that a worker is lost, with what it had in memory."""
        if self.complete is None:
            return self
        left = replace(self.complete, layout=self.complete.layout.without(worker))
        return replace(self, complete=left)

    def loaded(self, step: int, *, is_fresh: bool) -> Self:
        """Note that all workers begin with the state after `step` updates: later snapshots are void."""
        complete = self.complete if self.complete is not None and self.complete.step <= step else None
        return replace(self.given_up(), complete=complete, is_fresh=is_fresh, schedule=self.schedule.returned())

    def distrusted(self, after: int) -> Self:
        """Note that the state may have been wrong for more than `after` updates."""
        keeps = self.complete is not None and self.complete.step <= after
        return replace(self.given_up(), complete=self.complete if keeps else None)
