"""What ranks tell the coordinator of reading and writing checkpoints."""

from __future__ import annotations

from typing import Literal

from chameleon_ft.control.message_parts import MessagePart

__all__ = ["AtDisk", "CheckpointSaved"]


class CheckpointSaved(MessagePart):
    """A rank has written `layers` of the checkpoint that resumes at `step`; `error` where it could not."""

    type: Literal["checkpoint_saved"] = "checkpoint_saved"
    generation: int
    """In which the state was taken; what was taken before everyone went back to a checkpoint is given up."""
    step: int
    layers: tuple[int, ...]
    copy_s: float = 0.0
    """Seconds that the rank's training stood still while the layers were copied."""
    write_s: float = 0.0
    """Seconds in which the copy was written to disk, beside training."""
    error: str | None = None


class AtDisk(MessagePart):
    """A rank has been reading or writing for `since_s` seconds, longer than it should take, and goes on doing so."""

    type: Literal["at_disk"] = "at_disk"
    generation: int
    doing: str
    since_s: float
