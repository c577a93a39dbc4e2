"""The interface of a sink."""

from __future__ import annotations

from typing import Protocol

from chameleon_ft.observe.records import RunRecord


class Sink(Protocol):
    """Takes the records of a run in their order, for another tool; both methods may raise anything."""

    def take(self, record: RunRecord, *, at: float) -> bool:
        """Take a record that was written at `at`, in Unix seconds. Return whether it is one that this sink delivers."""

    def close(self) -> None:
        """Deliver all that waits; nothing follows."""
