"""Selective recomputation: a layer names what of it is fast to compute, and need not be kept for the backward.

A layer's `forward` calls such a part through `recomputable`:

    def forward(self, x):
        scores = self.attention(recomputable(self.norm, x))

On a worker whose plan recomputes the layer selectively, autograd then keeps neither what `self.norm` saves for its own
backward nor its output, wherever the output is saved; only the inputs are kept. When the backward first asks for one of
these tensors, the function is run again, once, and each tensor is freed with the graph that asked for it. That goes for
a backward in halves too; `torch.utils.checkpoint` would run the function again for each half. Which parts to take:
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["recomputable", "selective_recomputation"]


def recomputable(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return ``function(*inputs)``, of which a worker that recomputes selectively keeps only the inputs.

    Args:
        function: returns one new tensor and has no side effects but on random generators, whose state is replayed.
            Modules are functions of their input too. Tensors that it takes from elsewhere must not change before the
            backward.
        inputs: tensors that are not changed in place before the backward.
    """
    if torch.compiler.is_compiling() or (layer := _LAYER.get()) is None or not torch.is_grad_enabled():
        return function(*inputs)
    return layer.run(function, inputs)


@contextlib.contextmanager
def selective_recomputation() -> Iterator[None]:
    """Let a layer that is run within it keep nothing of its `recomputable` parts."""
    layer = _Layer()
    token = _LAYER.set(layer)
    try:
        with saved_tensors_hooks(layer.pack, _unpack):
            yield
    finally:
        _LAYER.reset(token)
        layer.end()


class _Layer:
    """The recomputable parts of a layer whose forward is running, by the storage of their outputs.

    The outputs are kept until the forward has ended: until then storages cannot be mistaken for one another.
    """

    def __init__(self) -> None:
        self._parts: dict[int, tuple[_Part, Tensor, int]] = {}

    def run(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
        part = _Part(function, [(self.pack(tensor), tensor.requires_grad) for tensor in inputs], inputs[0].device)
        output = part.run(inputs)
        self._parts[output.untyped_storage().data_ptr()] = part, output, output._version
        return output

    def end(self) -> None:
        """Let go of the outputs; autograd keeps the hook, and with it this object, as long as the graph."""
        self._parts.clear()

    def pack(self, tensor: Tensor) -> _Packed:
        """The value to save for a tensor: for an output of a part, or a view of one, how to compute it again."""
        part, _, version = self._parts.get(tensor.untyped_storage().data_ptr(), (None, None, 0))
        # One that has been changed in place is not what the part makes.
        if part is None or tensor._version != version:
            return tensor.data  # not `detach`, whose result keeps the graph of its base alive
        return part.view_of_output(tensor)


class _Saved:
    """A tensor that autograd asks for in the backward; None until then."""

    __slots__ = ("__weakref__", "part", "tensor")

    def __init__(self, part: _Part) -> None:
        self.part = part
        self.tensor: Tensor | None = None


_Packed: TypeAlias = Tensor | _Saved
_Geometry: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int]
_LAYER: ContextVar[_Layer | None] = ContextVar("_LAYER", default=None)


def _unpack(packed: _Packed) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    if packed.tensor is None:
        packed.part.run_again()
    assert packed.tensor is not None
    return packed.tensor


class _Part:
    """A call of a function that can be run again: its inputs, and what autograd has saved of it.

    Args:
        function: as for `recomputable`.
        inputs: each with whether it requires a gradient.
        device: of the inputs.
    """

    def __init__(
        self, function: Callable[..., Tensor], inputs: Sequence[tuple[_Packed, bool]], device: torch.device
    ) -> None:
        self._function = function
        self._inputs = inputs
        self._device = device
        self._autocast = partial(
            torch.autocast,
            device.type,
            dtype=torch.get_autocast_dtype(device.type),
            enabled=torch.is_autocast_enabled(device.type),
        )
        # Weak: each is as long alive as the graph that may ask for it.
        self._saved: list[weakref.ref[_Saved]] = []
        self._outputs: list[tuple[weakref.ref[_Saved], _Geometry]] = []
        self._random_states: list[Tensor] = []

    def run(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Run the function for the first time."""
        states = [generator.get_state() for generator in self._generators]
        token = _LAYER.set(None)  # parts of a part are run again with it
        try:
            with saved_tensors_hooks(self._pack, _unpack):
                output = self._function(*inputs)
        finally:
            _LAYER.reset(token)
        if not all(map(torch.equal, states, (generator.get_state() for generator in self._generators))):
            self._random_states = states
        return output

    def run_again(self) -> None:
        """Run the function again, and fill in what autograd saves this time."""
        made: list[Tensor] = []
        inputs = [_unpack(packed).data.requires_grad_(needs_grad) for packed, needs_grad in self._inputs]
        with (
            torch.enable_grad(),
            self._autocast(),
            self._replayed_randomness(),
            saved_tensors_hooks(lambda tensor: made.append(tensor.data), _unpack),
        ):
            output = self._function(*inputs).data
        if len(made) != len(self._saved):
            raise RuntimeError(
                f"{self._function} saved {len(self._saved)} tensors for its backward in the forward, and {len(made)} "
                "when it was run again; a function given to `recomputable` must do the same each time"
            )
        for reference, tensor in zip(self._saved, made, strict=True):
            if (saved := reference()) is not None:
                saved.tensor = tensor
        for reference, geometry in self._outputs:
            if (saved := reference()) is not None:
                saved.tensor = output.as_strided(*geometry)

    def view_of_output(self, tensor: Tensor) -> _Saved:
        """Stand in for a view of the function's output."""
        saved = _Saved(self)
        self._outputs.append((weakref.ref(saved), (tensor.size(), tensor.stride(), int(tensor.storage_offset()))))
        return saved

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(self)
        self._saved.append(weakref.ref(saved))
        return saved

    @property
    def _generators(self) -> list[torch.Generator]:
        if self._device.type == "cpu":
            return [torch.default_generator]
        return [torch.default_generator, torch.get_device_module(self._device).default_generators[self._device.index]]

    @contextlib.contextmanager
    def _replayed_randomness(self) -> Iterator[None]:
        before = [generator.get_state() for generator in self._generators] if self._random_states else []
        self._set_generators(self._random_states)
        try:
            yield
        finally:
            self._set_generators(before)

    def _set_generators(self, states: Sequence[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=False):
            generator.set_state(state)
