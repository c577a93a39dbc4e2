"""When a rank may request a layer that migrates to it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestWindow:
    """The part of each step in which layers are requested, in seconds by `time.monotonic`.

    It lasts until the sources will probably have the sums of the step, as long after its beginning as they had them in
    the step before, and beyond that for as long as votes may be delayed.

    Attributes:
        step_s: of a step, as measured; None if none has been.
        rest_s: predicted time of the first step, if it is the rest of one that was interrupted.
        hold_s: for which votes may still be delayed.
        is_closed: whether no further layer is requested in this step.
        begun_at_s: when the step began.
    """

    step_s: float | None
    rest_s: float | None
    hold_s: float = 0.0
    is_closed: bool = False
    begun_at_s: float = field(default_factory=time.monotonic)
    _open_s: float | None = field(init=False)
    _held_until_s: float | None = None  # while the vote of this step is delayed

    def __post_init__(self) -> None:
        self._open_s = self.rest_s or self.step_s

    def begin(self, *, step_s: float | None, hold_s: float) -> None:
        """Begin to request layers; `step_s` counts if no step has been measured."""
        self.step_s = self.step_s or step_s
        self._open_s = self._open_s or self.step_s
        self.hold_s = hold_s

    @property
    def ends_s(self) -> float | None:
        """When a layer that is requested now has to be there; None if none may be requested."""
        if self.is_closed:
            return None
        if self._held_until_s is not None or self._open_s is None:
            return self._held_until_s
        return self.begun_at_s + self._open_s + self.hold_s

    def hold(self, hold_s: float) -> float:
        """Note that the sources have their sums, and delay the vote for so long; return until when."""
        now_s = time.monotonic()
        self._open_s = now_s - self.begun_at_s
        self.hold_s -= hold_s
        self._held_until_s = now_s + hold_s
        return self._held_until_s

    def next_step(self) -> None:
        """Note that the next step begins."""
        self.is_closed, self._held_until_s = False, None
        if self.rest_s is not None:
            self._open_s, self.rest_s = self.step_s, None
        self.begun_at_s = time.monotonic()
