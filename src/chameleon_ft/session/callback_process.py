"""The process of the callbacks that a configuration names; see `session.callbacks`."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Final

from chameleon_ft.config import RunConfig
from chameleon_ft.errors import ChameleonError, RunFailedError
from chameleon_ft.host.fork_server import end_with_parent
from chameleon_ft.job.reference import call_function
from chameleon_ft.session.configuration import CALLBACK, split_callback
from chameleon_ft.session.session import Callback, Callbacks, Session
from chameleon_ft.worker.inspection import users_errors

# Ranks that compute on all cores come first.
_NICENESS: Final = 10
_POLL_S: Final = 0.1


def load_callbacks(config: RunConfig) -> list[Callback]:
    """Return the callbacks that a configuration names. Raises ConfigError if one cannot be made."""
    found: list[Callback] = []
    for text in config.callbacks:
        reference, arguments = split_callback(text)
        with users_errors(config, of=f'{CALLBACK} "{text}"'):
            made = call_function(reference, config, kind=CALLBACK, arguments=arguments)
        found += made if isinstance(made, Iterable) else [made]
    Callbacks(found, on_error=config.on_callback_error)
    return found


def main(path: str, descriptor: str) -> None:
    """Call the callbacks of the run in a directory, until it is over by a message through the pipe."""
    end_with_parent()
    os.nice(_NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(format="%(message)s")
    pipe = Connection(int(descriptor))
    config: RunConfig = pipe.recv()
    try:
        callbacks = load_callbacks(config)
        with Session(address=path, callbacks=callbacks, on_callback_error=config.on_callback_error) as run:
            run.skip()
            pipe.send(None)
            try:
                while not pipe.poll(_POLL_S):
                    run.report()
            except Exception:
                with contextlib.suppress(ChameleonError):
                    run.stop()
                pipe.poll(None)
                raise
    except ChameleonError as error:
        pipe.send(error)
    except Exception as error:
        logging.getLogger(__name__).exception("a callback has failed; the run is ended")
        pipe.send(RunFailedError(f"a callback has failed: {type(error).__name__}: {error}; {path} can be resumed"))


if __name__ == "__main__":
    main(*sys.argv[1:])
