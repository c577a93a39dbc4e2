"""Trees of tensors: what layers return and get, flattened by torch's pytree, and written as JSON without their tensors.

A tree is a tensor, or a tuple, list, dict or dataclass of trees. Its leaves are tensors.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from chameleon_ft.errors import ConfigError


def flatten(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of a tree, and its structure."""
    leaves, structure = pytree.tree_flatten(tree)
    if all(isinstance(leaf, Tensor) for leaf in leaves):
        return leaves, structure
    unknown = {type(leaf) for leaf in leaves if _has_tensors(leaf)}
    for each in unknown:
        pytree.register_dataclass(each)
    return flatten(tree) if unknown else (leaves, structure)


def _has_tensors(leaf: Any) -> bool:
    """Return whether an object that pytree does not know is a dataclass of trees."""
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type | BoundarySpec):
        return False
    found = pytree.tree_leaves([getattr(leaf, each.name) for each in dataclasses.fields(leaf) if each.init])
    return any(isinstance(each, Tensor | BoundarySpec) or _has_tensors(each) for each in found)


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of a tree."""
    return [tree] if isinstance(tree, Tensor) else flatten(tree)[0]


def mapped(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return the tree with what a function returns for each of its tensors."""
    if isinstance(tree, Tensor):
        return function(tree)
    leaves, structure = flatten(tree)
    return structure.unflatten([function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves])


def is_differentiable(dtype: torch.dtype) -> bool:
    """Return whether a tensor of this type may require a gradient."""
    return dtype.is_floating_point or dtype.is_complex


@dataclass(frozen=True, slots=True)
class BoundarySpec:
    """The output tensor of a layer for one micro-batch: its shape, micro-batch dimension included, and element type.

    The gradient that comes back has the same shape and type. Of a layer that returns a tree of tensors, this is a leaf.

    Attributes:
        requires_grad: whether the tensor has a gradient; None: if it is floating-point or complex.
        shapes: its shape in each of the job's buckets, of which `shape` is the last; empty: it has none.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool | None = None
    shapes: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.shape):
            raise ConfigError(f"a boundary tensor has the shape {self.shape}: every dimension must be at least 1")

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def has_gradient(self) -> bool:
        """Whether the tensor has a gradient."""
        return is_differentiable(self.dtype) if self.requires_grad is None else self.requires_grad

    @property
    def leaves(self) -> tuple[Self]:
        """The tensors of the output."""
        return (self,)

    @property
    def returned(self) -> tuple[int, ...]:
        """The numbers of the leaves whose gradients come back."""
        return (0,)

    @property
    def text(self) -> str:
        """The type and the shape in words."""
        return _text(self)

    def flatten(self, output: Any, *, layer: int) -> list[Tensor]:
        """Return the leaves of the output of a layer. Raises ConfigError if it is not what is expected."""
        self.require(output, layer=layer)
        return [output]

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Return the output with these leaves."""
        return leaves[0]

    def require(self, tensor: Any, *, layer: int, gradient: bool = False) -> None:
        """Raise ConfigError if `tensor` is not what is expected of the output of `layer`, or of its gradient."""
        if getattr(tensor, "dtype", None) == self.dtype and tensor.shape in (self.shapes or (self.shape,)):
            return
        name = f"the gradient of the output of layer {layer}" if gradient else f"the output of layer {layer}"
        found = _text(tensor) if hasattr(tensor, "dtype") else f"a {type(tensor).__name__}"
        raise ConfigError(
            f"{name} is {found}, but {self.text} is expected, by the job's `boundaries` or by a run of one micro-batch "
            "before training. A layer must return one shape and type for every micro-batch: at its end cast the "
            f"result, for example by `.to({self.dtype})`, or pad it; or state in `boundaries` what it returns"
        )


