"""Whom to give up when messages fail although every worker is there: a bad network card, a cut between two hosts."""

from __future__ import annotations

from collections import Counter
from typing import Any

__all__ = ["Suspicion"]


class Suspicion:
    """Collects who reported which failed message.

    A failed message speaks against both its ends, and the end that is in most of them is given up. What speaks against
    a worker is remembered until the run commits a step, so that a bad one that reports first, and each time another
    peer, is found out.
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[int, int]] = []
        self._reports: list[dict[str, Any]] = []
        self._against: Counter[int] = Counter()
        self._unexplained = 0
        self.last_error = ""
        """What the newest report gave as its reason."""

    def report(self, reporter: int, peer: int | None, error: str) -> None:
        """A message of `reporter` with `peer` failed; None where the operation does not tell with whom."""
        self._reports.append({"reporter": reporter, "peer": peer, "error": error})
        self.last_error = error
        if peer is not None:
            self._pairs.append((reporter, peer))

    @property
    def reports(self) -> list[dict[str, Any]]:
        """What has been reported of the generation that just ended."""
        return self._reports

    @property
    def unexplained(self) -> int:
        """Generations in a row that ended with nobody named."""
        return self._unexplained

    def suspect(self) -> int | None:
        """Return the worker to give up, nobody else being lost; None where nobody was named."""
        if not self._pairs:
            self._unexplained += 1
            self.dismiss()
            return None
        self._against.update(worker for pair in self._pairs for worker in pair)
        named = Counter(peer for _, peer in self._pairs)
        suspect = max({w for pair in self._pairs for w in pair}, key=lambda w: (self._against[w], named[w], w))
        del self._against[suspect]
        self.dismiss()
        return suspect

    def dismiss(self) -> None:
        """What was reported is explained by a loss."""
        self._pairs.clear()
        self._reports = []

    def settle(self) -> None:
        """A step was committed: whatever it was is over."""
        self.dismiss()
        self._against.clear()
        self._unexplained = 0
