"""`chameleon inject`: inject a failure into a live run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Optional, get_args

import tyro

from chameleon_ft.cli.arguments import OptionalFloat, OptionalInt, RunPath, metavar, parse_arguments
from chameleon_ft.config import SLOWNESS, FailureKind, FailurePhase
from chameleon_ft.errors import ConfigError
from chameleon_ft.storage.files import RunDirectory

_PHASES = "{" + ",".join(get_args(FailurePhase)) + "}"
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
    factor: OptionalFloat = None
    """With --kind slow or slow-link: the share of the usual speed or bandwidth, such as 0.5; 1 ends the slowness."""
    phase: Annotated[Optional[FailurePhase], metavar(_PHASES)] = None  # noqa: UP045
    """Phase in which the worker should fail."""
    step: OptionalInt = None
    """Step in which the worker should fail."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given = parse_arguments(InjectArguments, arguments, command="inject")
    run = RunDirectory.open(given.run)
    steps = run.config().steps
    if given.worker < 0:
        raise ConfigError(f"--worker {given.worker}: workers are numbered from 0")
    if given.step is not None and not 0 <= given.step < steps:
        raise ConfigError(f"--step {given.step}: there is no such step; the run has {steps}, numbered 0 to {steps - 1}")
    if given.kind in SLOWNESS and given.factor is None:
        raise ConfigError(f"--factor is missing: --kind {given.kind} needs a share of what is usual, such as 0.5")
    if given.factor is not None and not 0 < given.factor <= 1:
        raise ConfigError(f"--factor {given.factor}: a share is above 0 and up to 1, which is the usual speed")
    if given.kind not in SLOWNESS and given.factor is not None:
        raise ConfigError(f"--factor {given.factor}: only --kind slow and slow-link have a factor, not {given.kind}")
    run.read_control()  # raises if the run is not live
    from chameleon_ft.launch.live_run import inject

    phase: FailurePhase | None = given.phase
    if phase is None and given.kind in ("corrupt", "nan"):  # between two operations
        phase = "forward" if given.kind == "corrupt" else "backward"
    inject(run, worker=given.worker, kind=given.kind, phase=phase, step=given.step, factor=given.factor)
    what = {
        "kill": "is killed",
        "hang": "is stopped",
        "disconnect": "is cut off",
        "slow": f"computes at {given.factor} of its speed",
        "slow-link": f"has {given.factor} of the bandwidth of its links",
        "corrupt": "has a bit of its state flipped",
        "nan": "has an element of its gradient spoilt",
    }[given.kind]
    match phase, given.step:
        case None, None:
            when = "now"
        case None, step:
            when = f"in step {step}"
        case phase, None:
            when = f"in its next {phase}"
        case phase, step:
            when = f"in the {phase} of step {step}, or of the first later step that has one"
    print(f"worker {given.worker} {what} {when}")
    return 0
