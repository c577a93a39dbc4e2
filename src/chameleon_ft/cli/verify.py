"""`chameleon verify`: compare a run with one plain PyTorch loop."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Optional

import tyro

from chameleon_ft.cli._flags import Switch, optional_argument, parse_arguments
from chameleon_ft.errors import ConfigError
from chameleon_ft.observe import RunDirectory

__all__ = ["main"]


@dataclass(frozen=True)
class VerifyArguments:
    """Repeat the steps of a run in one plain, single-process PyTorch loop and compare losses and gradient norms.

    Exit code 0 where the losses agree within the tolerance, 1 where they do not.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN", help="Run directory.")]
    steps: Annotated[
        Optional[int],  # noqa: UP045
        optional_argument("INT", "Repeat the first steps only; by default all."),
    ] = None
    tolerance: Annotated[float, tyro.conf.arg(help="Largest relative deviation of a loss that is allowed.")] = 1e-5
    json: Annotated[Switch, optional_argument("", "Print the result as JSON.")] = False


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given = parse_arguments(VerifyArguments, arguments, command="verify")
    if given.steps is not None and given.steps < 1:
        raise ConfigError(f"--steps {given.steps}: should be 1 or more")
    run = RunDirectory.open(given.run)
    # Imported here: `--help` waits for neither of them, and torch takes seconds.
    from rich.console import Console
    from rich.progress import track

    from chameleon_ft.verify import Verification, repeat_run

    committed = len({record.step for record in run.steps()})
    total = committed if given.steps is None else min(given.steps, committed)
    console = Console(stderr=True)
    comparisons = track(
        repeat_run(run, limit=given.steps),
        "repeating the run",
        total=total,
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    result = Verification.of(comparisons, tolerance=given.tolerance)
    print(json.dumps(result.to_json()) if given.json else result)
    return 0 if result.first_step_outside is None else 1
