"""When the next checkpoint is written, if the run chooses that itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSchedule:
    """The coordinator requests a checkpoint, which ranks begin after the first step at whose vote all know the request.

    The first one is requested at once, because it measures the cost; later ones after `interval_s`.

    Attributes:
        request: number of the newest request.
        is_requested: whether ranks have not begun the checkpoint of that request.
        is_wanted: whether a user has asked for a checkpoint that ranks have not begun.
        writing: resume step of the checkpoint that is being written; None if there is none.
        since_s: seconds of steps since the newest checkpoint, that one included.
        unsaved_s: seconds of steps since the newest complete checkpoint.
        slowed_s: seconds by which steps took longer while the checkpoint was written.
        cost_s: seconds that the newest checkpoint cost training; None before the first.
        interval_s: seconds of steps between two checkpoints; None until it is computed from the cost.
        is_warned: whether it was considered to warn that the run writes none.
    """

    request: int = 0
    is_requested: bool = False
    is_wanted: bool = False
    writing: int | None = None
    since_s: float = 0.0
    unsaved_s: float = 0.0
    slowed_s: float = 0.0
    cost_s: float | None = None
    interval_s: float | None = None
    is_warned: bool = False

    @property
    def is_due(self) -> bool:
        """Whether a checkpoint is to be requested now."""
        if self.is_requested or self.is_wanted:
            return not self.is_requested
        if self.interval_s is None:
            return self.cost_s is None and self.writing is None
        return self.since_s >= self.interval_s

    def requested(self) -> Self:
        """Note that a checkpoint is requested."""
        return replace(self, request=self.request + 1, is_requested=True)

    def committed(self, step_s: float, *, usual_s: float, begun: int | None) -> Self:
        """Note a committed step.

        Args:
            step_s: its seconds.
            usual_s: seconds of recent steps.
            begun: resume step of the checkpoint that ranks begin after it, if they do.
        """
        after = replace(self, since_s=self.since_s + step_s, unsaved_s=self.unsaved_s + step_s)
        if begun is not None:
            return replace(after.begun(), writing=begun, since_s=0.0, slowed_s=0.0)
        return after if self.writing is None else replace(after, slowed_s=self.slowed_s + step_s - usual_s)

    def begun(self) -> Self:
        """Note that ranks have begun a checkpoint, which every request before it asked for."""
        return replace(self, is_requested=False, is_wanted=False)

    def ended(self, step: int, *, copy_s: float, is_complete: bool) -> Self:
        """Note that the checkpoint of a step is complete, or could not be written.

        `copy_s`: seconds for which training stopped to copy layers.
        """
        unsaved_s = self.since_s if is_complete else self.unsaved_s
        if step != self.writing:
            return replace(self, unsaved_s=unsaved_s)
        cost_s = copy_s + max(0.0, self.slowed_s)
        return replace(self, writing=None, unsaved_s=unsaved_s, cost_s=cost_s, interval_s=None)

    def interrupted(self) -> Self:
        """Note a loss: what was requested is void, and a checkpoint that was being written may never be complete."""
        since_s = self.since_s if self.writing is None else self.unsaved_s
        return replace(self, is_requested=False, writing=None, since_s=since_s, interval_s=None)

    def returned(self) -> Self:
        """Note a return to a checkpoint."""
        return replace(self.interrupted(), since_s=0.0, unsaved_s=0.0)
