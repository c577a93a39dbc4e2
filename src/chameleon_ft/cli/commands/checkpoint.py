"""`chameleon checkpoint`: have a live run write a checkpoint now, or keep one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chameleon_ft.cli.arguments import OptionalStr, RunPath, named_checkpoint, parse_arguments
from chameleon_ft.storage.checkpoints import named_step, pin_checkpoint
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.stores import checkpoint_storage


@dataclass(frozen=True)
class CheckpointArguments:
    """Have a live run write a checkpoint as soon as possible, whatever its interval.

    With --pin or --unpin, say instead whether one that is complete stays when older ones are removed; the run may be
    over.

    Workers begin it after the first step at which all of them know of the request, and write it in the background.
    """

    run: RunPath
    """Run directory."""
    pin: OptionalStr = None
    """Keep the checkpoint of this step, or best, however many newer ones there will be."""
    unpin: OptionalStr = None
    """Let the checkpoint of this step, or best, be removed as any other."""
    wait: bool = False
    """Return only once the checkpoint is complete, and with exit code 1 if it cannot be written."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given = parse_arguments(CheckpointArguments, arguments, command="checkpoint")
    run = RunDirectory.open(given.run)
    if given.pin is not None or given.unpin is not None:
        config = run.config()
        checkpoints = checkpoint_storage(config, run)
        for named, is_pinned in ((given.unpin, False), (given.pin, True)):
            step = named_checkpoint("--pin" if is_pinned else "--unpin", named)
            if (step := named_step(checkpoints, step, criterion=config.checkpoint.keep_best)) is not None:
                pin_checkpoint(checkpoints, step, is_pinned=is_pinned)
                print(f"the checkpoint of step {step} {'is kept until it is unpinned' if is_pinned else 'is unpinned'}")
        return 0
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