@dataclass(frozen=True, slots=True)
class BoundaryTree:
    """The output of a layer that returns a tree: as `BoundarySpec`, of which it has one for each leaf."""

    leaves: tuple[BoundarySpec, ...]
    # Not all of them have a hash.
    structure: pytree.TreeSpec = field(hash=False)

    @property
    def num_bytes(self) -> int:
        return sum(leaf.num_bytes for leaf in self.leaves)

    @property
    def returned(self) -> tuple[int, ...]:
        """The numbers of the leaves whose gradients come back; one of zeros if none has a gradient."""
        return tuple(number for number, leaf in enumerate(self.leaves) if leaf.has_gradient) or (0,)

    def flatten(self, output: Any, *, layer: int) -> list[Tensor]:
        """Return the leaves of the output of a layer. Raises ConfigError if it is another tree than expected."""
        leaves, structure = flatten(output)
        of_one_kind = (
            isinstance(leaf, Tensor) and leaf.dtype == spec.dtype and leaf.shape in (spec.shapes or (spec.shape,))
            for spec, leaf in zip(self.leaves, leaves, strict=True)
        )
        if structure != self.structure or not all(of_one_kind):
            expected = self.structure.unflatten([leaf.text for leaf in self.leaves])
            raise ConfigError(
                f"the output of layer {layer} is {described(output)}, but {expected} is expected, by the job's "
                "`boundaries` or by a run of one micro-batch before training. A layer must return one tree for every "
                "micro-batch, with a tensor of one shape and type in each place: return zeros where there is none, and "
                "pad or cast at the end of the layer"
            )
        return leaves

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Return the tree of these leaves."""
        return self.structure.unflatten(leaves)


Boundary: TypeAlias = BoundarySpec | BoundaryTree
"""The output of a layer."""


def boundary_of(tree: Any, leaf_spec: Callable[[Any], BoundarySpec]) -> Boundary:
    """Return what a layer outputs that returns a tree; of its leaves `leaf_spec` returns what they are."""
    if isinstance(tree, Tensor | BoundarySpec):
        return replace(leaf_spec(tree), requires_grad=None)
    leaves, structure = flatten(tree)
    return BoundaryTree(tuple(map(leaf_spec, leaves)), structure)


def leaf_spec(tensor: Tensor) -> BoundarySpec:
    """Return what a leaf is."""
    return BoundarySpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def described(tree: Any) -> str:
    """Return a tree with the types and shapes of its tensors, as text."""
    leaves, structure = flatten(tree)
    texts = [_text(leaf) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves]
    return str(structure.unflatten(texts))


def _text(leaf: Tensor | BoundarySpec) -> str:
    return f"{str(leaf.dtype).removeprefix('torch.')} of shape {tuple(leaf.shape)}"


def structure_to_json(structure: pytree.TreeSpec, *, name: str = "a layer") -> str:
    """Write the structure of what `name` returns: the tree, with numbers in place of its leaves.

    Raises ConfigError if it has a class that cannot be looked up by name.
    """
    return json.dumps(_encoded(structure.unflatten(range(structure.num_leaves)), name))


def structure_from_json(text: str) -> pytree.TreeSpec:
    """Read what `structure_to_json` has written; classes are looked up by name."""
    return flatten(_decoded(json.loads(text)))[1]


def _encoded(value: Any, name: str) -> Any:
    kind = type(value)
    if value is None or kind is int:
        return value
    if kind in (list, tuple):
        return {kind.__name__: [_encoded(each, name) for each in value]}
    if kind is dict and all(type(key) in (str, int) for key in value):
        return {"dict": [[key, _encoded(each, name)] for key, each in value.items()]}
    if dataclasses.is_dataclass(value):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value) if each.init}
    elif hasattr(value, "_asdict"):
        fields = value._asdict()
    else:
        raise ConfigError(
            f"{name} returned a {kind.__name__}: let it return a tensor, or a tuple, list, dict with names as keys, "
            "named tuple or dataclass of tensors"
        )
    if "<locals>" in kind.__qualname__:
        raise ConfigError(f"{name} returned a {kind.__name__}, which is defined in a function: define it in a module")
    named = {key: _encoded(each, name) for key, each in fields.items()}
    return {"class": [kind.__module__, kind.__qualname__, named]}


def _decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "list":
            return [_decoded(each) for each in content]
        case "tuple":
            return tuple(_decoded(each) for each in content)
        case "dict":
            return {key: _decoded(each) for key, each in content}
    module, name, fields = content
    made: Any = reduce(getattr, name.split("."), importlib.import_module(module))
    if dataclasses.is_dataclass(made) and made not in pytree.SUPPORTED_NODES:
        pytree.register_dataclass(made)  # type: ignore[arg-type]
    return made(**{key: _decoded(each) for key, each in fields.items()})
