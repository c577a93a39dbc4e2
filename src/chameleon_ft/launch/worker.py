"""One rank, started by a cluster's own launcher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from chameleon_ft.control.wire.address import CoordinatorAccess, own_address
from chameleon_ft.runtime.process import exit_immediately


def work(access: CoordinatorAccess, *, environ: Mapping[str, str]) -> NoReturn:
    """Be one rank, started by a launcher that sets RANK and LOCAL_RANK; ends the process.

    Raises:
        ControlError: the coordinator cannot be joined.
    """
    from chameleon_ft.runtime.rank import rank_main

    code = rank_main(
        access,
        worker=int(environ["RANK"]),
        host=own_address(environ.get("CHAMELEON_HOST"), towards=access.address),
        local_index=int(environ["LOCAL_RANK"]),
    )
    exit_immediately(code)
