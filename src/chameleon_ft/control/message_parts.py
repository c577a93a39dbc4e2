"""What messages are made of, where that is more than a number."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["BoundaryMessage", "MessagePart", "OperationTimes", "Transition", "Vote"]


class MessagePart(BaseModel):
    """Base of all that is sent: frozen, and refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Vote(MessagePart):
    """The sums that the vote of a step carries; with them any rank can apply that step."""

    grad_square_sum: float
    """Squared L2 norm of the summed, not yet averaged, gradient of the whole model."""
    loss_sum: float
    terms: int
    """Loss terms of the global batch; the gradient and the loss are divided by it."""
    samples: int
    finish: bool
    """Whether some rank was told to end the run after this step."""
    pause: bool = False
    """Whether some rank was told to pause after this step."""


class OperationTimes(MessagePart):
    """Median seconds of the operations that a worker ran in a step; 0 for a kind that it did not run."""

    forward_s: float
    backward_s: float
    longest_s: float


class BoundaryMessage(MessagePart):
    """Shape and torch dtype name of what leaves a layer for one micro-batch."""

    shape: tuple[int, ...]
    dtype: str


class Transition(MessagePart):
    """A worker's part in the change to another placement, before a generation trains; see docs/transition.md."""

    everyone: tuple[int, ...]
    """Workers that take part, ascending: those of the placement in force and those of the new one."""
    keep: tuple[int, ...]
    """Layers that this worker holds and does not give up before the switch; if there are none, it begins anew."""
    moves: tuple[tuple[int, int, int, int, int], ...]
    """(round, source, destination, layer, bytes) of what it sends and receives, in the order of the rounds. The bytes
    are those that the plan was made with."""
