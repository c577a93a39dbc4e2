"""`chameleon verify`: compare a run with a plain PyTorch loop."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass
from typing_extensions import Doc

from chameleon_ft.cli.arguments import RunPath, parse_arguments
from chameleon_ft.events.kinds import JobChanged
from chameleon_ft.job.reference import check_job_reference
from chameleon_ft.storage.checkpoints import complete_checkpoints, read_mark
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.stores import checkpoint_storage


@dataclass(frozen=True)
class VerifyArguments:
    """Repeat the steps of a run in one plain, single-process PyTorch loop and compare losses and gradient norms.

    The loop computes with the threads of one worker. The exit code is 0 if all agrees within the tolerance and 1 if it
    does not: losses within the tolerance, gradient norms and weights within 100 times as much.
    """

    run: RunPath
    """Run directory."""
    steps: PositiveInt | None = None
    """Repeat only the first steps; by default all."""
    tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Largest relative deviation of a loss that is allowed; by default 1e-5, and 2e-3 for a run in bf16."""
    against: Annotated[
        str | None,
        "FILE.py[:LOOP]",
        Doc(
            "Compare with a loop of your own, by default the function `loop`: a generator that yields the loss of each "
            "step, or (loss, gradient norm), and may return the state dict of nn.Sequential(*layers) at its end, which "
            "is compared with the newest checkpoint. It gets the configuration of the run if it takes an argument.",
        ),
    ] = None
    json: bool = False
    """Print the result as JSON."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given = parse_arguments(VerifyArguments, arguments, command="verify")
    run = RunDirectory.open(given.run)
    if given.against is not None:
        check_job_reference(given.against, "loop")
    # Imported here, because --help must not wait for torch.
    import torch
    from rich.console import Console
    from rich.progress import track

    from chameleon_ft.verify.verification import TOLERANCES, UsersLoop, Verification, repeat_run
    from chameleon_ft.worker.device import require_devices
    from chameleon_ft.worker.inspection import load_examined, users_errors

    torch.set_num_threads(run.config().threads)
    require_devices(run.config().model_copy(update={"backend": "gloo"}), 1)
    committed = len({record.step for record in run.readable_steps()[0]})
    loop = None if given.against is None else UsersLoop(run, given.against)
    console = Console(stderr=True)
    changes = [event for event in run.events() if isinstance(event, JobChanged)]
    for event in changes:
        console.print(f"{event.message}; only the steps from there on are repeated", markup=False)
    checkpoints = checkpoint_storage(run.config(), run)
    if loop is None and not changes and (complete := complete_checkpoints(checkpoints)):
        recorded = read_mark(checkpoints, max(complete)).get("job", {}).get("data", {})
        with users_errors(run.config()):
            load_examined(run.config(), recorded)
    comparisons = track(
        repeat_run(run, limit=given.steps) if loop is None else loop.compare(limit=given.steps),
        "repeating the run",
        total=committed if given.steps is None else min(given.steps, committed),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    tolerance = TOLERANCES[run.config().precision] if given.tolerance is None else given.tolerance
    with users_errors(run.config().model_copy(update={} if loop is None else {"job": given.against})):
        result = Verification.of(comparisons, tolerance=tolerance)
    if loop is not None:
        result = replace(result, loop=loop.reference, weights=loop.weights, weights_left_out=loop.weights_left_out)
    print(json.dumps(result.to_json()) if given.json else result)
    return 1 if result.outside else 0
