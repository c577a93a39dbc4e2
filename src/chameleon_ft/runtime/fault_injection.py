"""Fault injection: this rank fails in a phase of a step, as a real failure would end it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable

from chameleon_ft.config import Failure, FailureKind, FailurePhase
from chameleon_ft.observe import FaultLog

__all__ = ["FaultInjector", "failures_of_incarnation"]


class FaultInjector:
    """Fails this rank at given phases and steps, from its configuration or ordered while it runs.

    Args:
        failures: failures of the run's configuration; only those of `worker` count.
        log: records the moment of a failure, so that its detection can be timed.
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
    """Return the failure of one incarnation, counted from 1: the n-th has the n-th failure of its worker."""
    return [failure for failure in failures if failure.worker == worker][incarnation - 1 : incarnation]
