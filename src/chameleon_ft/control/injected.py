"""Failures that are injected into a live run: passed on to whom they are for, and known again when they come true."""

from __future__ import annotations

import time
from typing import Any

from chameleon_ft.control.state.incident import Loss
from chameleon_ft.control.state.members import Members, Worker
from chameleon_ft.control.wire.messages import Inject, Kill, Message, Refused
from chameleon_ft.observe import FaultLog, NoticedBy

__all__ = ["Injected"]


class Injected:
    """The failures of this incarnation of a run; `faults` has those of all its incarnations."""

    def __init__(self, members: Members, faults: FaultLog) -> None:
        self._members = members
        self._faults = faults
        self._began_at = time.time()

    def inject(self, message: Inject, *, committed: int) -> Message:
        """Have a worker fail as `message` says; return the answer to whoever asked for it."""
        if message.worker not in self._members.live():
            return Refused(reason=f"worker {message.worker} is not live; live are {self._members.live()}")
        if message.step is not None and message.step < committed:
            return Refused(reason=f"step {message.step} is over; the run is in step {committed}")
        worker = self._members[message.worker]
        if message.kind == "kill" and message.phase is None and worker.agent is not None:
            self._faults.append(worker=worker.id, kind="kill", phase=None, step=None)
            worker.agent.send(Kill(worker=worker.id))
        else:
            self._members.send(worker.id, message)
        return message

    def loss(self, worker: Worker, *, step: int, noticed_by: NoticedBy, cause: str) -> Loss:
        """The loss of a worker that is noticed now. When it failed is known where it was made to."""
        fault = self._of(worker)
        return Loss(
            worker=worker.id,
            step=step,
            noticed_by=noticed_by,
            cause=cause,
            noticed_at=time.time(),
            incarnation=worker.incarnation,
            failed_at=None if fault is None else fault["time"],
        )

    def cause(self, loss: Loss) -> str:
        """Say what is known by now of why a worker was lost."""
        worker = self._members.in_life(loss.worker, loss.incarnation)
        assert worker is not None
        return loss.describe_cause(crash=worker.crash, exit_code=worker.exit_code, fault=self._of(worker))

    def _of(self, worker: Worker) -> dict[str, Any] | None:
        return self._faults.first_since(worker.id, max(self._began_at, worker.since))
