"""A part of a decoder-only model of transformers as a layer, which runs the model's own forward.

All modules of other layers are stand-ins: those before it return the layer's input, and the forward ends where the
layer begins or ends. So masks, rotary positions and what else a decoder layer gets are made on each worker by the
functions of transformers, and no family needs code of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from chameleon_ft.errors import ConfigError

if TYPE_CHECKING:
    from chameleon_ft.models.router_loss import Sums


@dataclass(frozen=True, slots=True)
class BlockArguments:
    """The arguments of a decoder layer: the hidden state, and others."""

    hidden: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    by_name: bool

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BlockArguments:
        if args:
            return cls(args[0], args[1:], kwargs, by_name=False)
        others = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        return cls(kwargs["hidden_states"], (), others, by_name=True)

    def run(self, block: nn.Module, hidden: Any) -> Any:
        if self.by_name:
            return block(hidden_states=hidden, **self.kwargs)
        return block(hidden, *self.args, **self.kwargs)


class KeptArguments:
    """Arguments of decoder layers beside the hidden state, by number, which depend only on the kind of the latter.

    All layers of a process share it, and it is no part of what is copied to another one.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[object, BlockArguments]] = {}

    def __reduce__(self) -> tuple[type[KeptArguments], tuple[()]]:
        return KeptArguments, ()

    def get(self, index: int, kind: object) -> BlockArguments | None:
        known, arguments = self._kept.get(index, (None, None))
        return arguments if known == kind else None

    def keep(self, index: int, kind: object, arguments: BlockArguments) -> None:
        """Keep those of the last kind alone, unless they may change or have a graph."""
        others = [*arguments.args, *arguments.kwargs.values()]
        if all(_is_constant(each) for each in others):
            self._kept[index] = kind, replace(arguments, hidden=None)


def _is_constant(value: object) -> bool:
    if isinstance(value, Tensor):
        return not value.requires_grad and not value.is_inference()
    return (
        value is None
        or isinstance(value, str | int | float)
        or (isinstance(value, tuple) and all(map(_is_constant, value)))
    )


class _Reached(Exception):  # noqa: N818 - not an error: it ends the forward of a model at a decoder layer
    def __init__(self, arguments: BlockArguments) -> None:
        self.arguments = arguments


class Call:
    """The input of the layer that runs at the moment, for the stand-ins of other layers."""

    def __init__(self) -> None:
        self.given: Tensor | None = None


class StandIn:
    """A module of another layer, which returns the running layer's input, without its graph."""

    def __init__(self, module: nn.Module, call: Call) -> None:
        self._module = module
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert self._call.given is not None
        return self._call.given.detach()


class BlockStandIn(StandIn):
    """A decoder layer: those before the one at which the forward ends return the running layer's input."""

    def __init__(self, module: nn.Module, call: Call, num_outputs: int, *, is_end: bool) -> None:
        super().__init__(module, call)
        self._num_outputs = num_outputs
        self._is_end = is_end

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_end:
            raise _Reached(BlockArguments.of(args, kwargs))
        return (self._call.given, *[None] * (self._num_outputs - 1)) if self._num_outputs else self._call.given


