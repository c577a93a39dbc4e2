"""One rank, started by a cluster's own launcher."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from chameleon_ft.control.wire.address import own_address
from chameleon_ft.runtime.process import exit_immediately

__all__ = ["work"]


def work(*, coordinator: str, token: str, tls: Path | None, environ: Mapping[str, str]) -> NoReturn:
    """Be one rank, started by a launcher that sets RANK and LOCAL_RANK; ends the process.

    Raises:
        ControlError: the coordinator cannot be joined.
    """
    from chameleon_ft.runtime.rank import rank_main

    code = rank_main(
        coordinator=coordinator,
        token=token,
        tls=tls,
        worker=int(environ["RANK"]),
        host=own_address(environ.get("CHAMELEON_HOST"), towards=coordinator),
        local_index=int(environ["LOCAL_RANK"]),
    )
    exit_immediately(code)
