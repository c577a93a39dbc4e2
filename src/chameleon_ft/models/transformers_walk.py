"""Finding the parts of a decoder-only model of transformers, by a forward of fake tensors.

Each becomes a layer, which runs the model's own forward; see `chameleon_ft.models.transformers_layer`.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from chameleon_ft.errors import ConfigError
from chameleon_ft.models.build import content_of
from chameleon_ft.models.checks import leaves_of_graph
from chameleon_ft.models.router_loss import RouterLoss
from chameleon_ft.models.transformers_layer import (
    BlockArguments,
    BlockStandIn,
    Call,
    KeptArguments,
    StandIn,
    TransformersLayer,
    clone_around,
    masks,
    tensors_in,
)

# Attributes of a decoder layer that number it, for its place in a cache of keys, which training does not have.
_NUMBERS: Final = frozenset({"layer_idx", "layer_id", "layer_number", "block_idx"})
# Hidden state, and what else a decoder layer may return, such as its attention.
_MAX_OUTPUTS: Final = 3


@dataclass(frozen=True, slots=True)
class Walk:
    """Where the parts of a model are; paths are names in the whole model.

    Attributes:
        model: the whole model on the meta device.
        blocks: path of the list of decoder layers.
        before, after, tables: paths of the modules that run before and after the decoder layers, and of those that
            have no parameters, and buffers or several uses, such as rotary positions, which all parts hold.
        num_outputs: of a decoder layer, of which the first is the hidden state; 0 if it returns no tuple.
        alike: for each decoder layer, a text of what it gets beside the hidden state.
        makes_masks: whether masks are to be made before the forward, which would make none of documents.
        mixes_documents: why documents in a sample cannot be kept apart; empty if they can be.
        shifts_labels: whether its loss compares the logits of a token with the label of the next one.
        routers: the loss of its routers.
        kept: what decoder layers get, for all layers of a process.
    """

    model: Any
    blocks: str
    num_blocks: int
    before: tuple[str, ...]
    after: tuple[str, ...]
    tables: tuple[str, ...]
    num_outputs: int
    alike: tuple[str, ...]
    makes_masks: bool = False
    mixes_documents: str = ""
    shifts_labels: bool = True
    routers: RouterLoss | None = None
    kept: KeptArguments = field(default_factory=KeptArguments, compare=False)

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
        return self._begun(path, torch.get_default_device())

    def _begun(self, path: str, device: str | torch.device, *, buffers: str | torch.device | None = None) -> nn.Module:
        module: nn.Module = copy.deepcopy(self.model.get_submodule(path))
        _make_empty([module], device, buffers or device)
        place = next(
            each
            for each in _around(self.blocks)
            if path.startswith(each and f"{each}.") and hasattr(self.model.get_submodule(each), "_init_weights")
        )
        # Where a module is in the model may say how it is initialised.
        owner = _with(self.model.get_submodule(place), path.removeprefix(f"{place}."), module)
        with torch.no_grad():
            # From the inside out: a module may initialise those in it again.
            for part in reversed(list(module.modules())):
                owner._init_weights(part)
        return module

    def uninitialized(self) -> Iterator[tuple[str, bool]]:
        """Yield the parameters and buffers that `build` gives no values, and whether they are in files of weights."""
        for path in dict.fromkeys(path for index in range(-1, self.num_blocks + 1) for path in self.paths_of(index)):
            module = self._begun(path, "meta")
            stored = module.state_dict(keep_vars=True)
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if tensor._version == 0:
                    yield f"{path}.{name}", name in stored

    def shell(self, index: int, held: Mapping[str, nn.Module], call: Call) -> Any:
        """Return the whole model for the forward of a part: with the modules that it holds, and stand-ins."""
        blocks = [
            BlockStandIn(block, call, self.num_outputs, is_end=number == max(index, 0))
            for number, block in enumerate(self.model.get_submodule(self.blocks))
        ]
        return clone_around(
            self.model, self.blocks, blocks, lambda path, module: held.get(path) or StandIn(module, call)
        )

    def tied(self) -> tuple[tuple[tuple[int, str], ...], ...]:
        """Return `Job.tied`."""
        places = {}
        for index in (-1, self.num_blocks):
            for path in self.paths_of(index):
                for name, _ in self.model.get_submodule(path).named_parameters():
                    places[f"{path}.{name}"] = (index + 1, f"{self.name_of(path)}.{name}")
        groups: dict[int, list[tuple[int, str]]] = {}
        for name, parameter in sources_first(self.model, self.model.named_parameters(remove_duplicate=False)):
            if name in places:
                groups.setdefault(id(parameter), []).append(places[name])
        return tuple(tuple(group) for group in groups.values() if len(group) > 1)

    def fp32_modules(self) -> frozenset[str]:
        """Return the names of what the model keeps in float32 under bf16."""
        return frozenset(
            {
                *self.model._keep_in_fp32_modules,
                *self.model._keep_in_fp32_modules_strict,
            }
        )

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
        path = f"{self.blocks}.{index}"
        block = self.model.get_submodule(path)
        parts = [
            (name, type(part).__qualname__, sorted((k, repr(v)) for k, v in vars(part).items() if _is_plain(k, v)))
            for name, part in block.named_modules()
        ]
        shapes = [(name, each.shape) for name, each in block.named_parameters()]
        return repr((lists, parts, shapes, self._buffers_of(path), self.alike[index]))

    def _buffers_of(self, path: str) -> list[tuple[str, bytes]]:
        """Return digests of the buffers that a decoder layer begins with, which may depend on its number."""
        if not any(True for _ in self.model.get_submodule(path).buffers()):
            return []
        return [(name, content_of(each)) for name, each in self._begun(path, "meta", buffers="cpu").named_buffers()]


def sources_first(model: Any, named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Return parameters by name, first those that others are tied to, by whose names transformers saves them."""
    return sorted(named, key=lambda item: item[0] in model.all_tied_weights_keys)


