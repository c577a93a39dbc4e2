"""`chameleon inject`: make a worker of a live run fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Optional, get_args

import tyro

from chameleon_ft.cli._flags import optional_argument, parse_arguments
from chameleon_ft.config import FailureKind, FailurePhase
from chameleon_ft.errors import ConfigError
from chameleon_ft.observe import RunDirectory

__all__ = ["main"]


@dataclass(frozen=True)
class InjectArguments:
    """Make a worker of a live run fail, to see what becomes of the run.

    It fails at once, or where --phase or --step is given, when it comes to that point.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN", help="Run directory.")]
    worker: Annotated[int, tyro.conf.arg(help="Number of the worker, as the run shows it.")]
    kind: Annotated[
        FailureKind,
        tyro.conf.arg(help="kill: SIGKILL; hang: SIGSTOP; disconnect: its control connection is cut."),
    ] = "kill"
    phase: Annotated[
        Optional[FailurePhase],  # noqa: UP045
        optional_argument(
            "{" + ",".join(get_args(FailurePhase)) + "}", "What the worker should be doing when it fails."
        ),
    ] = None
    step: Annotated[
        Optional[int],  # noqa: UP045
        optional_argument("INT", "Step in which it should fail."),
    ] = None


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given = parse_arguments(InjectArguments, arguments, command="inject")
    run = RunDirectory.open(given.run)
    config = run.config()
    if given.worker < 0:
        raise ConfigError(f"--worker {given.worker}: workers are numbered from 0")
    if given.step is not None and not 0 <= given.step < config.steps:
        raise ConfigError(
            f"--step {given.step}: there is no such step; the run has {config.steps}, numbered 0 to {config.steps - 1}"
        )
    run.read_control()  # says so at once where the run is not live
    from chameleon_ft.control.fault_injection import inject

    inject(run, worker=given.worker, kind=given.kind, phase=given.phase, step=given.step)
    what = {"kill": "is killed", "hang": "is stopped", "disconnect": "is cut off"}[given.kind]
    when = "" if given.phase is None else f" in its next {given.phase}"
    if given.step is not None:
        when += f" in step {given.step}, or the first one after it that has it" if when else f" in step {given.step}"
    print(f"worker {given.worker} {what}{when or ' now'}")
    return 0
