"""The launcher of a session's run, in a process of its own: it needs a main thread without other threads, and signals.

The process prepares the run as the command line does, sends the run directory or the error, and ends with the run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NoReturn

from chameleon_ft.errors import ChameleonError, ControlError
from chameleon_ft.host.fork_server import Lifeline, Terminated, end_with_holder, terminations
from chameleon_ft.session.configuration import RunRequest
from chameleon_ft.session.start import prepare_run

LAUNCHED: Final = "CHAMELEON_LAUNCHED_BY_SESSION"
"""Variable of the environment of all processes of a run that a session has started."""
_SHOWN_BYTES: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A run to prepare and start.

    Attributes:
        ray: Address of the Ray cluster to train on; None: on this machine.
        is_quiet: The output goes to a file of the run.
    """

    request: RunRequest
    ray: str | None
    is_quiet: bool


class RunProcess:
    """The process of a launch, as the session has it. When the session's process ends or drops it, it gets a SIGTERM.

    Raises the error of the launch if the run cannot be prepared.

    Attributes:
        path: The run directory.
    """

    def __init__(self, launch: Launch) -> None:
        lifeline = Lifeline()
        self._pipe, theirs = Pipe()
        # Of the output before the run directory is there, only that of an unexpected error is shown.
        with tempfile.TemporaryFile() as output, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), str(lifeline.descriptor)],
                stdin=subprocess.DEVNULL,
                stdout=output if launch.is_quiet else None,
                stderr=subprocess.STDOUT if launch.is_quiet else None,
                pass_fds=(theirs.fileno(), lifeline.descriptor),
                # A terminal's Ctrl-C is for the session, which ends the run.
                start_new_session=True,
                env={**os.environ, LAUNCHED: "1", "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},
            )
            theirs.close()
            self.drop = weakref.finalize(self, _drop, self._process, lifeline)
            try:
                self._pipe.send(launch)
                answer = self._received()
                if answer is None:
                    code = self._process.wait()
                    output.seek(0)
                    text = output.read()[-_SHOWN_BYTES:].decode(errors="replace").strip()
                    answer = ControlError(f"the process of the run has ended with exit code {code}: {text}")
                if isinstance(answer, ChameleonError):
                    raise answer
                self.path: Path = answer
            except BaseException:
                self.kill()
                raise

    def begin(self) -> None:
        """Let the run start."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()

    def error(self) -> ChameleonError | None:
        """Return why the run could not be started, once the process has ended."""
        found = self._received()
        return found if isinstance(found, ChameleonError) else None

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        self._process.send_signal(number)

    def wait(self) -> int:
        """Wait for its end, and return the exit code."""
        return self._process.wait()

    def kill(self) -> None:
        """End it at once; all processes of a run on this machine end with it."""
        self._process.kill()
        self._process.wait()
        self.drop()

    def _received(self) -> Any:
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            return None


def _drop(process: subprocess.Popen[bytes], lifeline: Lifeline) -> None:
    """Have the run end with a checkpoint, without waiting for that."""
    lifeline.close()
    # As the interpreter ends, no thread can be started, and none is needed.
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=process.wait, daemon=True).start()


def main(pipe: Connection, lifeline: int) -> int:
    """Prepare and launch the run that comes through `pipe`, and return the exit code."""
    end_with_holder(lifeline, signal.SIGTERM)
    launch: Launch = pipe.recv()
    try:
        prepared = prepare_run(launch.request)
        pipe.send(prepared.directory.path)
        pipe.recv()
        if launch.is_quiet:
            with (prepared.directory.logs / "session.log").open("ab") as log:
                for output in (sys.stdout, sys.stderr):
                    output.flush()
                    os.dup2(log.fileno(), output.fileno())
        return prepared.start(_launcher(launch))
    except ChameleonError as error:
        pipe.send(error)
        return 1


def _launcher(launch: Launch) -> Callable[..., int]:
    if launch.ray is None:
        from chameleon_ft.launch.local import train

        return train
    from chameleon_ft.launch import ray

    return partial(ray.train, options=ray.ClusterOptions(address=launch.ray))


def _terminate(*_: object) -> NoReturn:
    raise Terminated


if __name__ == "__main__":
    for _number in terminations():
        signal.signal(_number, _terminate)
    try:
        _code = main(Connection(int(sys.argv[1])), int(sys.argv[2]))
    except KeyboardInterrupt:
        _code = 130
    finally:
        for _number in terminations():
            signal.signal(_number, signal.SIG_IGN)
    sys.exit(_code)
