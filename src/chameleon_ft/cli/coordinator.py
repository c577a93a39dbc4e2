"""`chameleon coordinator`: the coordinator of a run that spans several machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chameleon_ft.cli._prepare import ConfigFile, Resume, StartArguments, prepare_run

__all__ = ["main"]


@dataclass(frozen=True)
class CoordinatorArguments(StartArguments):
    """Run the coordinator of a run that spans several machines; it decides, records and shows, and computes nothing.

    Set control.host to an address that the other machines reach. It prints the address and the token that
    `chameleon agent` and `chameleon worker` need, and waits until `workers` of them have joined.
    """

    config: ConfigFile = None
    resume: Resume = None


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    prepared = prepare_run(CoordinatorArguments, arguments, command="coordinator")
    from chameleon_ft.launch import coordinate

    return prepared.start(coordinate)
