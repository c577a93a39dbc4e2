"""`chameleon evaluate`: have a live run evaluate its held-out samples now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chameleon_ft.cli.arguments import RunPath, parse_arguments
from chameleon_ft.storage.files import RunDirectory


@dataclass(frozen=True)
class EvaluateArguments:
    """Have a live run evaluate the held-out samples of its job as soon as possible, and print the result.

    Workers begin after the first step at which all of them know of the request.
    """

    run: RunPath
    """Run directory."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given = parse_arguments(EvaluateArguments, arguments, command="evaluate")
    run = RunDirectory.open(given.run)
    # Raises if the run is not live.
    run.read_control()
    from chameleon_ft.launch.live_run import evaluate

    found = evaluate(run)
    print("the run is over without it" if found is None else found.describe())
    return 1 if found is None else 0
