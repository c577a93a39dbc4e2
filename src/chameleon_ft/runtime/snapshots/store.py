"""The snapshots that a rank keeps, until the coordinator says which are not needed any more."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from chameleon_ft.plan.snapshots import Part

_Blocks = Mapping[tuple[Part, ...], Tensor]
"""Blocks of single parts, and parity of several."""


class SnapshotStore:
    """Two snapshots at most: one that is complete on all workers, and the next one, until it is complete as well.

    Args:
        pins_memory: whether blocks are copied from an accelerator, which is faster to pinned memory.

    Attributes:
        answered: the newest request of the coordinator for which a snapshot was begun; see `BeginSnapshot`.
    """

    def __init__(self, *, pins_memory: bool) -> None:
        self._pins_memory = pins_memory
        self.answered = 0
        self._lock = threading.Lock()
        self._kept: dict[int, _Blocks] = {}  # by step
        self._resolved: int | None = None
        self._spare: dict[int, list[Tensor]] = defaultdict(list)  # by their bytes

    @property
    def newest(self) -> int | None:
        """The step of the newest snapshot."""
        return max(self._kept, default=None)

    @property
    def is_settled(self) -> bool:
        """Whether all snapshots but one are known to be superseded or given up."""
        return len(self._kept) <= 1 and (self._resolved in self._kept or not self._kept)

    def allocate(self, num_bytes: int) -> Tensor:
        """Return memory for a block, with any content."""
        with self._lock:
            if spare := self._spare.get(num_bytes):
                return spare.pop()
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pins_memory)

    def release(self, block: Tensor) -> None:
        """Take memory back that `allocate` gave."""
        with self._lock:
            self._spare[block.numel()].append(block)

    def add(self, step: int, blocks: _Blocks) -> None:
        """Keep what this rank has of a snapshot, which is not known to be complete yet."""
        with self._lock:
            self._kept[step] = blocks

    def blocks(self, step: int) -> _Blocks:
        """Return what this rank has of a snapshot."""
        return self._kept.get(step, {})

    def resolve(self, step: int, *, is_complete: bool) -> None:
        """Note that a snapshot is complete, which makes those before it superfluous; or that it is given up."""
        with self._lock:
            if step not in self._kept:
                return
            self._drop([each for each in self._kept if each < step] if is_complete else [step])
            if is_complete:
                self._resolved = step

    def keep_only(self, step: int | None) -> None:
        """Drop all snapshots but one, which is complete; and memory that another generation may not use."""
        with self._lock:
            self._drop([each for each in self._kept if each != step])
            self._spare.clear()
            self._resolved = step

    def _drop(self, steps: list[int]) -> None:
        for step in steps:
            for block in self._kept.pop(step).values():
                self._spare[block.numel()].append(block)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._kept))
