"""Injection of a failure into a live run, from another process."""

from __future__ import annotations

from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from chameleon_ft.config import FailureKind, FailurePhase
from chameleon_ft.control.wire.address import bearer, websocket_url
from chameleon_ft.control.wire.messages import Inject, Refused, decode, encode
from chameleon_ft.errors import ConfigError
from chameleon_ft.observe import RunDirectory

__all__ = ["inject"]


def inject(run: RunDirectory, *, worker: int, kind: FailureKind, phase: FailurePhase | None, step: int | None) -> None:
    """Ask the run's coordinator to make `worker` fail; at once if neither phase nor step is given.

    Raises:
        ConfigError: the run is not live, or has no such worker.
    """
    control = run.read_control()
    if phase is None and step is not None:
        phase = "forward"
    try:
        with connect(
            websocket_url(control.address), additional_headers=bearer(control.token), proxy=None, compression=None
        ) as connection:
            connection.send(encode(Inject(worker=worker, kind=kind, phase=phase, step=step)))
            answer = decode(connection.recv(timeout=5))
    except (OSError, WebSocketException, EOFError) as error:
        raise ConfigError(
            f"{run.path}: the coordinator at {control.address} does not answer ({error}); this run is not live any more"
        ) from None
    if isinstance(answer, Refused):
        raise ConfigError(f"--worker {worker}: {answer.reason}")
