"""Preallocates memory for layers before they arrive.

The first touch of a page that the system gives out costs as much as receiving it. So that a transfer does not wait for
that, a thread allocates while the rank waits for something else: blank layers for the parameters, and a block of memory
for the optimizer's state, whose division is known only when the layer is described.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from chameleon_ft.job import Job
from chameleon_ft.runtime.device import is_host_memory
from chameleon_ft.runtime.execution.held_layer import HeldLayer

_PIECE_BYTES: Final = 1 << 24  # between two looks at whether it is still wanted: some milliseconds
_ALIGNMENT: Final = 64  # bytes, as torch's allocator has it on a CPU
_TENSORS: Final = 4  # of a parameter, kept by an optimizer; no common one keeps more
_LEAST_BYTES: Final = 1 << 12  # a smaller tensor has no page of its own


class Memory:
    """A block of host memory that is given out in parts, first to last. It is freed with the last part in use."""

    def __init__(self, num_bytes: int) -> None:
        self._block = torch.empty(num_bytes, dtype=torch.uint8)
        self._used = 0

    def touch(self, *, unless: Callable[[], bool]) -> None:
        """Have the system give out all pages; return early once `unless` is true."""
        for piece in self._block.split(_PIECE_BYTES):
            if unless():
                return
            piece.zero_()

    def part(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Return a contiguous tensor of any values; None where it does not fit, or is too small to be worth it."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < _LEAST_BYTES or self._used + num_bytes > self._block.numel():
            return None
        part = self._block[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return part.view(dtype).view(shape)


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory for a layer that will arrive: a blank one, and a block for the rest.

    Without `memory`, the optimizer's state gets its memory as it arrives.
    """

    layer: HeldLayer
    memory: Memory | None = None


class LayerAllocator:
    """Allocates layers, ahead of their arrival if possible.

    Args:
        ahead: whether host memory is allocated before it is needed. An accelerator's costs nothing to touch.
        is_divided: whether owners of slices have the masters of parameters.
    """

    def __init__(self, job: Job, *, seed: int, device: torch.device, ahead: bool, is_divided: bool = False) -> None:
        self._job = job
        self._seed = seed
        self._device = device
        self._is_divided = is_divided
        self._ahead = ahead and is_host_memory(device)
        # Only this thread builds layers, because their factories draw from one global generator.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="preallocation")
        self._pending: dict[int, Future[Allocation]] = {}
        self._lock = threading.Lock()  # of `_pending`: a generation is prepared during training
        self._stop = threading.Event()

    def preallocate(self, state_bytes: Mapping[int, int], *, then: Callable[[], object] = lambda: None) -> None:
        """Begin to allocate these layers, in this order, and release any other.

        Args:
            state_bytes: layer -> bytes of its state, the optimizer's included.
            then: called at the end, perhaps by another thread.
        """
        if not self._ahead:
            then()
            return
        with self._lock:
            self._release(lambda layer: layer not in state_bytes)
            self._stop.clear()
            for layer, num_bytes in state_bytes.items():
                if layer not in self._pending:
                    self._pending[layer] = self._thread.submit(self._allocate, layer, num_bytes)
            self._thread.submit(then)

    def take(self, layer: int) -> Allocation:
        """Return the memory for a layer; blocks until it is allocated. Raises as the layer's factory does."""
        if not self._ahead:
            return Allocation(self._blank(layer))
        with self._lock:
            pending = self._pending.pop(layer, None) or self._thread.submit(self._allocate, layer, 0)
        return pending.result()

    def stop_touching(self) -> None:
        """Touch no more memory until the next `preallocate`. Called from any thread."""
        self._stop.set()

    def drop(self) -> None:
        """Release all that was not taken; when this returns, no allocation is in progress."""
        with self._lock:
            self._release(lambda layer: True)

    def _release(self, unwanted: Callable[[int], bool]) -> None:
        """Release unwanted layers, and layers that are not begun, so that they can begin in another order."""
        gone = [layer for layer, pending in self._pending.items() if pending.cancel() or unwanted(layer)]
        running = [self._pending.pop(layer) for layer in gone]
        if any(not pending.done() for pending in running):
            self._stop.set()
            wait(running)

    def _blank(self, layer: int) -> HeldLayer:
        return HeldLayer.blank(self._job, layer, seed=self._seed, device=self._device, is_divided=self._is_divided)

    def _allocate(self, layer: int, num_bytes: int) -> Allocation:
        blank = self._blank(layer)
        rest = num_bytes - sum(value.nbytes for value in blank.targets.values() if isinstance(value, Tensor))
        if rest <= 0:
            return Allocation(blank)
        # Each tensor may begin a little after the end of the one before.
        rest += _TENSORS * _ALIGNMENT * sum(1 for _ in blank.module.parameters())
        try:
            memory = Memory(rest)
        except RuntimeError:  # no memory for all of it at once; piece by piece, as it arrives, the layer may fit
            return Allocation(blank)
        memory.touch(unless=self._stop.is_set)
        return Allocation(blank, memory)
