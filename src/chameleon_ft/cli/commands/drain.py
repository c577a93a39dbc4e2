"""`chameleon drain`: take workers out of a live run before they leave it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import NonNegativeInt
from pydantic.dataclasses import dataclass

from chameleon_ft.cli.arguments import RunPath, parse_arguments
from chameleon_ft.errors import ConfigError
from chameleon_ft.quantities import listed
from chameleon_ft.storage.files import RunDirectory


@dataclass(frozen=True)
class DrainArguments:
    """Take workers out of a live run, such as those of a machine that is about to be serviced or reclaimed.

    They train until the others are ready to continue without them, and then end. No step is repeated. Give --worker or
    --host.
    """

    run: RunPath
    """Run directory."""
    worker: Annotated[tuple[NonNegativeInt, ...], "INT"] = ()
    """Number of a worker, as the run shows it; repeat the flag for several."""
    host: Annotated[str | None, "ADDRESS"] = None
    """Address of a host, as the run shows it: all its workers leave."""
    wait: bool = False
    """Return only once the workers are out or the run is over, and not as soon as the coordinator agrees."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given = parse_arguments(DrainArguments, arguments, command="drain")
    run = RunDirectory.open(given.run)
    if bool(given.worker) == (given.host is not None):
        raise ConfigError("give either --worker N, once for each worker, or --host ADDRESS")
    # Raises if the run is not live.
    run.read_control()
    from chameleon_ft.launch.live_run import count_events, drain, wait_until_out

    before = count_events(run)
    leaving = drain(run, workers=given.worker, host=given.host)
    names = listed("worker", leaving)
    until = "it trains until a plan without it" if len(leaving) == 1 else "they train until a plan without them"
    print(f"draining {names}: {until} is in force", flush=True)
    if given.wait:
        wait_until_out(run, leaving, after=before)
        print(f"no longer in the run: {names}")
    return 0
