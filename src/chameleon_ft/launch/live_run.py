"""Requests to the coordinator of a live run, from another process: failures, drains, checkpoints, the end, records."""

from __future__ import annotations

import contextlib
import os
import signal
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Final, TypeVar, get_args

from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection

from chameleon_ft.config import SLOWNESS, FailureKind, FailurePhase
from chameleon_ft.errors import ChameleonError, ConfigError, ControlError
from chameleon_ft.events import kinds
from chameleon_ft.events.base import Event
from chameleon_ft.events.decisions import PlanInForce
from chameleon_ft.events.lines import Record
from chameleon_ft.events.records import Evaluation, FailureRecord
from chameleon_ft.protocol.codec import decode, encode
from chameleon_ft.protocol.connection import blocking_connection
from chameleon_ft.protocol.messages import (
    CheckpointState,
    Drain,
    Evaluate,
    Finish,
    Inject,
    Message,
    ReadRunFile,
    Refused,
    RunFilePart,
    SaveCheckpoint,
)
from chameleon_ft.report.follower import RunWatcher
from chameleon_ft.report.view import RunReport
from chameleon_ft.storage.files import ControlAddress, RunDirectory

_ANSWER_TIMEOUT_S: Final = 5.0
_POLL_S: Final = 0.2
_ENDING_S: Final = 5.0
_OUT: Final = kinds.Drained, FailureRecord, kinds.JoinFailed
"""Events of a worker that has left."""


def request(run: RunDirectory, message: Message) -> Message:
    """Return the coordinator's answer to a message.

    Raises:
        ConfigError: the run is not live.
        ControlError: the coordinator is held up, or does not lead the run now.
    """
    with _coordinator(run) as connection:
        connection.send(encode(message))
        try:
            return decode(connection.recv(timeout=_ANSWER_TIMEOUT_S))
        except TimeoutError:
            raise ControlError(
                f"{run.path}: the coordinator has not answered for {_ANSWER_TIMEOUT_S:g} s; it may be held up, and act "
                f"later: see `chameleon status {run.path}`"
            ) from None


def drain(run: RunDirectory, *, workers: Collection[int] = (), host: str | None = None) -> tuple[int, ...]:
    """Ask the run's coordinator to drain workers, those of a host included; return all workers that leave.

    Raises:
        ConfigError: the run is not live.
        ControlError: the coordinator refuses.
    """
    return _granted(run, Drain(workers=tuple(sorted({*workers})), host=host)).workers


def checkpoint(run: RunDirectory) -> int:
    """Ask the run's coordinator for a checkpoint, and return the number of steps that are committed by then.

    Raises what `drain` raises.
    """
    committed = _granted(run, SaveCheckpoint()).committed
    assert committed is not None
    return committed


def evaluate(run: RunDirectory) -> Evaluation | None:
    """Have the held-out samples evaluated, and wait for the result; None if the run is over without one.

    Raises what `drain` raises, also if the coordinator is lost, and none leads for long.
    """
    before = count_events(run)
    _granted(run, Evaluate())

    def found() -> Evaluation | None:
        return next((event for event in _events(run)[before:] if isinstance(event, Evaluation)), None)

    _wait(run, lambda _: found() is not None)
    return found()


def stop(run: RunDirectory, *, at_once: bool = False) -> None:
    """Ask the run's coordinator to end the run after the current step with a checkpoint, or at once without one.

    Raises what `drain` raises.
    """
    _granted(run, Finish(at_once=at_once))


