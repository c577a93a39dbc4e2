"""The parts of a decoder-only model of transformers, each as a layer that runs the model's own forward.

In a layer, all modules of other layers are stand-ins: those before it return the layer's input, and the forward ends
where the layer ends. So masks, rotary positions and what else a decoder layer gets are made on each worker by the
functions of transformers, and no family needs code of its own. `Walk` finds the parts, by a forward of fake tensors.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from chameleon_ft.errors import ConfigError
from chameleon_ft.models.checks import leaves_of_graph
from chameleon_ft.models.router_loss import RouterLoss, Sums

# Attributes of a decoder layer that number it, for its place in a cache of keys, which training does not have.
_NUMBERS: Final = frozenset({"layer_idx", "layer_id", "layer_number", "block_idx"})


class _End(Exception):  # noqa: N818 - not an error: it ends the forward of a model where a layer ends
    def __init__(self, output: Any) -> None:
        self.output = output


class _Call:
    """The input of the layer that runs at the moment, for the stand-ins of other layers."""

    def __init__(self) -> None:
        self.given: Tensor | None = None


class _StandIn:
    """A module of another layer, which returns the running layer's input, without its graph."""

    def __init__(self, module: nn.Module, call: _Call) -> None:
        self._module = module
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert self._call.given is not None
        return self._call.given.detach()


class _OtherBlock(_StandIn):
    """A decoder layer of another layer; those before the running one return its input."""

    def __init__(self, module: nn.Module, call: _Call, *, as_tuple: bool, is_end: bool) -> None:
        super().__init__(module, call)
        self._as_tuple = as_tuple
        self._is_end = is_end

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_end:
            raise _End(_hidden_of(args, kwargs)[2])
        return (self._call.given,) if self._as_tuple else self._call.given


class _OwnBlock(_StandIn):
    """The running decoder layer, after which the forward ends."""

    def __init__(self, module: nn.Module, call: _Call, *, is_first: bool) -> None:
        super().__init__(module, call)
        self._is_first = is_first

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_first:
            # Layer 0 has returned what the first decoder layer gets.
            place, key, _ = _hidden_of(args, kwargs)
            if key:
                kwargs = {**kwargs, key: self._call.given}
            else:
                args = (*args[:place], self._call.given, *args[place + 1 :])
        output = self._module(*args, **kwargs)
        raise _End(output[0] if isinstance(output, tuple) else output)


def _hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, str, Any]:
    """Return the place, or the name, of the hidden state among the arguments of a decoder layer, and the state."""
    if args:
        return 0, "", args[0]
    return 0, "hidden_states", kwargs["hidden_states"]


class TransformersLayer(nn.Module):
    """A part of a model of transformers: token ids or the output of the layer before -> its output.

    Its modules are those that the walk found for it, under their own last names; a decoder layer is `block`.
    """

    def __init__(self, walk: Walk, index: int) -> None:
        """Build a part: -1 is what comes before the decoder layers, their number what comes after them."""
        super().__init__()
        self._index = index
        self._is_head = index == walk.num_blocks
        self._makes_masks = walk.makes_masks and index >= 0
        # As in a model of transformers; see `chameleon_ft.models.precision`.
        self._keep_in_fp32_modules = walk.fp32_modules()
        self._call = _Call()
        held = {path: walk.build(path) for path in walk.paths_of(index)}
        for path, module in held.items():
            self.add_module(walk.name_of(path), module)
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
        if self._routers is None:
            return self._run(x, attention_mask, position_ids, document_ids)
        hidden, *others = (x, *self._routers.begin(x.device)) if self._index < 0 else x
        self._logits.clear()
        output = self._run(hidden, attention_mask, position_ids, document_ids)
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

    def _run(
        self, x: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, document_ids: Tensor | None
    ) -> Tensor:
        if document_ids is not None and position_ids is None:
            position_ids = positions_in_documents(document_ids)
        fields: dict[str, Any] = {"attention_mask": attention_mask, "position_ids": position_ids}
        if position_ids is not None and self._makes_masks:
            fields["attention_mask"] = _masks(self._model[0].config, x, attention_mask, position_ids)
        fields = {name: value for name, value in fields.items() if value is not None}
        fields["input_ids" if self._index < 0 else "inputs_embeds"] = x.detach()
        self._call.given = x
        try:
            output: Tensor = self._model[0](**fields).logits
        except _End as end:
            output = end.output
        finally:
            self._call.given = None
        return output