def _with(around: Any, path: str, module: nn.Module) -> Any:
    """Return a copy of a module that has another one at a path; all else is shared."""
    clone, (name, _, rest) = copy.copy(around), path.partition(".")
    clone._modules = {**around._modules, name: _with(around._modules[name], rest, module) if rest else module}
    return clone


def _is_plain(name: str, value: object) -> bool:
    return name not in _NUMBERS and isinstance(value, str | int | float | bool | tuple | None)


# --- finding the parts ---------------------------------------------------------------------------------------------


class _Probe:
    """A decoder layer of a forward that is watched: it notes its arguments, and returns a tensor without a graph."""

    def __init__(self, block: nn.Module, num_outputs: int) -> None:
        self._block = block
        self._num_outputs = num_outputs
        self.hidden: Any = None
        self.others: dict[str, Any] = {}
        self.returned: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.returned is not None:
            raise RuntimeError("a decoder layer runs twice")
        given = BlockArguments.of(args, kwargs)
        names = list(inspect.signature(self._block.forward).parameters)[0 if given.by_name else 1 :]
        self.hidden, self.others = given.hidden, {**dict(zip(names, given.args, strict=False)), **given.kwargs}
        self.returned = torch.empty_like(self.hidden, requires_grad=True)
        # Other outputs are seen by their gradient, too, wherever they are used.
        others = [torch.empty((), requires_grad=True) for _ in range(self._num_outputs - 1)]
        return (self.returned, *others) if self._num_outputs else self.returned


def _find(model: Any) -> Walk:
    """Run a forward of fake tensors, and find what runs before and after the decoder layers."""
    blocks = _path_of_blocks(model)
    problem: Exception | None = None
    for num_outputs in range(_MAX_OUTPUTS + 1):
        try:
            return _with_loss(_with_masks(_watch(model, blocks, num_outputs)))
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - of any class: the forward of a model
            problem = problem or error
    if own := _own_tensors(model, blocks):
        problem = RuntimeError(f"{own[0]} is a tensor beside the modules, and belongs to no layer")
    raise ConfigError(f"{_name_of(model)}: its forward cannot be followed ({type(problem).__name__}: {problem})")


def _own_tensors(model: nn.Module, blocks: str) -> list[str]:
    """Return the names of the tensors that the modules around the decoder layers keep themselves."""
    return [
        f"{path}.{name}" if path else name
        for path in _around(blocks)
        for part in [model.get_submodule(path)]
        for name, value in {**vars(part), **part._parameters, **part._buffers}.items()
        if isinstance(value, Tensor)
    ]


def _around(blocks: str) -> list[str]:
    """Return the paths of the modules around the decoder layers, the innermost first."""
    return [*(blocks[:end] for end in range(len(blocks) - 1, 0, -1) if blocks[end] == "."), ""]


