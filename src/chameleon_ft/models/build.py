"""Building a job's layers, seeding their runs, and finding the shapes that cross between them."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from chameleon_ft.errors import ConfigError
from chameleon_ft.job import BoundarySpec
from chameleon_ft.keys import init_key, step_key

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

    from chameleon_ft.job import Job

__all__ = [
    "blank_layer",
    "boundary_specs",
    "build_layer",
    "param_bytes",
    "seed_forward",
    "state_bytes",
    "tie",
    "tied_bytes",
]


def build_layer(job: Job, layer: int, seed: int) -> nn.Module:
    """Build layer `layer` on the CPU; every worker that builds it gets the same weights, on whatever device it trains.

    Torch's CPU generator is left as it was found.
    """
    module = _drawn(job, layer, seed)
    for copies in job.tied:
        (first, first_name), *others = copies
        for name in (name for other, name in others if other == layer):
            with torch.no_grad():
                module.get_parameter(name).copy_(_drawn(job, first, seed).get_parameter(first_name))
    return module


def tie(job: Job, layers: Sequence[nn.Module]) -> None:
    """Let the layers of a whole model, first to last, share what they have copies of: the same parameter objects."""
    for (first, first_name), *others in job.tied:
        for layer, name in others:
            path, _, leaf = name.rpartition(".")
            setattr(layers[layer].get_submodule(path), leaf, layers[first].get_parameter(first_name))


def tied_bytes(job: Job) -> dict[tuple[int, ...], int]:
    """The bytes of what layers share, by the layers, ascending; nothing is allocated.

    Raises:
        ConfigError: a tied parameter does not exist, or is not of the shape and type of its first copy.
    """
    found: dict[tuple[int, ...], int] = {}
    for copies in job.tied:
        parameters = [_named_on_meta(job, layer, name) for layer, name in copies]
        if len({(p.shape, p.dtype, p.requires_grad) for p in parameters}) > 1:
            raise ConfigError(f"`tied` has {copies}: these differ in shape, type or in whether they are trained")
        layers = tuple(sorted(layer for layer, _ in copies))
        found[layers] = found.get(layers, 0) + parameters[0].nbytes
    return found


def blank_layer(job: Job, layer: int, seed: int) -> nn.Module:
    """Build layer `layer` on the CPU for a state that comes from elsewhere: its parameters may hold anything.

    Drawing them is what takes the time. Where anything but the parameters is drawn, or made of them, they are drawn.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(init_key(seed, layer))
        before = torch.default_generator.get_state()
        with _NothingDrawn():  # type: ignore[no-untyped-call]
            module = job.layers[layer]()
        if torch.equal(before, torch.default_generator.get_state()) and not _has_blank_buffers(module):
            return module
    return build_layer(job, layer, seed)


def seed_forward(seed: int, *, step: int, micro_batch: int, layer: int, device: torch.device | None = None) -> None:
    """Seed the generator that the forward of `layer` on `micro_batch` of `step` draws from; call it just before.

    The CPU's generator, and with `device` that device's as well. A mask is thus the same on any worker of one kind of
    device; between kinds it differs, as their generators do.
    """
    key = step_key(seed, step=step, micro_batch=micro_batch, layer=layer)
    # Not torch.manual_seed: it looks for every kind of accelerator, which takes longer than a small layer's forward.
    torch.default_generator.manual_seed(key)
    if device is not None and device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(key)


def boundary_specs(job: Job, micro_batch_size: int) -> tuple[BoundarySpec, ...]:
    """What leaves each layer for one micro-batch of `micro_batch_size` samples, first layer to last.

    Taken from the job where it states it, otherwise found by running the layers on the meta device: nothing is
    computed and no parameter is allocated.

    Raises:
        ConfigError: the dataset does not hold pairs of tensors; or a layer cannot be built or run on the meta device,
            or does not return one tensor: it is named.
    """
    first_input = _first_input(job)
    if job.boundaries is not None:
        stated = tuple(job.boundaries(micro_batch_size))
        if len(stated) != job.num_layers:
            raise ConfigError(f"`boundaries` gives {len(stated)} shapes for {job.num_layers} layers: give one for each")
        return stated
    spec = BoundarySpec((micro_batch_size, *first_input.shape), first_input.dtype)
    specs: list[BoundarySpec] = []
    # Running on the meta device costs milliseconds a layer, and the blocks of a model mostly share one factory.
    known: dict[tuple[int, BoundarySpec], BoundarySpec] = {}
    for layer, factory in enumerate(job.layers):
        key = (id(factory), spec)
        if key not in known:
            known[key] = _output_spec(_build_on_meta(job, layer), spec, layer)
        spec = known[key]
        specs.append(spec)
    return tuple(specs)


