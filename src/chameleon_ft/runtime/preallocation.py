"""Preallocates memory for layers before they arrive.

Memory that a process has from its system costs as much to touch for the first time as to receive: one page after the
other is looked for and cleared. So that a transfer does not wait for it, a thread makes room while everyone has
something else to wait for: modules for the parameters, and a block of memory for what the optimizer keeps of them. How
that is divided is known only when the layer is described.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from chameleon_ft.job import Job
from chameleon_ft.runtime.layers import blank_module

__all__ = ["Allocation", "LayerAllocator", "Memory"]

_PIECE_BYTES: Final = 1 << 24  # between two looks at whether it is still wanted: some milliseconds
_ALIGNMENT: Final = 64  # bytes, as torch's allocator has it on a CPU
_TENSORS: Final = 4  # that an optimizer keeps of a parameter, at most of those that are known
_LEAST_BYTES: Final = 1 << 12  # what is smaller has no page of its own


class Memory:
    """A block of host memory of which parts are given out, first to last. It goes when none of them is used."""

    def __init__(self, num_bytes: int) -> None:
        self._block = torch.empty(num_bytes, dtype=torch.uint8)
        self._used = 0

    def touch(self, *, unless: Callable[[], bool]) -> None:
        """Have the system give out all pages; ends early where `unless` says so."""
        for piece in self._block.split(_PIECE_BYTES):
            if unless():
                return
            piece.zero_()

    def part(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """A contiguous tensor that may hold anything; None where it does not fit, or is too small to be worth it."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < _LEAST_BYTES or self._used + num_bytes > self._block.numel():
            return None
        part = self._block[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return part.view(dtype).view(shape)


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory for a layer that is going to arrive.

    Attributes:
        module: its parameters may hold anything.
        memory: for what the optimizer keeps of them; None where that gets memory as it arrives.
    """

    module: nn.Module
    memory: Memory | None = None


class LayerAllocator:
    """Allocates layers, ahead of their arrival if possible.

    Args:
        device: where layers are.
        ahead: whether room in host memory is made before it is asked for. An accelerator's costs nothing to touch.
    """

    def __init__(self, job: Job, *, seed: int, device: torch.device, ahead: bool) -> None:
        self._job = job
        self._seed = seed
        self._device = device
        self._ahead = ahead and device.type == "cpu"
        # No other thread makes layers meanwhile: the generator that their factories draw from is one for all.
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="room")
        self._coming: dict[int, Future[Allocation]] = {}
        self._stop = threading.Event()

    def preallocate(self, state_bytes: Mapping[int, int], *, then: Callable[[], object] = lambda: None) -> None:
        """Begin to make room for these layers, in this order, and let go of any other.

        Args:
            state_bytes: layer -> bytes of its state, with what the optimizer keeps.
            then: called, by another thread perhaps, once there is nothing more to do.
        """
        if not self._ahead:
            then()
            return
        self._let_go(of=lambda layer: layer not in state_bytes)
        self._stop.clear()
        for layer, num_bytes in state_bytes.items():
            if layer not in self._coming:
                self._coming[layer] = self._maker.submit(self._made, layer, num_bytes)
        self._maker.submit(then)

    def take(self, layer: int) -> Allocation:
        """Give out the room for a layer; blocks until it is there. Raises what making the layer raises."""
        if not self._ahead:
            return Allocation(self._blank(layer))
        coming = self._coming.pop(layer, None) or self._maker.submit(self._made, layer, 0)
        return coming.result()

    def hurry(self) -> None:
        """Touch no memory any more until something else is expected. Called from any thread."""
        self._stop.set()

    def drop(self) -> None:
        """Let go of all that has been made and was not taken; when this returns, nothing is being made any more."""
        self._let_go(of=lambda layer: True)

    def _let_go(self, *, of: Callable[[int], bool]) -> None:
        """What has not been begun is given up in any case, so that it can be begun in another order."""
        gone = [layer for layer, coming in self._coming.items() if coming.cancel() or of(layer)]
        under_way = [self._coming.pop(layer) for layer in gone]
        if any(not coming.done() for coming in under_way):
            self._stop.set()
            wait(under_way)

    def _blank(self, layer: int) -> nn.Module:
        return blank_module(self._job, layer, seed=self._seed, device=self._device)

    def _made(self, layer: int, num_bytes: int) -> Allocation:
        module = self._blank(layer)
        rest = num_bytes - sum(value.nbytes for value in module.state_dict().values() if isinstance(value, Tensor))
        if rest <= 0:
            return Allocation(module)
        # Each tensor may begin a little after the end of the one before.
        rest += _TENSORS * _ALIGNMENT * sum(1 for _ in module.parameters())
        try:
            memory = Memory(rest)
        except (
            RuntimeError
        ):  # so torch says that there is none; without it the layer may fit, as it arrives piece by piece
            return Allocation(module)
        memory.touch(unless=self._stop.is_set)
        return Allocation(module, memory)
