"""`chameleon inject`: inject a failure into a live run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from chameleon_ft.cli.arguments import RunPath, parse_arguments
from chameleon_ft.config import FailureKind, FailurePhase
from chameleon_ft.storage.files import RunDirectory

_KINDS = (
    "kill: SIGKILL; hang: SIGSTOP; disconnect: its control connection is cut; slow: it computes at --factor of its "
    "speed; slow-link: its links have --factor of their bandwidth; corrupt: a random bit of a parameter or of the "
    "optimizer's state flips; nan: an element of its gradient is not a number, once."
)


@dataclass(frozen=True)
class InjectArguments:
    """Inject a failure into a live run, to watch it recover: a worker dies, hangs, slows down or corrupts its state.

    It happens at once, or when the worker reaches the given --phase or --step.
    """

    run: RunPath
    """Run directory."""
    worker: int
    """Number of the worker, as the run shows it."""
    kind: Annotated[FailureKind, tyro.conf.arg(help=_KINDS)] = "kill"
    factor: float | None = None
    """With --kind slow or slow-link: the share of the usual speed or bandwidth, such as 0.5; 1 ends the slowness."""
    phase: FailurePhase | None = None
    """Phase in which the worker should fail."""
    step: int | None = None
    """Step in which the worker should fail."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given = parse_arguments(InjectArguments, arguments, command="inject")
    run = RunDirectory.open(given.run)
    from chameleon_ft.launch.live_run import inject

    phase = inject(run, worker=given.worker, kind=given.kind, phase=given.phase, step=given.step, factor=given.factor)
    what = {
        "kill": "is killed",
        "hang": "is stopped",
        "disconnect": "is cut off",
        "slow": f"computes at {given.factor} of its speed",
        "slow-link": f"has {given.factor} of the bandwidth of its links",
        "corrupt": "has a bit of its state flipped",
        "nan": "has an element of its gradient spoilt",
    }[given.kind]
    when = "now"
    if given.step is not None:
        when = f"in step {given.step}"
        if given.phase is not None or given.kind in ("corrupt", "nan"):
            when = f"in the {phase} of step {given.step}, or of the first later step that has one"
    elif phase is not None:
        when = f"in its next {phase}"
    print(f"worker {given.worker} {what} {when}")
    return 0