class TransformersLayer(nn.Module):
    """A part of a model of transformers: token ids or the output of the layer before -> its output.

    Its modules are those that the walk found for it, under their own last names; a decoder layer is `block`.
    """

    def __init__(self, walk: Any, index: int) -> None:
        """Build a part of a `Walk`: -1 comes before the decoder layers, and their number is what comes after them."""
        super().__init__()
        self._index = index
        self._is_head = index == walk.num_blocks
        self._makes_masks = walk.makes_masks and index >= 0
        self._mixes_documents = walk.mixes_documents
        self._call = Call()
        self._kept = walk.kept
        held = {path: walk.build(path) for path in walk.paths_of(index)}
        for path, module in held.items():
            self.add_module(walk.name_of(path), module)
        stored = self.state_dict()
        # As in a model of transformers, which also leaves buffers as they are that it does not read from files.
        buffers = (name for name, _ in self.named_buffers() if name not in stored)
        self._keep_in_fp32_modules = walk.fp32_modules().union(buffers)
        self._routers, self._logits = walk.routers, list[Tensor]()
        if self._routers is not None:
            self._routers.watch(self, self._logits)
        # In a tuple it is no module of this one: its parts have names of their own here.
        self._model = (walk.shell(index, held, self._call),)

    def train(self, mode: bool = True) -> TransformersLayer:
        super().train(mode)
        for part in self._model[0].modules():
            part.training = mode
        return self

    def forward(
        self,
        x: Any,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Any:
        fields = self._fields(attention_mask, position_ids, document_ids)
        if self._routers is None:
            return self._run(x, fields)
        hidden, *others = (x, *self._routers.begin(x.device)) if self._index < 0 else x
        self._logits.clear()
        output = self._run(hidden, fields)
        sums: Sums = (others[0], others[1])
        for logits in self._logits:
            sums = self._routers.add(sums, logits, attention_mask)
        self._logits.clear()
        if not self._is_head:
            return (output, *sums)
        self._routers.end(
            sums, hidden.shape[0] * hidden.shape[1] if attention_mask is None else int(attention_mask.sum())
        )
        return output

    def _fields(
        self, attention_mask: Tensor | None, position_ids: Tensor | None, document_ids: Tensor | None
    ) -> dict[str, Any]:
        if document_ids is not None and position_ids is None:
            position_ids = positions_in_documents(document_ids)
        if position_ids is not None and self._mixes_documents:
            raise ConfigError(
                f"{self._mixes_documents}, so documents in one sample would see each other: samples of this model can "
                "have neither document_ids nor position_ids"
            )
        fields = {"attention_mask": attention_mask, "position_ids": position_ids}
        return {name: value for name, value in fields.items() if value is not None}

    def _run(self, x: Tensor, fields: dict[str, Any]) -> Any:
        if self._is_head:
            return self._forward(x, fields).logits
        if self._index < 0:
            return self._reach(x, fields).hidden
        # Without fields, masks and positions do not depend on values.
        keeps = not fields and type(x) is Tensor and not torch.compiler.is_compiling()
        kind = (x.shape, x.dtype, x.device, self.training)
        arguments = self._kept.get(self._index, kind) if keeps else None
        if arguments is None:
            random = _random_state(x.device) if keeps else None
            arguments = self._reach(x, fields)
            # Layer 0 has returned what the first decoder layer gets.
            hidden = x if self._index == 0 else arguments.hidden
            if random is not None and hidden is x and torch.equal(random, _random_state(x.device)):
                self._kept.keep(self._index, kind, arguments)
        else:
            hidden = x
        output = arguments.run(self.get_submodule("block"), hidden)
        return output[0] if isinstance(output, tuple) else output

    def _reach(self, x: Tensor, fields: dict[str, Any]) -> BlockArguments:
        """Return what the decoder layer gets with which this layer begins or ends."""
        try:
            self._forward(x, fields)
        except _Reached as reached:
            return reached.arguments
        raise RuntimeError(f"the forward of the model has not run decoder layer {max(self._index, 0)}")

    def _forward(self, x: Tensor, fields: dict[str, Any]) -> Any:
        if "position_ids" in fields and self._makes_masks:
            fields = {**fields, "attention_mask": masks(self._model[0].config, x, **fields)}
        self._call.given = x
        try:
            return self._model[0](**fields, **{"input_ids" if self._index < 0 else "inputs_embeds": x.detach()})
        finally:
            self._call.given = None


def _random_state(device: torch.device) -> Tensor:
    if device.type in ("cpu", "meta"):
        return torch.default_generator.get_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def masks(config: Any, x: Tensor, position_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
    """Return the masks that the decoder layers of a model get, for documents whose positions begin again."""
    from transformers.masking_utils import create_masks_for_generate

    return create_masks_for_generate(
        config, inputs_embeds=x, attention_mask=attention_mask, past_key_values=None, position_ids=position_ids
    )


def positions_in_documents(document_ids: Tensor) -> Tensor:
    """Return positions (batch, time) that begin at 0 in each document, from the numbers of documents."""
    places = torch.arange(document_ids.shape[-1], device=document_ids.device).expand_as(document_ids)
    begins = functional.pad(document_ids[..., 1:] != document_ids[..., :-1], (1, 0), value=True)
    return places - (places * begins).cummax(-1).values


def clone_around(
    module: nn.Module,
    blocks: str,
    made_blocks: Sequence[Any],
    stand_in: Callable[[str, nn.Module], Any],
    path: str = "",
) -> nn.Module:
    """Copy the modules around a list of decoder layers; take the layers, and what else is in them, as given."""
    clone = copy.copy(module)
    clone._modules = dict(module._modules)
    for name, child in module.named_children():
        place = f"{path}.{name}" if path else name
        made: Any
        if place == blocks:
            made = made_blocks
        elif blocks.startswith(f"{place}."):
            made = clone_around(child, blocks, made_blocks, stand_in, place)
        else:
            made = stand_in(place, child)
        del clone._modules[name]
        if isinstance(made, nn.Module):
            clone._modules[name] = made
        else:
            clone.__dict__[name] = made
    return clone


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value, however nested."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for each in value:
            yield from tensors_in(each)
