"""Fault injection: this rank fails itself in a phase of a step, as a real failure would end it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable

from chameleon_ft.config import Failure, FailureKind, FailurePhase
from chameleon_ft.observe import FaultLog

__all__ = ["FaultInjector", "failures_of_incarnation"]


class FaultInjector:
    """Fails this rank at the phases and steps it was told, from its configuration or while it runs.

    Args:
        worker: this rank's worker.
        failures: failures of the run's configuration; those of other workers are passed over.
        log: where the moment of a failure is noted, so that its detection can be timed.
        disconnect: cuts the control connection.
    """

    def __init__(
        self, worker: int, failures: Iterable[Failure], *, log: FaultLog, disconnect: Callable[[], None]
    ) -> None:
        self._worker = worker
        self._planned = [failure for failure in failures if failure.worker == worker]
        self._log = log
        self._disconnect = disconnect
        self._lock = threading.Lock()

    def plan(self, failure: Failure) -> None:
        """Add a failure. Called by the control thread."""
        with self._lock:
            self._planned.append(failure)

    def at(self, phase: str, step: int) -> None:
        """Fail now if a failure is planned for this phase of `step` or of an earlier one."""
        with self._lock:
            due = [failure for failure in self._planned if failure.phase == phase and failure.step <= step]
            for failure in due:
                self._planned.remove(failure)
        for failure in due:
            self.fail(failure.kind, phase=failure.phase, step=step)

    def fail(self, kind: FailureKind, *, phase: FailurePhase | None, step: int | None) -> None:
        """Fail at once."""
        self._log.append(worker=self._worker, kind=kind, phase=phase, step=step)
        match kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "disconnect":
                self._disconnect()


def failures_of_incarnation(failures: Iterable[Failure], worker: int, incarnation: int) -> list[Failure]:
    """Return the failures of one incarnation, counted from 1: of several, each incarnation has one, in their order."""
    return [failure for failure in failures if failure.worker == worker][incarnation - 1 : incarnation]
