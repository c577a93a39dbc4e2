"""What ranks say of reading and writing checkpoints."""

from __future__ import annotations

import asyncio
from pathlib import Path

from chameleon_ft.control.state.checkpoint_events import CheckpointCollector
from chameleon_ft.control.wire.messages import CheckpointSaved, SlowIO
from chameleon_ft.observe import Recorder
from chameleon_ft.quantities import duration

__all__ = ["Disk"]


class Disk:
    """Records it, each thing once however many ranks say it.

    Args:
        directory: the run's folder of checkpoints.
        checkpoints: puts them together.
        recorder: what is recorded and shown.
    """

    def __init__(self, directory: Path, checkpoints: CheckpointCollector, recorder: Recorder) -> None:
        self._directory = directory
        self._checkpoints = checkpoints
        self._recorder = recorder
        self._failed: set[int] = set()
        self._waits: set[SlowIO] = set()

    def saved(self, part: CheckpointSaved) -> None:
        """A rank has written its layers of a checkpoint, or could not."""
        if part.error is not None:
            self._on_failed(part.step, part.error)
        elif (saved := self._checkpoints.add(part)) is not None:
            self._recorder.event("checkpoint", step=saved.step, copy_s=saved.copy_s, write_s=saved.write_s)
            asyncio.get_running_loop().run_in_executor(None, self._checkpoints.prune)

    def waits(self, worker: int, message: SlowIO) -> None:
        """A rank has been reading or writing for long; nobody is given up for that, so it is said."""
        if message in self._waits:
            return
        self._waits.add(message)
        self._recorder.event(
            "waiting",
            worker=worker,
            doing=message.doing,
            since_s=message.since_s,
            message=(
                f"worker {worker} has been {message.doing} for {duration(message.since_s)}, and there is no limit to "
                f"that; should it never end, look at the file system of {self._directory}"
            ),
        )

    def _on_failed(self, step: int, error: str) -> None:
        told = {} if step in self._failed else {"message": f"no complete one of step {step}: {error}"}
        self._failed.add(step)
        self._recorder.event("checkpoint_failed", step=step, error=error, **told)
