"""Sections of a configuration that say where the state of a run is saved, and where the run begins."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field, field_validator
from pydantic_core import PydanticCustomError

from chameleon_ft.config.sections import Section


def _steps_or_auto(every: object) -> object:
    # The errors of a union would name both of its parts.
    if every == "auto" or (type(every) is int and every >= 0):
        return every
    raise PydanticCustomError("steps_or_auto", 'should be "auto" or a whole number of steps, 0 for none')


_PATTERNS = frozenset("*?[")
"""Characters of patterns of file names."""
_StepsOrAuto: TypeAlias = Annotated[Literal["auto"] | int, BeforeValidator(_steps_or_auto)]


class Checkpoint(Section):
    """Checkpoints, written in the background of training."""

    every: _StepsOrAuto = Field(
        default="auto",
        description="Steps between two checkpoints; auto: as often as loses least time, by the measured cost of a "
        "checkpoint and the rate of failures; 0: none during training.",
    )
    keep: int = Field(default=2, ge=1, description="Complete checkpoints to keep; older ones are removed.")
    keep_every: int = Field(
        default=0, ge=0, description="Keep all complete checkpoints whose step this number divides; 0: none for that."
    )
    keep_best: str = Field(
        default="",
        pattern=r"^((min |max )?[A-Za-z_][\w.-]*)?$",
        description="Write a checkpoint with every evaluation, and keep the best one, too: loss, or a metric of the "
        'job, such as "max accuracy"; by default the least is the best. Empty: neither.',
    )


class Store(Section):
    """An object store for the checkpoints, and for copies of the records."""

    url: str = Field(
        default="",
        description="Folder of this run alone, such as s3://bucket/runs/mine; credentials are those of the "
        "environment. Empty: all is in output_dir. See docs/stores.md.",
    )
    timeout_s: float = Field(
        default=60.0, gt=0, description="Seconds without any progress after which a request has failed."
    )

    @property
    def checkpoints(self) -> str:
        """The folder of the checkpoints."""
        return f"{self.url}/checkpoints"

    @field_validator("url")
    @classmethod
    def _require_folder(cls, url: str) -> str:
        protocol, separator, path = url.partition("://")
        user, at, _ = path.partition("/")[0].rpartition("@")
        if at and ":" in user:
            raise PydanticCustomError("store", "has a password, which messages would show; give it in the environment")
        if any(character in _PATTERNS for character in path):
            # Removing objects would remove those of every folder that matches.
            raise PydanticCustomError("store", "should be without *, ? and [, which stand for several folders")
        if not url or (protocol and separator and path.strip("/")):
            if protocol != "memory":
                return url.rstrip("/")
            raise PydanticCustomError("store", "is in the memory of one process, and a run has several; use file://")
        raise PydanticCustomError("store", "should be the URL of a folder, such as s3://bucket/runs/mine")


class Snapshots(Section):
    """Copies of the training state in the memory of other workers, so that it outlives all holders of a layer."""

    every: _StepsOrAuto = Field(
        default="auto",
        description="Most steps that are repeated after the loss of all holders of a layer; auto: as many as lose "
        "least time, by the measured cost of a snapshot and the rate of failures, and no snapshots where they do not "
        "fit the memory of hosts; 0: no snapshots.",
    )
    mode: Literal["copy", "parity"] = Field(
        default="copy",
        description="Backups that workers keep for others. copy: copies of parts of the state; parity: the exclusive "
        "or of several parts, which takes less memory and restores one of them from the others.",
    )
    group: int = Field(default=3, ge=2, description="With mode = parity: parts of a group, each on another host.")

    @property
    def parts(self) -> int:
        """The most parts that share a backup."""
        return 1 if self.mode == "copy" else self.group


class Forked(Section):
    """Where a forked run began: set by `--fork`, not by hand."""

    run: str = Field(default="", description="Directory of the run that it continues; empty: it is not forked.")
    run_id: str = Field(default="", description="Id of the run that has written that state.")
    step: int = Field(default=0, ge=0, description="Its first step; the steps before are those of that run.")
    samples: int = Field(default=0, ge=0, description="Samples of the steps before, over all runs.")
    micro_batch_size: int = Field(default=1, ge=1, description="That of the run that it continues.")


class Skip(Section):
    """Samples that are left out before a step: set by `--skip-samples`, not by hand."""

    step: int = Field(ge=0, description="The step.")
    samples: int = Field(ge=1, description="Samples between the last one of the step before and its first one.")
