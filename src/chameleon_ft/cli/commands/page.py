"""`chameleon page`: the page of a run in a browser."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated

from chameleon_ft.cli.arguments import DEFAULT_ADDRESS, RunPath, metavar, parse_arguments
from chameleon_ft.storage.files import RunDirectory


@dataclass(frozen=True)
class PageArguments:
    """Serve the page of a run, live or over, until Ctrl-C, and its metrics for Prometheus at /metrics.

    Only the files of the run are read. Its buttons ask the coordinator of a live run, and need the token that is
    printed here. Anyone who reaches the address can read the page, so by default only this machine does.
    """

    run: RunPath
    """Run directory."""
    listen: Annotated[str, metavar("HOST:PORT")] = DEFAULT_ADDRESS
    """Where to listen; port 0: any that is free."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given = parse_arguments(PageArguments, arguments, command="page")
    run = RunDirectory.open(given.run)
    from chameleon_ft.launch.page import PageServer

    with closing(PageServer(given.listen)) as server:
        return server.serve(run)
