"""`chameleon coordinator`: run the coordinator of a run that spans several machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chameleon_ft.cli.starting import ConfigFile, Resume, parse_start, prepare_run

__all__ = ["main"]


@dataclass(frozen=True)
class CoordinatorArguments:
    """Run the coordinator of a run that spans several machines. It decides, records and displays; it does not compute.

    Set control.host to an address that the other machines reach. The coordinator prints the address and the token that
    `chameleon agent` and `chameleon worker` need, and waits until all `workers` have joined.
    """

    config: ConfigFile = None
    resume: Resume = None


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given, flags = parse_start(CoordinatorArguments, arguments, command="coordinator")
    prepared = prepare_run(flags, file=given.config, resume=given.resume)
    from chameleon_ft.launch import coordinate

    return prepared.start(coordinate)