def _name_of(model: nn.Module) -> str:
    return type(model).__name__


def _path_of_blocks(model: Any) -> str:
    number: int | None = getattr(model.config, "num_hidden_layers", None)
    found: list[str] = [
        path for path, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) == number
    ]
    if not found:
        raise ConfigError(f"{_name_of(model)}: it has no list of {number or 'its'} decoder layers to cut into stages")
    return min(found, key=lambda path: path.count("."))


def _watch(model: Any, blocks: str, num_outputs: int) -> Walk:
    probes = [_Probe(block, num_outputs) for block in model.get_submodule(blocks)]
    others: dict[str, nn.Module] = {}
    clone_around(model, blocks, probes, lambda path, module: others.setdefault(path, copy.deepcopy(module)))
    calls: dict[str, set[int]] = {path: set() for path in others}
    for path, module in others.items():
        # How many decoder layers have run by then.
        module.register_forward_pre_hook(
            lambda *_, path=path: calls[path].add(sum(probe.returned is not None for probe in probes))
        )
    with FakeTensorMode() as mode:
        _make_empty(others.values(), "cpu", "cpu")
        shell = clone_around(model, blocks, probes, lambda path, _: others[path]).train()
        # More samples than outputs: a tensor in place of a tuple cannot be unpacked.
        logits = shell(input_ids=torch.zeros(_MAX_OUTPUTS + 1, 4, dtype=torch.int64)).logits
        _check(model, probes, others, logits)
    number, tables = len(probes), [path for path, at in calls.items() if _is_table(others[path], at)]
    for path, at in calls.items():
        if path not in tables and (any(0 < each < number for each in at) or len(at) > 1):
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
        num_outputs=num_outputs,
        alike=_described([probe.others for probe in probes]),
    )
    try:
        with mode:
            alone = _probed(walk, torch.empty(probes[0].hidden.shape, requires_grad=True), others)
    except Exception as error:
        raise ConfigError(
            f"{_name_of(model)}: what decoder layers get beside the hidden state cannot be computed without what comes "
            f"before them ({type(error).__name__}: {error})"
        ) from error
    for index, (probe, other) in enumerate(zip(probes, alone, strict=True)):
        for key, value in probe.others.items():
            found = [*tensors_in(other.others.get(key))]
            if any(each.requires_grad for each in found) or (not found and any(True for _ in tensors_in(value))):
                raise ConfigError(
                    f"{_name_of(model)}: decoder layer {index} gets {key!r}, which is computed from tokens"
                )
    return walk


def _make_empty(modules: Iterable[nn.Module], parameters: str | torch.device, buffers: str | torch.device) -> None:
    """Replace the parameters and buffers of modules by empty ones on these devices; what they share stays shared."""
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for part in (part for module in modules for part in module.modules()):
        for key, value in part._parameters.items():
            if value is not None:
                empty = torch.empty(value.shape, dtype=value.dtype, device=parameters)
                part._parameters[key] = made.setdefault(id(value), (value, nn.Parameter(empty, value.requires_grad)))[1]
        for key, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[key] = torch.empty(buffer.shape, dtype=buffer.dtype, device=buffers)


class _Passing(StandIn):
    """A stand-in whose output shows by its graph what is computed from it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call.given


def _described(given: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return for each decoder layer a text that is equal for those that get the same tensors and values."""
    numbers: dict[int, int] = {}

    def described(value: Any) -> object:
        tensors = [numbers.setdefault(id(each), len(numbers)) for each in tensors_in(value)]
        return value if isinstance(value, str | int | float | bool) else tensors

    return tuple(repr([(name, described(value)) for name, value in sorted(others.items())]) for others in given)


def _probed(
    walk: Walk,
    given: Tensor,
    tables: Mapping[str, nn.Module],
    *,
    loss: Callable[..., Tensor] | None = None,
    **fields: Any,
) -> list[_Probe]:
    """Run the forward of a decoder layer on an input, and return what all of them got.

    Args:
        tables: by path.
        loss: instead of the model's function.
    """
    probes = [_Probe(block, walk.num_outputs) for block in walk.model.get_submodule(walk.blocks)]
    call = Call()
    call.given = given

    def stand_in(path: str, module: nn.Module) -> Any:
        return tables[path] if path in walk.tables else _Passing(module, call)

    shell: Any = clone_around(walk.model, walk.blocks, probes, stand_in)
    if loss is not None:
        shell.loss_function = loss
    try:
        shell(inputs_embeds=given, **fields)
    except Exception:
        # Of any class: what comes after the decoder layers may not fit the stand-ins.
        if probes[-1].returned is None:
            raise
    return probes


