"""What one worker sends another when state moves."""

from __future__ import annotations

from dataclasses import dataclass

from chameleon_ft.errors import PlanError
from chameleon_ft.plan import LayerRange

__all__ = ["Message"]


@dataclass(frozen=True, slots=True)
class Message:
    """The state of neighbouring layers, from a worker that holds it to one that is to hold it.

    Attributes:
        source: the worker that sends.
        destination: the worker that receives.
        layers: what is sent.
        num_bytes: their parameters and optimizer state.

    Raises:
        PlanError: both workers are the same, or the bytes are negative.
    """

    source: int
    destination: int
    layers: LayerRange
    num_bytes: int

    def __post_init__(self) -> None:
        if self.source == self.destination:
            raise PlanError(f"worker {self.source} cannot send to itself; what it holds needs no transfer")
        if self.num_bytes < 0:
            raise PlanError(f"a message needs zero or more bytes; got {self.num_bytes}")
