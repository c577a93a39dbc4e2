"""The way back to a snapshot: parts without a keeper are made again from their backups, and layers restored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from chameleon_ft.errors import DamagedCheckpointError
from chameleon_ft.plan.snapshots import Part, Rebuilding
from chameleon_ft.runtime.communicators import Communicators
from chameleon_ft.runtime.execution.held_layer import LayerState
from chameleon_ft.runtime.snapshots.packing import join, unpack
from chameleon_ft.runtime.snapshots.taker import receive_block, send_block


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


@dataclass(slots=True)
class RestoredLayers:
    """The state of layers, and of slices of their optimizer's state, with copies of all tensors on a device."""

    layers: dict[int, LayerState] = field(default_factory=dict)
    slices: dict[int, LayerState] = field(default_factory=lambda: defaultdict(dict))

    @classmethod
    def of(
        cls,
        layers: Iterable[int],
        blocks: Mapping[tuple[Part, ...], Tensor],
        made: Mapping[Part, Tensor],
        device: torch.device,
    ) -> Self:
        """Unpack the blocks of these layers, of which some were made again.

        Raises:
            DamagedCheckpointError: a block is not as it was taken, or is not there.
        """
        own, wanted = {key[0]: block for key, block in blocks.items() if len(key) == 1} | dict(made), set(layers)
        found = cls()
        for part in sorted(own):
            if part.layer not in wanted:
                continue
            state = {
                key: value.to(device, copy=True) if isinstance(value, Tensor) else value
                for key, value in unpack(own[part]).items()
            }
            if part.stop:
                found.slices[part.layer] |= state
            else:
                found.layers[part.layer] = state
        if missing := sorted(wanted - found.layers.keys()):
            raise DamagedCheckpointError(f"the snapshot of layers {missing} is not in the memory of this worker")
        return found


def _own(blocks: Mapping[tuple[Part, ...], Tensor], key: tuple[Part, ...]) -> Tensor:
    if key not in blocks:
        raise DamagedCheckpointError(f"the snapshot of {key} is not in the memory of this worker")
    return blocks[key]
