"""Failures that a configuration injects: in which phase of which step a worker fails, and how."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

from pydantic import Field

from chameleon_ft.config.section import Section

FailurePhase = Literal[
    "forward",
    "backward",
    "sync",
    "vote",
    "optimizer",
    "gather",
    "recovery",
    "rest",
    "preparation",
    "transfer",
    "confirm",
    "switch",
    "checkpoint",
    "snapshot",
]
FailureKind = Literal["kill", "hang", "disconnect", "slow", "slow-link", "corrupt", "nan"]
SLOWNESS: Final = ("slow", "slow-link")
"""Kinds of failures that have a factor."""
LASTING_KINDS: Final = (*SLOWNESS, "corrupt", "nan")
"""Kinds of failures that a worker survives."""


class Failure(Section):
    """A failure to inject: `worker` fails, or becomes slow, in `phase` of `step`."""

    step: int = Field(ge=0, description="Step in which it happens, counted from 0.")
    worker: int = Field(ge=0, description="Worker that fails, counted from 0.")
    phase: FailurePhase = Field(default="forward", description="Phase of the step or of a recovery in which it fails.")
    kind: FailureKind = Field(
        default="kill",
        description="kill: SIGKILL; hang: SIGSTOP; disconnect: its control connection is cut; slow: from then on it "
        "computes at `factor` of its speed; slow-link: from then on its links have `factor` of their bandwidth; "
        "corrupt: a random bit of a parameter or of the optimizer's state flips; nan: an element of its gradient is "
        "not a number, once.",
    )
    factor: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Of kind slow or slow-link: the speed, or bandwidth, as a share of the usual one; 1 ends it.",
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.kind in SLOWNESS and self.factor is None:
            yield "factor", f'is missing; kind = "{self.kind}" needs a share of what is usual, such as 0.5'
        if self.kind not in SLOWNESS and self.factor is not None:
            yield (
                "factor",
                f'only the kinds slow and slow-link have a factor, not "{self.kind}"; remove it, or change the kind',
            )