def param_bytes(job: Job) -> tuple[int, ...]:
    """The bytes of each layer's parameters, first layer to last; nothing is allocated.

    Raises:
        ConfigError: a layer cannot be built on the meta device; the message names it.
    """
    known: dict[int, int] = {}
    for layer, factory in enumerate(job.layers):
        if id(factory) not in known:
            known[id(factory)] = sum(parameter.nbytes for parameter in _build_on_meta(job, layer).parameters())
    return tuple(known[id(factory)] for factory in job.layers)


def state_bytes(job: Job) -> tuple[int, ...]:
    """The bytes of each layer's state once a step has been made, first layer to last; nothing is allocated.

    That is what moves with a layer: parameters, persistent buffers, and what the optimizer keeps of its parameters. It
    makes a step on the meta device for that. One that cannot counts with what it had set up until then, which is all of
    it for most; what comes later is left out.

    Raises:
        ConfigError: a layer cannot be built on the meta device; the message names it.
    """
    known: dict[int, int] = {}
    for layer, factory in enumerate(job.layers):
        if id(factory) not in known:
            module = _build_on_meta(job, layer)
            known[id(factory)] = _tensor_bytes(module.state_dict()) + _optimizer_bytes(job, module)
    return tuple(known[id(factory)] for factory in job.layers)


def _optimizer_bytes(job: Job, module: nn.Module) -> int:
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not parameters:
        return 0
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    state: Mapping[Any, Mapping[str, Any]] = {}
    # Whatever a user's optimizer cannot do here, it may well be able to do on a device.
    with contextlib.suppress(Exception):
        optimizer = job.optimizer(parameters)
        state = optimizer.state
        for group in optimizer.param_groups:
            # Kernels that the meta device does not have; what is kept is the same without them.
            group.update({name: False for name in ("fused", "foreach") if name in group})
        optimizer.step()
    return sum(_tensor_bytes(own) for own in state.values())


def _tensor_bytes(values: Mapping[str, Any]) -> int:
    return sum(value.nbytes for value in values.values() if isinstance(value, torch.Tensor))


class _NothingDrawn(TorchDispatchMode):
    """Parameters that would be filled with random numbers are marked as blank instead."""

    _FILLS = frozenset({torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._FILLS and isinstance(args[0], torch.nn.Parameter) and args[0].is_floating_point():
            return args[0].fill_(math.nan)
        return func(*args, **(kwargs or {}))


def _has_blank_buffers(module: nn.Module) -> bool:
    """Whether a buffer that is no part of the state was made of a parameter that is blank."""
    return any(
        buffer is not None and buffer.is_floating_point() and bool(buffer.isnan().any())
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if name in part._non_persistent_buffers_set
    )


def _drawn(job: Job, layer: int, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(init_key(seed, layer))
        return job.layers[layer]()


def _named_on_meta(job: Job, layer: int, name: str) -> nn.Parameter:
    try:
        return _build_on_meta(job, layer).get_parameter(name)
    except AttributeError as error:
        raise ConfigError(f"`tied` names the parameter {name!r} of layer {layer}: {error}") from None


def _first_input(job: Job) -> Tensor:
    # A user's data set may hold anything, whatever its annotation says.
    sample: Any = job.dataset[0]
    match sample:
        case (torch.Tensor() as first_input, torch.Tensor()):
            return first_input
    raise ConfigError("the dataset's samples must be pairs of tensors: let __getitem__(i) return (input, target)")


def _build_on_meta(job: Job, layer: int) -> nn.Module:
    try:
        with torch.device("meta"):
            module = job.layers[layer]()
    except Exception as error:
        raise ConfigError(
            f"layer {layer} cannot be built on torch's meta device ({type(error).__name__}: {error}); "
            "see that its factory works under `with torch.device('meta')`, or set the job's `boundaries`"
        ) from error
    for part in module.modules():
        if getattr(part, "track_running_stats", False):
            raise ConfigError(
                f"layer {layer} has a {type(part).__name__} that keeps running statistics, which would come out "
                "differently on each worker that holds it; take GroupNorm or LayerNorm, or track_running_stats=False"
            )
    return module


def _output_spec(module: nn.Module, spec: BoundarySpec, layer: int) -> BoundarySpec:
    # Without the meta device as default, a tensor that forward makes on the CPU would clash with its input.
    with torch.no_grad(), torch.device("meta"):
        try:
            output = module(torch.empty(spec.shape, dtype=spec.dtype))
        except Exception as error:
            raise ConfigError(
                f"layer {layer} ({type(module).__name__}) cannot be run on an input of shape {spec.shape} and "
                f"{spec.dtype} on torch's meta device ({type(error).__name__}: {error}); check that it takes what "
                "the layer before it gives, or set the job's `boundaries`"
            ) from error
    if not isinstance(output, torch.Tensor):
        raise ConfigError(
            f"layer {layer} ({type(module).__name__}) returned {type(output).__name__}: a layer returns one tensor; "
            "pack several into one, or put both users of them into the same layer"
        )
    return BoundarySpec(tuple(output.shape), output.dtype)
