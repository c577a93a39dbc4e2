"""`chameleon checkpoint`: have a live run write a checkpoint now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chameleon_ft.cli.arguments import RunPath, parse_arguments
from chameleon_ft.storage.files import RunDirectory


@dataclass(frozen=True)
class CheckpointArguments:
    """Have a live run write a checkpoint as soon as possible, whatever its interval.

    Workers begin it after the first step at which all of them know of the request, and write it in the background.
    """

    run: RunPath
    """Run directory."""
    wait: bool = False
    """Return only once the checkpoint is complete, and with exit code 1 if it cannot be written."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given = parse_arguments(CheckpointArguments, arguments, command="checkpoint")
    run = RunDirectory.open(given.run)
    # Raises if the run is not live.
    run.read_control()
    from chameleon_ft.launch.live_run import checkpoint, count_events, wait_until_saved

    before = count_events(run)
    committed = checkpoint(run)
    print(f"a checkpoint is written after step {committed} or the next one", flush=True)
    if given.wait:
        late = "the checkpoint cannot be marked as complete yet: {}; it will be as soon as possible"
        step = wait_until_saved(run, committed, after=before, delayed=lambda why: print(late.format(why), flush=True))
        if step is None:
            print("the run is over without it")
            return 1
        print(f"the checkpoint is complete; training would resume with step {step}")
    return 0