def _masks(config: Any, x: Tensor, attention_mask: Tensor | None, position_ids: Tensor) -> Any:
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


@dataclass(frozen=True, slots=True)
class Walk:
    """Where the parts of a model are; paths are names in the whole model.

    Attributes:
        model: the whole model on the meta device.
        blocks: path of the list of decoder layers.
        before, after, tables: paths of the modules that run before and after the decoder layers, and of those that have
            buffers and no parameters, such as rotary positions, which all parts hold.
        as_tuple: whether a decoder layer returns a tuple.
        makes_masks: whether masks are to be made before the forward, which would make none of documents.
        routers: the loss of its routers.
    """

    model: Any
    blocks: str
    num_blocks: int
    before: tuple[str, ...]
    after: tuple[str, ...]
    tables: tuple[str, ...]
    as_tuple: bool
    makes_masks: bool = False
    routers: RouterLoss | None = None

    @classmethod
    def of(cls, config: Any, attention: str | None = None) -> Walk:
        """Find the parts of the model of a configuration. Raises ConfigError if something stands in the way."""
        import transformers

        config = copy.deepcopy(config)
        config = getattr(config, "text_config", None) or config
        name = config.model_type
        # There is nothing to generate, so there is no cache of keys.
        config.use_cache = False
        has_router_loss = getattr(config, "output_router_logits", False)
        if has_router_loss:
            # It is computed here; see `RouterLoss`.
            config.output_router_logits = False
        if getattr(config, "quantization_config", None) is not None:
            raise ConfigError(f"{name}: the model is quantised, and cannot be trained; give one that is not")
        if attention is not None:
            config._attn_implementation = attention
        model_class: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        if model_class is None:
            raise ConfigError(f"{name}: transformers has no model for causal language modelling of this type")
        try:
            with torch.device("meta"):
                model = model_class(config)
        except Exception as error:
            raise ConfigError(
                f"{name}: transformers cannot build the model ({type(error).__name__}: {error})"
            ) from error
        walk = _find(model)
        if not has_router_loss:
            return walk
        return replace(walk, routers=RouterLoss.of(model, model.get_submodule(walk.blocks.rpartition(".")[0])))

    def layers(self) -> tuple[Callable[[], nn.Module], ...]:
        """Return the factories of the layers; decoder layers that are alike share one."""
        known: dict[str, partial[TransformersLayer]] = {}
        parts = []
        for index in range(-1, self.num_blocks + 1):
            key = self._signature(index) if 0 <= index < self.num_blocks else f"part {index}"
            parts.append(known.setdefault(key, partial(TransformersLayer, self, index)))
        return tuple(parts)

    def paths_of(self, index: int) -> tuple[str, ...]:
        """Return the paths of the modules that a part holds."""
        if index < 0:
            return (*self.before, *self.tables)
        if index == self.num_blocks:
            return (*self.after, *self.tables)
        return (f"{self.blocks}.{index}", *self.tables)

    def name_of(self, path: str) -> str:
        """Return the name of a module in the part that holds it."""
        return "block" if path.startswith(f"{self.blocks}.") else path.rpartition(".")[2]

    def names(self, index: int) -> dict[str, str]:
        """Return the names in the whole model of the parameters and persistent buffers of a part, by their own."""
        return {
            f"{self.name_of(path)}.{name}": f"{path}.{name}"
            for path in self.paths_of(index)
            for name in self.model.get_submodule(path).state_dict()
        }

    def build(self, path: str) -> nn.Module:
        """Build a module as transformers initialises it, on torch's default device."""
        module: nn.Module = copy.deepcopy(self.model.get_submodule(path))
        module.to_empty(device=torch.get_default_device())
        owner: Any = self.model.get_submodule(self.blocks.rpartition(".")[0])
        with torch.no_grad():
            # From the inside out: a module may initialise those in it again.
            for part in reversed(list(module.modules())):
                owner._init_weights(part)
        return module

    def shell(self, index: int, held: Mapping[str, nn.Module], call: _Call) -> Any:
        """Return the whole model for the forward of a part: with the modules that it holds, and stand-ins."""
        blocks: list[_StandIn] = []
        for number, block in enumerate(self.model.get_submodule(self.blocks)):
            if number == index:
                blocks.append(_OwnBlock(held[f"{self.blocks}.{index}"], call, is_first=index == 0))
            else:
                blocks.append(_OtherBlock(block, call, as_tuple=self.as_tuple, is_end=index < 0))
        return _clone(self.model, self.blocks, blocks, lambda path, module: held.get(path) or _StandIn(module, call))

    def tied(self) -> tuple[tuple[tuple[int, str], ...], ...]:
        """Return `Job.tied`."""
        places = {}
        for index in (-1, self.num_blocks):
            for path in self.paths_of(index):
                for name, _ in self.model.get_submodule(path).named_parameters():
                    places[f"{path}.{name}"] = (index + 1, f"{self.name_of(path)}.{name}")
        groups: dict[int, list[tuple[int, str]]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if name in places:
                groups.setdefault(id(parameter), []).append(places[name])
        return tuple(tuple(group) for group in groups.values() if len(group) > 1)

    def fp32_modules(self) -> frozenset[str]:
        """Return the names of what the model keeps in float32 under bf16."""
        return frozenset({*self.model._keep_in_fp32_modules, *self.model._keep_in_fp32_modules_strict, "inv_freq"})

    def layer_costs(self) -> tuple[float, ...]:
        """Return the parameters that a token is multiplied by in each layer."""
        config = self.model.config
        experts = next(
            (
                n
                for name in ("num_local_experts", "num_experts", "n_routed_experts")
                if (n := getattr(config, name, None))
            ),
            1,
        )
        chosen = getattr(config, "num_experts_per_tok", None) or 1
        costs = [float(config.hidden_size)]
        for index in range(self.num_blocks + 1):
            held = [self.model.get_submodule(path) for path in self.paths_of(index)]
            costs.append(
                float(
                    sum(
                        each.numel() * (chosen / experts if each.ndim == 3 and each.shape[0] == experts else 1)
                        for module in held
                        for each in module.parameters()
                        if each.ndim > 1
                    )
                )
            )
        return tuple(costs)

    def _signature(self, index: int) -> str:
        """Return a text that is equal for decoder layers that compute alike."""
        config = self.model.config.to_dict()
        lists = [v[index] for v in config.values() if isinstance(v, list | tuple) and len(v) == self.num_blocks]
        block = self.model.get_submodule(f"{self.blocks}.{index}")
        parts = [
            (name, type(part).__qualname__, sorted((k, repr(v)) for k, v in vars(part).items() if _is_plain(k, v)))
            for name, part in block.named_modules()
        ]
        return repr((lists, parts, [(name, each.shape) for name, each in block.named_parameters()]))


def _is_plain(name: str, value: object) -> bool:
    return name not in _NUMBERS and isinstance(value, str | int | float | bool | tuple | None)


def _clone(
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
            made = _clone(child, blocks, made_blocks, stand_in, place)
        else:
            made = stand_in(place, child)
        del clone._modules[name]
        if isinstance(made, nn.Module):
            clone._modules[name] = made
        else:
            clone.__dict__[name] = made
    return clone


# --- finding the parts ---------------------------------------------------------------------------------------------


class _Probe:
    """A decoder layer of a forward that is watched: it notes its arguments, and returns a tensor without a graph."""

    def __init__(self, block: nn.Module, *, as_tuple: bool) -> None:
        self._block = block
        self._as_tuple = as_tuple
        self.hidden: Any = None
        self.others: dict[str, Any] = {}
        self.returned: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.returned is not None:
            raise RuntimeError("a decoder layer runs twice")
        place, key, self.hidden = _hidden_of(args, kwargs)
        names = list(inspect.signature(self._block.forward).parameters)
        self.others = {**dict(zip(names, args, strict=False)), **kwargs}
        self.others.pop(key or names[place])
        self.returned = torch.empty_like(self.hidden, requires_grad=True)
        return (self.returned,) if self._as_tuple else self.returned


def _find(model: Any) -> Walk:
    """Run a forward of fake tensors, and find what runs before and after the decoder layers."""
    blocks = _path_of_blocks(model)
    problem: Exception | None = None
    for as_tuple in (False, True):
        try:
            walk = _watch(model, blocks, as_tuple=as_tuple)
            return walk if _separates_documents(walk) else replace(walk, makes_masks=True)
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - of any class: the forward of a model
            problem = problem or error
    if own := _own_tensors(model, blocks):
        problem = RuntimeError(f"{own[0]} is a tensor beside the modules, and belongs to no layer")
    raise ConfigError(f"{_name_of(model)}: its forward cannot be followed ({type(problem).__name__}: {problem})")


def _own_tensors(model: nn.Module, blocks: str) -> list[str]:
    """Return the names of the tensors that the modules around the decoder layers keep themselves."""
    around = [blocks[:end] for end, letter in enumerate(blocks) if letter == "."]
    return [
        f"{path}.{name}" if path else name
        for path in ("", *around)
        for part in [model.get_submodule(path)]
        for name, value in {**vars(part), **part._parameters, **part._buffers}.items()
        if isinstance(value, Tensor)
    ]


def _name_of(model: nn.Module) -> str:
    return type(model).__name__


def _path_of_blocks(model: Any) -> str:
    number: int | None = getattr(model.config, "num_hidden_layers", None)
    found: list[str] = [
        path for path, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) == number
    ]
    if not found:
        raise ConfigError(f"{_name_of(model)}: it has no list of {number} decoder layers to cut into stages")
    return min(found, key=lambda path: path.count("."))


def _watch(model: Any, blocks: str, *, as_tuple: bool) -> Walk:
    probes = [_Probe(block, as_tuple=as_tuple) for block in model.get_submodule(blocks)]
    others: dict[str, nn.Module] = {}
    _clone(model, blocks, probes, lambda path, module: others.setdefault(path, copy.deepcopy(module)))
    calls: dict[str, set[int]] = {path: set() for path in others}
    for path, module in others.items():
        # How many decoder layers have run by then.
        module.register_forward_pre_hook(
            lambda *_, path=path: calls[path].add(sum(probe.returned is not None for probe in probes))
        )
    with FakeTensorMode() as mode:
        _make_fake(others.values())
        shell = _clone(model, blocks, probes, lambda path, _: others[path]).train()
        logits = shell(input_ids=torch.zeros(2, 4, dtype=torch.int64)).logits
        _check(model, probes, others, logits)
    number, tables = len(probes), [path for path, module in others.items() if _is_table(module)]
    for path, at in calls.items():
        if (path not in tables and any(0 < each < number for each in at)) or len(at) > 1:
            raise ConfigError(f"{_name_of(model)}: {path} runs between decoder layers, and belongs to no stage")
        if not at and any(True for _ in others[path].parameters()):
            raise ConfigError(f"{_name_of(model)}: {path} has parameters, and is not used in a forward of tokens")
    walk = Walk(
        model,
        blocks,
        number,
        before=tuple(path for path, at in calls.items() if at == {0} and path not in tables),
        after=tuple(path for path, at in calls.items() if at == {number} and path not in tables),
        tables=tuple(tables),
        as_tuple=as_tuple,
    )
    try:
        with mode:
            alone = _probed(walk, torch.empty(probes[0].hidden.shape), others)
    except Exception as error:
        raise ConfigError(
            f"{_name_of(model)}: what decoder layers get beside the hidden state cannot be computed without what comes "
            f"before them ({type(error).__name__}: {error})"
        ) from error
    for index, (probe, other) in enumerate(zip(probes, alone, strict=True)):
        for key, value in probe.others.items():
            if any(True for _ in _tensors_in(value)) and not any(True for _ in _tensors_in(other.others.get(key))):
                raise ConfigError(
                    f"{_name_of(model)}: decoder layer {index} gets {key!r}, which is computed from tokens"
                )
    return walk


def _make_fake(modules: Iterable[nn.Module]) -> None:
    """Replace the parameters and buffers of modules by fake tensors, which have no memory."""
    for part in (part for module in modules for part in module.modules()):
        for key, value in part._parameters.items():
            if value is not None:
                part._parameters[key] = nn.Parameter(torch.empty(value.shape, dtype=value.dtype))
        for key, buffer in part._buffers.items():
            part._buffers[key] = None if buffer is None else torch.empty(buffer.shape, dtype=buffer.dtype)


def _probed(walk: Walk, given: Tensor, tables: Mapping[str, nn.Module], **fields: Tensor) -> list[_Probe]:
    """Run the forward of a decoder layer on an input, and return what all of them got; `tables` are by path."""
    probes = [_Probe(block, as_tuple=walk.as_tuple) for block in walk.model.get_submodule(walk.blocks)]
    call = _Call()
    call.given = given

    def stand_in(path: str, module: nn.Module) -> Any:
        return tables[path] if path in walk.tables else _StandIn(module, call)

    shell = _clone(walk.model, walk.blocks, probes, stand_in)
    try:
        shell(inputs_embeds=given, **fields)
    except Exception:
        # Of any class: what comes after the decoder layers may not fit the stand-ins.
        if probes[-1].returned is None:
            raise
    return probes


def _separates_documents(walk: Walk) -> bool:
    """Return whether the masks of all decoder layers separate documents whose positions begin again."""
    given = torch.zeros(1, 4, walk.model.config.hidden_size)
    tables = {path: walk.build(path) for path in walk.tables}
    with contextlib.suppress(Exception):
        # Of any class: not all models take positions.
        for probe in _probed(walk, given, tables, position_ids=torch.tensor([[0, 1, 0, 1]])):
            masks = [each for each in _tensors_in(probe.others) if each.ndim == 4 and each.shape[-2:] == (4, 4)]
            if not masks or not all(_hides(mask[0, 0, 2, 1]) for mask in masks):
                return False
        return True
    return False


def _hides(value: Tensor) -> bool:
    """Return whether an element of a mask hides a token: False, or a large negative number that is added."""
    return not bool(value) if value.dtype == torch.bool else float(value) < -1.0


def _is_table(module: nn.Module) -> bool:
    return not any(True for _ in module.parameters()) and any(True for _ in module.buffers())


def _check(model: Any, probes: Sequence[_Probe], others: Mapping[str, nn.Module], logits: Tensor) -> None:
    """Raise if decoder layers share more than the hidden state, or the forward is not of this shape."""
    name, before = _name_of(model), None
    for number, probe in enumerate(probes):
        if probe.hidden is None:
            raise ConfigError(f"{name}: its forward does not run decoder layer {number}")
        if before is not None:
            if probe.hidden.shape != before.shape:
                raise RuntimeError(f"decoder layer {number} returns another shape than it gets")
            if strange := [leaf for leaf in leaves_of_graph([probe.hidden]) if leaf is not before]:
                raise ConfigError(
                    f"{name}: decoder layer {number} gets more than the output of the one before it, a tensor of shape "
                    f"{tuple(strange[0].shape)}"
                )
        for key, value in probe.others.items():
            if any(each.requires_grad for each in _tensors_in(value)):
                raise ConfigError(f"{name}: decoder layer {number} gets {key!r}, which is computed from other layers")
        before = probe.returned
    parameters = {id(each) for module in others.values() for each in module.parameters()}
    if any(leaf is not before and id(leaf) not in parameters for leaf in leaves_of_graph([logits])):
        raise ConfigError(f"{name}: its head gets more than the output of the last decoder layer")


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for each in value:
            yield from _tensors_in(each)