def _with_masks(walk: Walk) -> Walk:
    """Return a walk that knows how masks separate documents whose positions begin again, if all of them do.

    Raises:
        ConfigError: masks let tokens see the ones after them.
    """
    name = _name_of(walk.model)
    given, positions = torch.zeros(1, 4, walk.model.config.hidden_size), torch.tensor([[0, 1, 0, 1]])
    tables = {path: walk.build(path) for path in walk.tables}

    def probes(*, makes_masks: bool = False, **fields: Any) -> list[_Probe]:
        with contextlib.suppress(Exception):
            # Of any class: not all models take these fields.
            if makes_masks:
                fields["attention_mask"] = masks(walk.model.config, given, positions)
            return _probed(walk, given, tables, **fields)
        return []

    padded = [mask[0, 0, 0] for p in probes(attention_mask=torch.tensor([[1, 1, 1, 0]])) for mask in _masks_in(p)]
    if any(_hides(first[3]) and not _hides(first[1]) for first in padded):
        raise ConfigError(
            f"{name}: tokens see the ones after them, so it cannot be trained on next tokens; change a setting of its "
            "configuration, such as is_decoder"
        )
    if "position_ids" not in inspect.signature(walk.model.forward).parameters:
        return replace(walk, mixes_documents=f"{name} takes no positions")
    before = [part for path in walk.before for part in walk.model.get_submodule(path).modules()]
    if any(hasattr(part, "create_position_ids_from_input_ids") for part in before):
        return replace(walk, mixes_documents=f"positions of {name} depend on its padding, and do not begin at 0")
    if any(isinstance(part, nn.Conv1d) for part in walk.model.get_submodule(walk.blocks).modules()):
        return replace(walk, mixes_documents=f"{name} has convolutions over tokens")
    for makes_masks in (False, True):
        found = [_masks_in(probe) for probe in probes(makes_masks=makes_masks, position_ids=positions)]
        if found and all(each and all(_hides(mask[0, 0, -2, 1]) for mask in each) for each in found):
            return replace(walk, makes_masks=makes_masks)
    return replace(walk, mixes_documents=f"decoder layers of {name} get no mask that separates documents")


def _masks_in(probe: _Probe) -> list[Tensor]:
    """Return the masks of four tokens that a decoder layer got."""
    found = [each for each in tensors_in(probe.others) if each.ndim == 4 and each.shape[-1] == 4]
    return [each.expand(-1, -1, 4, -1) for each in found if each.shape[-2] in (1, 4)]


def _with_loss(walk: Walk) -> Walk:
    """Return a walk that knows whether the loss of the model is the usual one."""
    seen = list[Any]()

    def loss(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(kwargs)
        return torch.zeros(())

    given, labels = torch.zeros(1, 4, walk.model.config.hidden_size), torch.zeros(1, 4, dtype=torch.int64)
    with contextlib.suppress(Exception):
        # Of any class: as of those above.
        _probed(walk, given, {path: walk.build(path) for path in walk.tables}, loss=loss, labels=labels)
    return replace(walk, shifts_labels=bool(seen))


def _hides(value: Tensor) -> bool:
    """Return whether an element of a mask hides a token: False, or a large negative number that is added."""
    return not bool(value) if value.dtype == torch.bool else float(value) < -1.0


def _is_table(module: nn.Module, calls: set[int]) -> bool:
    """Return whether all parts are to have a module, which has no parameters, and runs at these decoder layers."""
    return not any(True for _ in module.parameters()) and (len(calls) > 1 or any(True for _ in module.buffers()))


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
            if any(each.requires_grad for each in tensors_in(value)):
                raise ConfigError(f"{name}: decoder layer {number} gets {key!r}, which is computed from other layers")
        before = probe.returned
    parameters = {id(each) for module in others.values() for each in module.parameters()}
    if any(leaf is not before and id(leaf) not in parameters for leaf in leaves_of_graph([logits])):
        raise ConfigError(f"{name}: its head gets more than the output of the last decoder layer")
