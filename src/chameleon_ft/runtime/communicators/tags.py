"""The tags of all messages between two workers: those of one tag arrive in the order they were sent."""

from __future__ import annotations

from enum import IntEnum, unique


@unique
class Tag(IntEnum):
    """Tags of messages beside the results of operations, above which they begin.

    All are even, because with NCCL an odd one takes the channel of gradients, and fit into 32 bits.
    """

    VOTE = 1 << 28
    UPDATED_PARAMETERS = VOTE + 2
    """From the owners of slices to the other holders of a layer, after each update."""
    SNAPSHOT = VOTE + 4
    SLICE = VOTE + 6
    """Slices of optimizer state, while no step runs."""
    PULL_REQUEST = VOTE + 8
    """A worker requests a layer during training, and receives these:"""
    PULLED_LAYER = VOTE + 10
    PULLED_SUM = VOTE + 12
    PULLED_PARAMETERS = VOTE + 14


def tag_of(result: tuple[bool, int, int], *, num_layers: int) -> int:
    """Return the tag of a result, of (forward, micro-batch, layer); different for all of a step.

    It is even for an activation, and odd for a gradient.
    """
    forward, micro_batch, layer = result
    return 2 * (micro_batch * num_layers + layer) + (0 if forward else 1)


def tag_of_layer(layer: int) -> int:
    """Return the tag of a layer that moves while no step runs, so that no result of an operation is on its way."""
    return 2 * layer
