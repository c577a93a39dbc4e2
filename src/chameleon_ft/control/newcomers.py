"""Workers that have come while the run goes on, until a decision has reckoned with them."""

from __future__ import annotations

from dataclasses import dataclass, field

from chameleon_ft.control.decision import Prepared

__all__ = ["Newcomers"]


@dataclass(slots=True)
class Newcomers:
    """Who has come, and whether everyone is to stop for them.

    Attributes:
        workers: live workers that no decision has reckoned with yet.
        is_pausing: whether everyone is to stop after the current step, for a place to be made for them.
        prepared: what was weighed then; None where nothing was, or where they do not change the plan.
    """

    workers: set[int] = field(default_factory=set)
    is_pausing: bool = False
    prepared: Prepared | None = None

    def pause(self, prepared: Prepared) -> None:
        """A change has been found for which everyone is to stop."""
        self.prepared, self.is_pausing = prepared, True

    def settle(self) -> None:
        """All of them have a place, or are spares."""
        self.workers.clear()
        self.is_pausing, self.prepared = False, None
