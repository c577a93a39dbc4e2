"""The comparison of layers between their holders: after the same updates, their states have to be equal, bit by bit.

A checksum of each layer is computed beside the operations of a step, during which its state does not change, and
travels in the step's vote. So the comparison costs no message of its own, and all workers see the same result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Final, NamedTuple, Self

import numpy as np
import torch
import xxhash

from chameleon_ft.errors import ChameleonError
from chameleon_ft.plan.shards import Sharding
from chameleon_ft.runtime.device import side_stream
from chameleon_ft.runtime.execution.layers import HeldLayers
from chameleon_ft.runtime.execution.parameter_vector import Range
from chameleon_ft.runtime.state_transfer.layer_messages import layer_checksums
from chameleon_ft.sync import Segment

_BITS: Final = 52  # a number of the vote is a float64, which has no more
_SHIFT: Final = 64 - _BITS


class StateDiffersError(ChameleonError):
    """Holders of a layer have different states after the same updates.

    Attributes:
        checksums: layer -> worker -> checksum, of the layers whose holders differ.
    """

    def __init__(self, checksums: Mapping[int, Mapping[int, int]]) -> None:
        self.checksums = checksums
        super().__init__(f"the holders of layers {sorted(checksums)} have different states")


class _Slot(NamedTuple):
    """A holder's number in the vote: the checksum of a layer, or of a slice of its optimizer's state."""

    layer: int
    holder: int
    units: Range | None = None


class StateCheck:
    """Compares the layers of a generation between their holders; use as a context manager.

    A layer with a single holder is not compared, and neither is one that a worker has not held since the beginning of
    the step. Slices of optimizer state are compared between their owners.
    """

    def __init__(
        self,
        worker: int,
        held: HeldLayers,
        segments: Sequence[Segment],
        *,
        device: torch.device,
        sharding: Sharding | None = None,
    ) -> None:
        self._worker = worker
        self._held = held
        self._device = device
        shared = [segment for segment in segments if not segment.tied and len(segment.holders) > 1]
        self._slots = [_Slot(layer, holder) for each in shared for layer in each.layers for holder in each.holders]
        for layer, own in enumerate(() if sharding is None else sharding.layers):
            slices = [each for each in own.slices if len(each.owners) > 1]
            self._slots += [_Slot(layer, owner, (each.start, each.stop)) for each in slices for owner in each.owners]
        self._stream = side_stream(device)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="state-check")
        self._checksums: dict[_Slot, Future[int]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def begin(self) -> None:
        """Begin to compute the checksums of the layers held, whose state is constant until the next update."""
        own = [slot for slot in self._slots if slot.holder == self._worker and slot.layer in self._held.layers]
        updated = None if self._stream is None else torch.accelerator.current_stream().record_event()
        self._checksums = {slot: self._threads.submit(self._checksum, slot, updated) for slot in own}

    def ballot(self) -> list[float]:
        """Return this worker's part of the vote: a number for each holder of each layer, zero except its own.

        Empty unless `begin` was called since the last vote.
        """
        if self._checksums is None:
            return []
        checksums = {slot: future.result() for slot, future in self._checksums.items()}
        return [float(checksums.get(slot, 0)) for slot in self._slots]

    def compare(self, sums: Sequence[float]) -> bool:
        """Return whether the sums of all ballots were compared, and are equal.

        Raises StateDiffersError if they differ.
        """
        is_checked, self._checksums = self._checksums is not None, None
        found: dict[tuple[int, Range | None], dict[int, int]] = defaultdict(dict)
        for slot, checksum in zip(self._slots, sums, strict=False):
            if checksum:
                found[slot.layer, slot.units][slot.holder] = round(checksum)
        different: dict[int, dict[int, int]] = {}
        for (layer, _), each in found.items():
            if len(set(each.values())) > 1:
                different.setdefault(layer, each)
        if different:
            raise StateDiffersError(different)
        return is_checked

    def _checksum(self, slot: _Slot, updated: torch.Event | None) -> int:
        with nullcontext() if self._stream is None else self._stream:
            if self._stream is not None and updated is not None:
                self._stream.wait_event(updated)
            if slot.units is None:
                state = self._held.compared_state_of(slot.layer)
            else:
                state = dict(sorted(self._held.state_of_slice(slot.layer, slot.units).items()))
            pieces = layer_checksums(state, self._device)
        return (xxhash.xxh3_64_intdigest(np.array(pieces, dtype=np.int64).tobytes()) >> _SHIFT) or 1
