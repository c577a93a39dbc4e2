"""Requests to the coordinator of a live run, from another process: failures to inject, workers to drain."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from chameleon_ft.control.wire.address import bearer, websocket_url
from chameleon_ft.control.wire.codec import decode, encode
from chameleon_ft.control.wire.messages import Drain, Message, Refused
from chameleon_ft.control.wire.tls import tls_context
from chameleon_ft.errors import ConfigError, ControlError
from chameleon_ft.observe import RunDirectory

__all__ = ["drain", "knock", "request", "wait_until_out"]

_ANSWER_TIMEOUT_S: Final = 5.0
_POLL_S: Final = 0.2
_OUT: Final = ("drained", "failure", "join_failed")  # events of a worker that has left


def request(run: RunDirectory, message: Message) -> Message:
    """Return the coordinator's answer to a message. Raises ConfigError if the run is not live."""
    with _coordinator(run) as connection:
        connection.send(encode(message))
        return decode(connection.recv(timeout=_ANSWER_TIMEOUT_S))


def drain(run: RunDirectory, *, workers: Collection[int] = (), host: str | None = None) -> tuple[int, ...]:
    """Ask the run's coordinator to drain workers, those of a host included; return all workers that leave.

    Raises:
        ConfigError: the run is not live.
        ControlError: the coordinator refuses.
    """
    answer = request(run, Drain(workers=tuple(sorted({*workers})), host=host))
    if isinstance(answer, Refused):
        raise ControlError(answer.reason)
    assert isinstance(answer, Drain)
    return answer.workers


def wait_until_out(run: RunDirectory, workers: Collection[int], *, after: int) -> None:
    """Wait until the run is over, or has drained or lost these workers, by its events without the first `after`.

    Raises:
        ConfigError: the coordinator is lost.
        ControlError: there is no plan without these workers, so some of them stay.
    """
    try:
        with _coordinator(run) as connection:
            while _remaining(workers, run.events()[after:]):
                with contextlib.suppress(TimeoutError):
                    connection.recv(timeout=_POLL_S)  # no message comes, but the connection ends with the run
    except ConfigError:
        if run.control_file.exists():  # a run removes it at its end
            raise


def _remaining(workers: Iterable[int], events: Iterable[Mapping[str, Any]]) -> set[int]:
    """Return the workers that are not out yet. Raises ControlError if one of them stays."""
    remaining = set(workers)
    for event in events:
        if event["event"] in _OUT:
            remaining.discard(event["worker"])
        elif event["event"] == "drain_failed" and (kept := sorted(remaining.intersection(event["workers"]))):
            raise ControlError(f"there is no plan without the workers {kept}, which stay: {event['reason']}")
    return remaining


def knock(address: str, token: str, *, tls: Path | None) -> None:
    """Return if a coordinator answers at host:port.

    Raises:
        ControlError: it rejects the token, or this process its certificate.
        OSError: none answers.
    """
    try:
        connect(
            websocket_url(address, tls=tls is not None),
            ssl=tls_context(tls),
            additional_headers=bearer(token),
            proxy=None,
            open_timeout=_ANSWER_TIMEOUT_S,
        ).close()
    except InvalidStatus as error:
        raise ControlError(
            f"the coordinator at {address} rejects this process: {error.response.reason_phrase or error}; "
            "check the token"
        ) from None
    except ssl.SSLCertVerificationError as error:
        raise ControlError(f"the certificate of the coordinator at {address} is not accepted: {error}") from None
    except (WebSocketException, EOFError) as error:
        raise OSError(str(error)) from None


@contextmanager
def _coordinator(run: RunDirectory) -> Iterator[ClientConnection]:
    """Yield a connection to the run's coordinator. Raises ConfigError if the run is not live, or ends in the block."""
    control = run.read_control()
    try:
        with connect(
            websocket_url(control.address, tls=control.tls is not None),
            ssl=tls_context(control.tls),
            additional_headers=bearer(control.token),
            proxy=None,
            compression=None,
        ) as connection:
            yield connection
    except (OSError, WebSocketException, EOFError) as error:
        raise ConfigError(
            f"{run.path}: the coordinator at {control.address} does not answer ({error}); this run is not live any more"
        ) from None
