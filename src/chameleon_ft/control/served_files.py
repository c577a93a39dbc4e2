"""The files of a run that commands of other machines may read through its coordinator."""

from __future__ import annotations

import os
from typing import Final

from chameleon_ft.control.wire.messages import ReadRunFile, Refused, RunFilePart
from chameleon_ft.observe import RunDirectory

_PART_BYTES: Final = 1 << 20  # of a message, but for the rest of its last line


def read_part(run: RunDirectory, request: ReadRunFile) -> RunFilePart | Refused:
    """Return the requested part of a file of the run."""
    path = run.path / request.name
    if path not in (run.config_file, run.metrics_file, run.events_file) and path.parent != run.plans:
        return Refused(reason=f"{request.name}: is not a file of the run that can be read remotely")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, request.offset))
            content = file.read(_PART_BYTES)
            if len(content) == _PART_BYTES:
                content += file.readline()
            return RunFilePart(content=content.decode(), size=size)
    except FileNotFoundError:
        return RunFilePart(content="", size=0)
    except (OSError, ValueError) as error:
        return Refused(reason=f"{request.name}: cannot be read: {error}")
