"""The comparison of layers between their holders: after the same updates, their states have to be equal, bit by bit.

A checksum of each layer is computed beside the operations of a step, during which its state does not change, and
travels in the step's vote. So the comparison costs no message of its own, and all workers see the same result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Final, Self

import numpy as np
import torch
import xxhash

from chameleon_ft.errors import ChameleonError
from chameleon_ft.runtime.device import side_stream
from chameleon_ft.runtime.execution.layers import HeldLayers
from chameleon_ft.runtime.state_transfer.layer_messages import layer_checksums
from chameleon_ft.sync import Segment

__all__ = ["StateCheck", "StateDiffersError"]

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


class StateCheck:
    """Compares the layers of a generation between their holders; use as a context manager.

    A layer with a single holder is not compared, and neither is one that a worker has not held since the beginning of
    the step.
    """

    def __init__(self, worker: int, held: HeldLayers, segments: Sequence[Segment], *, device: torch.device) -> None:
        self._worker = worker
        self._held = held
        self._device = device
        shared = [segment for segment in segments if not segment.tied and len(segment.holders) > 1]
        self._slots = [(layer, holder) for each in shared for layer in each.layers for holder in each.holders]
        self._stream = side_stream(device)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="state-check")
        self._checksums: dict[int, Future[int]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def begin(self) -> None:
        """Begin to compute the checksums of the layers held, whose state is constant until the next update."""
        own = [layer for layer, holder in self._slots if holder == self._worker and layer in self._held.layers]
        updated = None if self._stream is None else torch.accelerator.current_stream().record_event()
        self._checksums = {layer: self._threads.submit(self._checksum, layer, updated) for layer in own}

    def ballot(self) -> list[float]:
        """Return this worker's part of the vote: a number for each holder of each layer, zero except its own.

        Empty unless `begin` was called since the last vote.
        """
        if self._checksums is None:
            return []
        checksums = {layer: future.result() for layer, future in self._checksums.items()}
        return [
            float(checksums[layer]) if holder == self._worker and layer in checksums else 0.0
            for layer, holder in self._slots
        ]

    def compare(self, sums: Sequence[float]) -> bool:
        """Return whether the sums of all ballots were compared, and are equal.

        Raises StateDiffersError if they differ.
        """
        is_checked, self._checksums = self._checksums is not None, None
        found: dict[int, dict[int, int]] = defaultdict(dict)
        for (layer, holder), checksum in zip(self._slots, sums, strict=False):
            if checksum:
                found[layer][holder] = round(checksum)
        if different := {layer: each for layer, each in found.items() if len(set(each.values())) > 1}:
            raise StateDiffersError(different)
        return is_checked

    def _checksum(self, layer: int, updated: torch.Event | None) -> int:
        with nullcontext() if self._stream is None else self._stream:
            if self._stream is not None and updated is not None:
                self._stream.wait_event(updated)
            pieces = layer_checksums(self._held.compared_state_of(layer), self._device)
        return (xxhash.xxh3_64_intdigest(np.array(pieces, dtype=np.int64).tobytes()) >> _SHIFT) or 1
