"""The callbacks that a configuration names, beside the command that starts the run: in a process of their own.

The process follows the records of the run, as a session does that is given the address of a live run. So no callback
delays the run, and the process of the command, which forks others, loads no code of the user.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Final

from chameleon_ft.config import RunConfig
from chameleon_ft.errors import ChameleonError
from chameleon_ft.host.fork_server import Terminated
from chameleon_ft.storage.files import RunDirectory

_PROCESS: Final = "chameleon_ft.session.callback_process"


@contextmanager
def callbacks_beside(config: RunConfig, run: RunDirectory) -> Iterator[None]:
    """Call the callbacks of a configuration from another process inside the block, and at its end.

    Raises:
        ConfigError: One cannot be made.
        RunFailedError: The run was ended because one has failed, at the end of the block.
    """
    if not config.callbacks:
        yield
        return
    ours, theirs = Pipe()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", _PROCESS, str(run.path), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            # Ctrl-C ends the run, and then its callbacks.
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},
        )
        theirs.close()
        try:
            ours.send(config)
            if isinstance(answer := _received(ours), ChameleonError):
                raise answer
            yield
            with contextlib.suppress(KeyboardInterrupt, Terminated):
                # The last of them may take long; a signal ends it.
                with contextlib.suppress(OSError):
                    ours.send(None)
                if isinstance(answer := _received(ours), ChameleonError):
                    raise answer
                if process.wait():
                    print(f"callbacks: their process was lost, with exit code {process.returncode}", file=sys.stderr)
        finally:
            process.kill()
            process.wait()


def _received(pipe: Connection) -> object:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None
