"""Whether a run is live, with its coordinator or without."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Final

from chameleon_ft.control.wire.address import split_address
from chameleon_ft.errors import ChameleonError, ConfigError, LiveRunError
from chameleon_ft.observe import RunDirectory

_ANSWER_S: Final = 2.0  # for a connection, where nothing answers


def lost_run(path: Path) -> RunDirectory:
    """Return the directory of a live run whose coordinator is lost. Raises ConfigError if it is not."""
    directory = RunDirectory.open(path)
    control = directory.read_control()
    with contextlib.suppress(OSError), socket.create_connection(split_address(control.address), timeout=_ANSWER_S):
        raise ConfigError(
            f"--take-over {path}: the coordinator at {control.address} still listens; end it first, by "
            f"`kill -9 {control.pid}` on its host"
        )
    if not directory.journals():
        raise ConfigError(f"--take-over {path}: the run has no journal; begin with --resume")
    return directory


def refuse_live_run(directory: RunDirectory) -> None:
    """Raise LiveRunError if the coordinator of a run lives.

    The id of its process alone proves nothing, because another process may have it now.
    """
    if not directory.control_file.exists():
        return
    control = directory.read_control()
    lives = control.has_process_here()
    if lives is None:
        from chameleon_ft.control.requests import require_coordinator

        with contextlib.suppress(ChameleonError, OSError):
            require_coordinator(control.address, control.token, tls=control.tls)
            lives = True
    if lives:
        where = f" on {control.host}" if control.host else ""
        raise LiveRunError(directory.path, f"process {control.pid}{where}")
