"""The outputs of a job's layers, found by running them, and what a forward may not do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch

from chameleon_ft.data.order import SampleOrder, read_sample
from chameleon_ft.data.samples import load_micro_batch
from chameleon_ft.errors import ConfigError
from chameleon_ft.job import BoundarySpec
from chameleon_ft.keys import generator_lock
from chameleon_ft.models.build import build_layer, build_on_meta, seed_forward
from chameleon_ft.models.precision import cast_layer
from chameleon_ft.models.randomness import OtherGenerators

if TYPE_CHECKING:
    from torch import nn

    from chameleon_ft.job import Job

__all__ = ["boundary_specs"]

_CPU, _META = torch.device("cpu"), torch.device("meta")
_OF_EVERY_MODULE: Final = frozenset(vars(torch.nn.Module()))
_ROUNDING: Final = 1e-3  # relative, at least; some kernels of accelerators sum in any order


def boundary_specs(
    job: Job, micro_batch_size: int, *, device: torch.device = _CPU, seed: int = 0
) -> tuple[BoundarySpec, ...]:
    """Return the output of each layer for a micro-batch of `micro_batch_size` samples, first layer to last.

    It is `job.boundaries` if set, with bfloat16 for float32 under bf16, and otherwise found by running one micro-batch
    through the layers on `device`, as a worker does. Only one layer is in memory at a time, and layers with the same
    factory and the same kind of input run once. The meta device computes nothing, but does not see what depends on the
    device or on values, such as autocast.

    Raises:
        ConfigError: the dataset does not hold pairs of tensors of one shape; or the named layer cannot be built or run,
            does not return one tensor, or depends on more than its input, its parameters and torch's generator.
    """
    inputs = _first_inputs(job, micro_batch_size, seed)
    if job.boundaries is not None:
        stated = tuple(job.boundaries(micro_batch_size))
        if not all(isinstance(each, BoundarySpec) for each in stated):
            raise ConfigError("`boundaries` returns a list of BoundarySpec, one for the output of each layer")
        if len(stated) != job.num_layers:
            raise ConfigError(f"`boundaries` gives {len(stated)} shapes for {job.num_layers} layers: give one for each")
        return tuple(_cast(spec, job) for spec in stated)
    boundary = inputs.to(device)
    specs: list[BoundarySpec] = []
    outputs: dict[tuple[int, BoundarySpec], torch.Tensor] = {}  # the blocks of a model mostly share one factory
    for layer, factory in enumerate(job.layers):
        key = (id(factory), BoundarySpec.of(boundary))
        if key not in outputs:
            outputs[key] = _output(job, layer, boundary, seed=seed)
        boundary = outputs[key]
        specs.append(BoundarySpec.of(boundary))
    return tuple(specs)


def _cast(spec: BoundarySpec, job: Job) -> BoundarySpec:
    is_cast = job.precision.is_lower and spec.dtype == torch.float32
    return BoundarySpec(spec.shape, torch.bfloat16) if is_cast else spec


def _first_inputs(job: Job, micro_batch_size: int, seed: int) -> torch.Tensor:
    order = SampleOrder(len(job.dataset), seed)
    sample: Any = read_sample(job.dataset, order.ids(0, 1)[0], seed=seed)  # a user's dataset may hold anything
    match sample:
        case (torch.Tensor(), torch.Tensor()):
            pass
        case _:
            message = "the dataset's samples must be pairs of tensors: let __getitem__(i) return (input, target)"
            raise ConfigError(message)
    try:
        inputs, _ = load_micro_batch(job.dataset, order, 0, micro_batch_size)
    except RuntimeError as error:
        raise ConfigError(
            f"the dataset's samples cannot be stacked to a micro-batch ({error}); let __getitem__(i) return tensors of "
            "one shape for all i, for example by padding"
        ) from error
    return inputs


def _output(job: Job, layer: int, boundary: torch.Tensor, *, seed: int) -> torch.Tensor:
    """Build a layer, and run it with gradients, as a worker does; return its output without its graph."""
    device = boundary.device
    module = build_on_meta(job, layer) if device == _META else _build_alike(job, layer, seed).to(device).train()
    cast_layer(module, job.precision, is_first=layer == 0)
    if layer:
        boundary = boundary.requires_grad_(boundary.is_floating_point() or boundary.is_complex())
    boundary = boundary.clone()  # not a leaf, so that a layer that changes it in place runs, and is refused below
    buffers = {name: (buffer, buffer._version) for name, buffer in _persistent_buffers(module)}
    generators, state = OtherGenerators(), _state_of(module)
    name = f"layer {layer} ({type(module).__name__})"
    output = _run(module, boundary, name, layer=layer, seed=seed)
    if used := generators.used_since():
        raise ConfigError(
            f"{name} draws numbers from `{used}` in its forward, which differ between workers; draw them from torch, "
            "whose generator is seeded before each run of a layer"
        )
    if boundary._version:
        raise ConfigError(
            f"{name} changes its input in place, which torch refuses on a worker whose layers begin there, and which a "
            "layer that is run again would find changed; return a new tensor, for example by inplace=False or x = x + y"
        )
    for key, buffer in _persistent_buffers(module):
        old, version = buffers.get(key, (None, 0))
        if buffer.is_floating_point() and (buffer is not old or buffer._version != version):
            raise ConfigError(
                f"{name} changes its buffer {key!r} in its forward, which would come out differently on each worker "
                "that holds it; compute it from the input or, if no output depends on it, register it with "
                "persistent=False"
            )
    if not isinstance(output, torch.Tensor):
        raise ConfigError(
            f"{name} returned {type(output).__name__}: a layer returns one tensor; pack several into one, or put both "
            "users of them into the same layer"
        )
    output = output.detach()  # and without its graph, while the layer may run again
    changed = sorted(key for key, value in _state_of(module).items() if state.get(key, ()) != value)
    if changed and device != _META and not _is_close(output, _run(module, boundary, name, layer=layer, seed=seed)):
        raise ConfigError(
            f"{name} returns something else for the same input when it is run again, because its forward changes "
            f"{changed[0]!r}, of which each worker would have another value; let it depend on nothing but its input, "
            "its parameters and torch's generator"
        )
    return output


def _run(module: nn.Module, boundary: torch.Tensor, name: str, *, layer: int, seed: int) -> Any:
    device = boundary.device
    try:
        # A tensor that forward creates without naming a device would otherwise not fit an input on the meta device.
        with generator_lock, torch.random.fork_rng(devices=[]), device if device == _META else nullcontext():
            seed_forward(seed, step=0, micro_batch=0, layer=layer)
            return module(boundary)
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be run on an input of shape {tuple(boundary.shape)} and {boundary.dtype} on the device "
            f"{device} ({type(error).__name__}: {error}); check that it takes what the layer before it returns, or set "
            "the job's `boundaries`"
        ) from error


def _build_alike(job: Job, layer: int, seed: int) -> nn.Module:
    """Build a layer. Raises ConfigError if it gets other values each time, from a generator that is not torch's."""
    generators = OtherGenerators()
    module = build_layer(job, layer, seed)
    if used := generators.used_since():
        state, again = module.state_dict(), build_layer(job, layer, seed).state_dict()
        if any(isinstance(value, torch.Tensor) and not torch.equal(value, again[key]) for key, value in state.items()):
            raise ConfigError(
                f"the factory of layer {layer} draws numbers from `{used}`, so that each worker would begin with other "
                "weights; draw them from torch, whose generator is seeded before a layer is built"
            )
    return module


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    persistent = module.state_dict(keep_vars=True)
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in persistent)


def _state_of(module: nn.Module) -> dict[str, object]:
    """Return a value for each buffer and each attribute of a layer, by name, that differs once a forward changes it."""
    found: dict[str, object] = {}
    for path, part in module.named_modules():
        own = {name: value for name, value in vars(part).items() if name not in _OF_EVERY_MODULE}
        for name, value in {**own, **part._buffers}.items():
            found[f"{path}.{name}" if path else name] = _mark(value)
    return found


def _mark(value: object) -> object:
    match value:
        case torch.Tensor():
            return id(value), value._version
        case int() | float() | complex() | str():
            return value
        case list() | dict() | set():
            return id(value), len(value)
    return id(value)


def _is_close(output: torch.Tensor, again: Any) -> bool:
    """Return whether two outputs are equal but for rounding."""
    if not isinstance(again, torch.Tensor) or again.shape != output.shape or again.dtype != output.dtype:
        return False
    if not (output.is_floating_point() or output.is_complex()):
        return torch.equal(output, again)
    largest = float(output.abs().nan_to_num().max()) if output.numel() else 0.0
    rounding = max(_ROUNDING, 2 * torch.finfo(output.dtype).eps)
    return torch.allclose(output, again, rtol=rounding, atol=rounding * largest, equal_nan=True)
