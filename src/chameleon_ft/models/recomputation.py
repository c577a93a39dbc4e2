"""Selective recomputation: a layer marks parts that are fast to compute, whose tensors need not be kept.

A layer's `forward` calls such a part through `recomputable`:

    def forward(self, x):
        scores = self.attention(recomputable(self.norm, x))

If the plan of a worker recomputes the layer selectively, autograd keeps only the inputs of `self.norm`: neither the
tensors that it saves for its own backward nor its output, wherever the output is saved. When the backward first needs
one of these tensors, the function runs again, once, and each tensor is freed with the graph that needed it. This also
holds for a backward in halves, for which `torch.utils.checkpoint` would run the function twice. For the choice of parts
see Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022).
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


def recomputable(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return ``function(*inputs)``, of which a worker that recomputes selectively keeps only the inputs.

    Args:
        function: returns one new tensor and has no side effects except on random generators, whose state is restored
            for the second run. Other tensors that it reads, such as a module's parameters, must not change before the
            backward.
        inputs: tensors that are not changed in place before the backward.
    """
    if torch.compiler.is_compiling() or (layer := _LAYER.get()) is None or not torch.is_grad_enabled():
        return function(*inputs)
    return layer.run(function, inputs)


@contextlib.contextmanager
def selective_recomputation() -> Iterator[None]:
    """Run a layer's forward in this context without keeping tensors of its `recomputable` parts."""
    layer = _Layer()
    token = _LAYER.set(layer)
    try:
        with saved_tensors_hooks(layer.pack, _unpack):
            yield
    finally:
        _LAYER.reset(token)
        # Autograd keeps the hook, and with it this object, as long as the graph; the outputs must not live as long.
        layer.parts.clear()


class _Layer:
    """The recomputable parts of a layer whose forward is running, by the storage of their outputs.

    They hold their outputs until the forward has ended, so that no storage is reused before.
    """

    def __init__(self) -> None:
        self.parts: dict[int, tuple[_Part, Tensor, int]] = {}

    def run(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
        part = _Part(function, [(self.pack(tensor), tensor.requires_grad) for tensor in inputs], inputs[0].device)
        output = part.run(inputs)
        self.parts[output.untyped_storage().data_ptr()] = part, output, output._version
        return output

    def pack(self, tensor: Tensor) -> _Packed:
        """Return the value to save for a tensor: a placeholder for a view of a part's output, else the tensor."""
        part, _, version = self.parts.get(tensor.untyped_storage().data_ptr(), (None, None, 0))
        # An output that was changed in place since differs from that of a second run.
        if part is None or tensor._version != version:
            # The result of `detach` would keep the graph of its base alive.
            return tensor.data
        return part.save_view(tensor)


class _Saved:
    """A placeholder for a tensor, which is None until the part has run again."""

    __slots__ = ("__weakref__", "part", "tensor")

    def __init__(self, part: _Part) -> None:
        self.part = part
        self.tensor: Tensor | None = None


_Packed: TypeAlias = Tensor | _Saved
# Size, stride and storage offset of a tensor.
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
    """A call of a function that can run again: `inputs`, each with whether it requires a gradient, on `device`."""

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
        # Weak references: a placeholder lives as long as the graph that may need its tensor.
        self._saved: list[weakref.ref[_Saved]] = []
        self._views: list[tuple[weakref.ref[_Saved], _Geometry]] = []
        # The states before the first run; empty if it drew no random numbers.
        self._random_states: list[Tensor] = []

    def run(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Run the function for the first time."""
        before = self._get_random_states()
        # Parts of a part run again with the whole.
        token = _LAYER.set(None)
        try:
            with saved_tensors_hooks(self._save, _unpack):
                output = self._function(*inputs)
        finally:
            _LAYER.reset(token)
        if not all(map(torch.equal, before, self._get_random_states())):
            self._random_states = before
        return output

    def run_again(self) -> None:
        """Run the function again, and fill the placeholders."""
        tensors: list[Tensor] = []
        inputs = [_unpack(packed).data.requires_grad_(needs_grad) for packed, needs_grad in self._inputs]
        with (
            torch.enable_grad(),
            self._autocast(),
            self._restored_randomness(),
            saved_tensors_hooks(lambda tensor: tensors.append(tensor.data), _unpack),
        ):
            output = self._function(*inputs).data
        if len(tensors) != len(self._saved):
            raise RuntimeError(
                f"{self._function} saved {len(self._saved)} tensors for its backward in the forward, and "
                f"{len(tensors)} when it was run again; a function given to `recomputable` must do the same each time"
            )
        for reference, tensor in zip(self._saved, tensors, strict=True):
            if (saved := reference()) is not None:
                saved.tensor = tensor
        for reference, geometry in self._views:
            if (saved := reference()) is not None:
                saved.tensor = output.as_strided(*geometry)

    def save_view(self, tensor: Tensor) -> _Saved:
        """Return a placeholder for a view of the function's output."""
        saved = _Saved(self)
        self._views.append((weakref.ref(saved), (tensor.size(), tensor.stride(), int(tensor.storage_offset()))))
        return saved

    def _save(self, tensor: Tensor) -> _Saved:
        saved = _Saved(self)
        self._saved.append(weakref.ref(saved))
        return saved

    def _get_random_states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators()]

    def _set_random_states(self, states: Sequence[Tensor]) -> None:
        for generator, state in zip(self._generators(), states, strict=False):
            generator.set_state(state)

    def _generators(self) -> list[torch.Generator]:
        if self._device.type == "cpu":
            return [torch.default_generator]
        return [torch.default_generator, torch.get_device_module(self._device).default_generators[self._device.index]]

    @contextlib.contextmanager
    def _restored_randomness(self) -> Iterator[None]:
        before = self._get_random_states() if self._random_states else []
        self._set_random_states(self._random_states)
        try:
            yield
        finally:
            self._set_random_states(before)
