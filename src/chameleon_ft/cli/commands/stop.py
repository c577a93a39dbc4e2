"""`chameleon stop`: end a live run, with a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chameleon_ft.cli.arguments import RunPath, parse_arguments
from chameleon_ft.storage.files import RunDirectory


@dataclass(frozen=True)
class StopArguments:
    """End a live run after its current step with a checkpoint, like Ctrl-C in its terminal.

    To continue it later, add `--resume RUN` to the command that started it.
    """

    run: RunPath
    """Run directory."""
    now: bool = False
    """End it at once, without a checkpoint: the steps since the last one are lost."""
    wait: bool = False
    """Return only once the run is over."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given = parse_arguments(StopArguments, arguments, command="stop")
    run = RunDirectory.open(given.run)
    # Raises if the run is not live.
    run.read_control()
    from chameleon_ft.launch.live_run import stop, wait_until_over

    stop(run, at_once=given.now)
    how = "at once" if given.now else "after this step with a checkpoint"
    print(f"the run ends {how}; `chameleon status {given.run}` says when it has", flush=True)
    if given.wait:
        wait_until_over(run)
        print("the run is over")
    return 0