@contextmanager
def signals_obeyed(actions: str, run: RunDirectory) -> Iterator[None]:
    """Have SIGUSR1 and SIGUSR2 ask the coordinator of a run for a checkpoint or its end within the block.

    Without an action they change nothing. Processes that are forked from this one do nothing at them.

    Args:
        actions: As in the configuration, such as "USR1=checkpoint".
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    own, chosen = os.getpid(), dict(each.split("=") for each in actions.split(",") if each)

    def ask(name: str, action: str) -> None:
        try:
            print(f"SIG{name}: {action}", flush=True)
            stop(run) if action == "stop" else checkpoint(run)
        except ChameleonError as error:
            print(f"SIG{name}: {action}: {error}", file=sys.stderr, flush=True)

    def handle(number: int, _: object) -> None:
        name = signal.Signals(number).name.removeprefix("SIG")
        # A group of processes gets a signal as a whole.
        if os.getpid() == own and name in chosen:
            threading.Thread(target=ask, args=(name, chosen[name]), daemon=True).start()

    before = {number: signal.signal(number, handle) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def count_events(run: RunDirectory) -> int:
    """Return how many events a run has recorded, for the functions that wait. Raises ConfigError."""
    return len(_events(run))


def _events(run: RunDirectory) -> list[Event]:
    """Return the events of a run; a damaged line of the past is no reason to fail."""
    return run.readable_events()[0]


_Asked = TypeVar("_Asked", bound=Message)


def _granted(run: RunDirectory, message: _Asked) -> _Asked:
    """Return the answer to a request, which is of its type. Raises ControlError if it is refused, or ConfigError."""
    answer = request(run, message)
    if isinstance(answer, Refused):
        raise ControlError(answer.reason)
    assert isinstance(answer, type(message))
    return answer


def wait_until_out(run: RunDirectory, workers: Collection[int], *, after: int) -> None:
    """Wait until the run is over, or has drained or lost these workers, by its events without the first `after`.

    Raises:
        ConfigError: the coordinator is lost.
        ControlError: there is no plan without these workers, so some of them stay; or no coordinator leads for long.
    """
    _wait(run, lambda _: not _remaining(workers, _events(run)[after:]))


def wait_until_saved(
    run: RunDirectory, committed: int, *, after: int, delayed: Callable[[str], None] = lambda _: None
) -> int | None:
    """Wait for a checkpoint after `committed` steps or more, by the run's events without the first `after`.

    Args:
        delayed: called once with the reason if the files of the run cannot be written, so that no checkpoint can be
            marked as complete.

    Returns:
        The step it resumes with; None if the run is over without one.

    Raises:
        ConfigError: the coordinator is lost.
        ControlError: it could not be written, or no coordinator leads for long.
    """
    reasons: list[str] = []

    def is_saved(connection: ClientConnection) -> bool:
        if _saved(committed, _events(run)[after:]) is not None:
            return True
        connection.send(encode(CheckpointState(committed=committed)))
        with contextlib.suppress(TimeoutError):
            answer = decode(connection.recv(timeout=_POLL_S))
            if isinstance(answer, CheckpointState):
                if answer.failed is not None:
                    raise _not_written(*answer.failed)
                if answer.late and not reasons:
                    reasons.append(answer.late)
                    delayed(answer.late)
        return False

    _wait(run, is_saved)
    return _saved(committed, _events(run)[after:])


def wait_until_over(run: RunDirectory) -> None:
    """Wait for the end of the run. Raises ConfigError or ControlError if the coordinator is lost."""
    _wait(run, lambda _: False)


def _wait(run: RunDirectory, is_done: Callable[[ClientConnection], bool]) -> None:
    """Wait until something is so, or the run is over.

    Raises ConfigError or ControlError if the coordinator is lost, and none leads for long.
    """
    until_s = None
    while True:
        try:
            with _coordinator(run) as connection:
                until_s = None
                while not is_done(connection):
                    with contextlib.suppress(TimeoutError):
                        # No other message comes, but the connection ends with the run.
                        connection.recv(timeout=_POLL_S)
            return
        except (ConfigError, _DoesNotLeadError):
            # A run removes the file soon after the end of its connections; if the coordinator is lost, another one
            # replaces it, on this machine or after the lease.
            until_s = until_s or time.monotonic() + run.config().control.lease_s + _ENDING_S
            if not run.control_file.exists():
                return
            if time.monotonic() > until_s:
                raise
        time.sleep(_POLL_S)


def _saved(committed: int, events: Iterable[Event]) -> int | None:
    """Return the step of a checkpoint of this or a later step. Raises ControlError if one could not be written."""
    for event in events:
        if isinstance(event, kinds.CheckpointFailed) and event.step >= committed:
            raise _not_written(event.step, event.error)
        if isinstance(event, kinds.CheckpointComplete) and event.step >= committed:
            return event.step
    return None


def _not_written(step: int, why: str) -> ControlError:
    return ControlError(f"the checkpoint of step {step} could not be written: {why}")


def _remaining(workers: Iterable[int], events: Iterable[Event]) -> set[int]:
    """Return the workers that are not out yet. Raises ControlError if one of them stays."""
    remaining = set(workers)
    for event in events:
        if isinstance(event, _OUT):
            remaining.discard(event.worker)
        elif isinstance(event, kinds.DrainFailed) and (kept := sorted(remaining.intersection(event.workers))):
            raise ControlError(f"there is no plan without the workers {kept}, which stay: {event.reason}")
    return remaining


def require_coordinator(address: str, token: str, *, tls: Path | None) -> None:
    """Return if a coordinator answers at host:port.

    Raises:
        ControlError: it rejects the token, or this process its certificate.
        OSError: none answers.
    """
    try:
        with blocking_connection(address, token, tls=tls, open_timeout_s=_ANSWER_TIMEOUT_S):
            pass
    except InvalidStatus as error:
        raise ControlError(
            f"the coordinator at {address} rejects this process: {error.response.reason_phrase or error}; "
            "check the token"
        ) from None
    except ssl.SSLCertVerificationError as error:
        raise ControlError(f"the certificate of the coordinator at {address} is not accepted: {error}") from None
    except (WebSocketException, EOFError) as error:
        raise OSError(str(error)) from None


class _DoesNotLeadError(ControlError):
    """A coordinator does not lead the run, or does not yet."""


@contextmanager
def _coordinator(run: RunDirectory) -> Iterator[ClientConnection]:
    """Yield a connection to the run's coordinator.

    Raises:
        ConfigError: the run is not live, or ends in the block.
        _DoesNotLeadError: another coordinator is about to lead.
    """
    control = run.read_control()
    try:
        with blocking_connection(control.address, control.token, tls=control.tls) as connection:
            yield connection
    except (OSError, WebSocketException, EOFError) as error:
        if isinstance(error, InvalidStatus) and error.response.status_code == HTTPStatus.SERVICE_UNAVAILABLE:
            raise _DoesNotLeadError(
                f"{run.path}: the process at {control.address} does not take requests now "
                f"({error.response.reason_phrase}); try again in some seconds"
            ) from None
        raise ConfigError(
            f"{run.path}: the coordinator at {control.address} does not answer ({error}); this run is not live any "
            "more, or its coordinator is yet to be replaced"
        ) from None


def inject(
    run: RunDirectory,
    *,
    worker: int,
    kind: FailureKind = "kill",
    phase: FailurePhase | None = None,
    step: int | None = None,
    factor: float | None = None,
) -> FailurePhase | None:
    """Ask the run's coordinator to inject a failure into `worker`, and return the phase in which it is to happen.

    It happens at once, and no phase is returned, if neither phase nor step is given, unless the kind needs a phase.

    Args:
        factor: For "slow" or "slow-link", the speed or bandwidth as a share of the usual one; 1 ends it.

    Raises:
        ConfigError: There is no such failure, or the run is not live.
        ControlError: The coordinator refuses, for example because there is no such worker.
    """
    steps = run.config().steps
    if worker < 0:
        raise ConfigError(f"--worker {worker}: workers are numbered from 0")
    if kind not in get_args(FailureKind):
        raise ConfigError.unknown_name("kind of failure", kind, get_args(FailureKind))
    if step is not None and not 0 <= step < steps:
        raise ConfigError(f"--step {step}: there is no such step; the run has {steps}, numbered 0 to {steps - 1}")
    if kind in SLOWNESS and factor is None:
        raise ConfigError(f"--factor is missing: --kind {kind} needs a share of what is usual, such as 0.5")
    if factor is not None and not 0 < factor <= 1:
        raise ConfigError(f"--factor {factor}: a share is above 0 and up to 1, which is the usual speed")
    if kind not in SLOWNESS and factor is not None:
        raise ConfigError(f"--factor {factor}: only --kind slow and slow-link have a factor, not {kind}")
    if phase is None and kind == "nan":
        phase = "backward"
    elif phase is None and (kind == "corrupt" or step is not None):
        phase = "forward"
    answer = request(run, Inject(worker=worker, kind=kind, phase=phase, step=step, factor=factor))
    if isinstance(answer, Refused):
        raise ControlError(f"--worker {worker}: {answer.reason}")
    return phase


_RECORDS_TIMEOUT_S: Final = 30.0


@contextmanager
def remote_watcher(address: str, token: str, *, tls: Path | None) -> Iterator[RemoteWatcher]:
    """Yield a watcher of the run of the coordinator at host:port.

    Raises ControlError if the coordinator does not answer, also in the block.
    """
    with _answering(address):
        connection = blocking_connection(address, token, tls=tls)
    with connection, tempfile.TemporaryDirectory(prefix="chameleon-watch-") as folder:
        copy = _RunCopy(RunDirectory(Path(folder)), connection, address)
        copy.add_new("config.toml")
        # Requests find the coordinator by it, as in the run's own directory.
        copy.run.write_control(ControlAddress(address=address, token=token, pid=0, tls=tls))
        yield RemoteWatcher(copy)


@contextmanager
def _answering(address: str) -> Iterator[None]:
    """Say that the coordinator does not answer if a message to it or from it fails in the block."""
    try:
        yield
    except (OSError, WebSocketException, EOFError) as error:
        raise ControlError(
            f"the coordinator at {address} does not answer any more ({error}): the run is over, or its coordinator is "
            "lost or has been replaced"
        ) from None


class _RunCopy:
    """A run directory with copies of the files that are needed to report the state of a run."""

    def __init__(self, run: RunDirectory, connection: ClientConnection, address: str) -> None:
        self.run = run
        self.address = address
        self._connection = connection
        run.plans.mkdir(parents=True)

    def add_new(self, name: str) -> None:
        """Copy what has been added to a file. Raises ControlError if it may not be read."""
        path = self.run.path / name
        with path.open("ab") as file:
            while True:
                part = self._answer(ReadRunFile(name=name, offset=file.tell()))
                file.write(part.content.encode())
                if file.tell() >= part.size or not part.content:
                    return

    def _answer(self, request: ReadRunFile) -> RunFilePart:
        with _answering(self.address):
            self._connection.send(encode(request))
            while True:
                match decode(self._connection.recv(timeout=_RECORDS_TIMEOUT_S)):
                    case RunFilePart() as part:
                        return part
                    case Refused(reason=reason):
                        raise ControlError(reason)


class RemoteWatcher(RunWatcher):
    """Watches a run through its coordinator."""

    def __init__(self, copy: _RunCopy) -> None:
        super().__init__(copy.run, clock=time.time)
        self._copy = copy

    def update(self) -> list[Record]:
        """See `RunWatcher`. Raises ControlError if the coordinator does not answer."""
        for file in (self.run.metrics_file, self.run.events_file):
            self._copy.add_new(file.name)
        records = super().update()
        plans = [record.file for record in records if isinstance(record, PlanInForce)]
        if plans:
            self._copy.add_new(plans[-1])
        return records

    def report(self) -> RunReport:
        """See `RunWatcher`; the run is named by its address."""
        return replace(super().report(), run=f"the run of the coordinator at {self._copy.address}")

    def has_coordinator(self) -> bool:
        """Return True: its coordinator has sent the records."""
        return True
