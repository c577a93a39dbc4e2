"""The way back to a snapshot: parts without a keeper are made again from their backups, and layers restored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from chameleon_ft.errors import DamagedCheckpointError
from chameleon_ft.plan.snapshots import Part, Rebuilding
from chameleon_ft.runtime.communicators import Communicators
from chameleon_ft.runtime.execution.held_layer import LayerState
from chameleon_ft.runtime.snapshots.packing import join, unpack
from chameleon_ft.runtime.snapshots.taker import receive_block, send_block

__all__ = ["rebuild", "states_of"]


def rebuild(
    worker: int,
    rebuilt: Sequence[Rebuilding],
    blocks: Mapping[tuple[Part, ...], Tensor],
    communicators: Communicators,
    *,
    scale: int,
) -> dict[Part, Tensor]:
    """Send what others need of this rank's blocks, and return the blocks that are made here.

    Args:
        rebuilt: of all workers, in an order that they share.
        scale: how many bytes of the model a byte stands for.

    Raises:
        CommunicationError: another worker is gone, or a block has arrived damaged.
        DamagedCheckpointError: this rank does not have a block that it is to have.
    """
    sending = [
        send_block(_own(blocks, key), communicators, peer=each.worker, scale=scale, gives_way=False)
        for each in rebuilt
        for source, key in each.inputs
        if source == worker != each.worker
    ]
    made: dict[Part, Tensor] = {}
    for each in rebuilt:
        if each.worker != worker:
            continue
        block: Tensor | None = None
        for source, key in each.inputs:
            if source == worker:
                own = _own(blocks, key)
                other = own.clone() if len(each.inputs) > 1 else own
            else:
                other = receive_block(communicators, peer=source)
            block = join(block, other)
        assert block is not None
        made[each.part] = block
    for outgoing in sending:
        outgoing.finish_next()
    return made


def states_of(
    layers: Iterable[int], blocks: Mapping[tuple[Part, ...], Tensor], made: Mapping[Part, Tensor], device: torch.device
) -> dict[int, LayerState]:
    """Return the states of layers, with copies of their tensors on a device.

    Raises:
        DamagedCheckpointError: a block is not as it was taken, or is not there.
    """
    found = {key[0]: block for key, block in blocks.items() if len(key) == 1} | dict(made)
    wanted = set(layers)
    states: dict[int, LayerState] = defaultdict(dict)
    for part, block in sorted(found.items(), key=lambda item: item[0]):
        if part.layer in wanted:
            for key, value in unpack(block).items():
                states[part.layer][key] = value.to(device, copy=True) if isinstance(value, Tensor) else value
    if missing := [layer for layer in sorted(wanted) if Part(layer) not in found]:
        raise DamagedCheckpointError(f"the snapshot of layers {missing} is not in the memory of this worker")
    return states


def _own(blocks: Mapping[tuple[Part, ...], Tensor], key: tuple[Part, ...]) -> Tensor:
    if key not in blocks:
        raise DamagedCheckpointError(f"the snapshot of {key} is not in the memory of this worker")
    return blocks[key]
