"""Injection of a failure into a live run, from another process."""

from __future__ import annotations

from chameleon_ft.config import FailureKind, FailurePhase
from chameleon_ft.control.requests import request
from chameleon_ft.control.wire.messages import Inject, Refused
from chameleon_ft.errors import ControlError
from chameleon_ft.observe import RunDirectory


def inject(
    run: RunDirectory,
    *,
    worker: int,
    kind: FailureKind,
    phase: FailurePhase | None,
    step: int | None,
    factor: float | None = None,
) -> None:
    """Ask the run's coordinator to inject a failure into `worker`; at once if neither phase nor step is given.

    Args:
        factor: of kind "slow" or "slow-link": the speed, or bandwidth, as a share of the usual one; 1 ends it.

    Raises:
        ConfigError: the run is not live.
        ControlError: the coordinator refuses, for example because there is no such worker.
    """
    if phase is None and step is not None:
        phase = "forward"
    answer = request(run, Inject(worker=worker, kind=kind, phase=phase, step=step, factor=factor))
    if isinstance(answer, Refused):
        raise ControlError(f"--worker {worker}: {answer.reason}")
