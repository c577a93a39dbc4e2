"""Messages fail although no worker is lost: a bad network card, a cut between two hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Final, Self

from chameleon_ft.control.detectors.base import (
    AllQuiesced,
    Fatal,
    Finding,
    Lost,
    MessageFailed,
    Note,
    Signal,
    StepCommitted,
    StopRequested,
)
from chameleon_ft.plan.frozen_map import FrozenMap

_UNEXPLAINED_RETRIES: Final = 3  # generations that may fail in a row without a culprit


@dataclass(frozen=True, slots=True)
class PeerFailureDetector:
    """Gives up the worker at an end of most failed messages.

    A failed message counts against both its ends until the run commits a step. This also finds a faulty worker that
    always reports first, each time against another peer. Once a generation is stopped for another reason, failed
    messages prove nothing: the first worker that stops closes its connections.
    """

    reports: tuple[MessageFailed, ...] = ()  # of the generation that is ending
    is_stopped: bool = False  # whether it is, for another reason
    # Worker -> failed messages with it at an end, since the last committed step.
    against: Mapping[int, int] = FrozenMap({})
    unexplained: int = 0  # generations in a row that ended without a named peer
    last_error: str = ""  # the reason in the newest report

    def __post_init__(self) -> None:
        object.__setattr__(self, "against", FrozenMap(self.against))

    def observe(self, signal: Signal) -> tuple[Self, tuple[Finding, ...]]:
        """See `Detector`."""
        match signal:
            case StopRequested() if not self.reports:
                return replace(self, is_stopped=True), ()
            case MessageFailed() if not self.is_stopped:
                return replace(self, reports=(*self.reports, signal), last_error=signal.error), ()
            case AllQuiesced(is_explained=is_explained) if is_explained or not self.reports:
                return replace(self, reports=(), is_stopped=False), ()
            case StepCommitted():
                return replace(self, reports=(), against={}, unexplained=0), ()
            case AllQuiesced(generation=generation):
                after, finding = self._suspect()
                reports = [asdict(report) for report in self.reports]
                note = Note("messages_failed", {"generation": generation, "reports": reports})
                return after, (note,) if finding is None else (note, finding)
        return self, ()

    def _suspect(self) -> tuple[Self, Finding | None]:
        """Find the worker to give up; if no peer is named, the generation is tried again, a few times."""
        pairs = [(report.reporter, report.peer) for report in self.reports if report.peer is not None]
        if not pairs:
            unexplained = self.unexplained + 1
            after = replace(self, reports=(), unexplained=unexplained)
            if unexplained <= _UNEXPLAINED_RETRIES:
                return after, None
            return after, Fatal(
                f"messages failed {unexplained} times in a row though no worker is lost, at last because "
                f"{self.last_error}; check that the workers reach each other at the addresses of --host"
            )
        against = Counter(self.against)
        against.update(worker for pair in pairs for worker in pair)
        named = Counter(peer for _, peer in pairs)
        suspect = max({w for pair in pairs for w in pair}, key=lambda w: (against[w], named[w], w))
        del against[suspect]
        lost = Lost(suspect, "peer", f"messages with it failed: {self.last_error}")
        return replace(self, reports=(), against=against), lost
