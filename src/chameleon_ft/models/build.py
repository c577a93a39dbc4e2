"""Building a job's layers, seeding their forwards, finding the sizes of their states, and noticing changes.

Changes are noticed by digests of all that a layer keeps beside its state, or a loss, and by the global random
generators beside torch's, which no worker seeds.
"""

from __future__ import annotations

import io
import math
import pickle
import random
import sys
from collections.abc import Callable, Mapping
from hashlib import blake2b
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import TorchDispatchMode

from chameleon_ft.errors import ConfigError
from chameleon_ft.job.stored import frozen_in, names_read, read_weights
from chameleon_ft.keys import generator_lock, init_key, step_key
from chameleon_ft.models.precision import cast_layer
from chameleon_ft.weights import frozen_names

if TYPE_CHECKING:
    from chameleon_ft.job.job import Job


class OtherGenerators:
    """The states of Python's and of NumPy's global generator, to see later whether they have been used."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = _numpy_state()

    def used_since(self) -> str:
        """Return the name of a generator whose state has changed, empty if none has."""
        if random.getstate() != self._python:
            return "random"
        return "numpy.random" if self._numpy is not None and _numpy_state() != self._numpy else ""


def _numpy_state() -> tuple[Any, ...] | None:
    """Return the state of NumPy's global generator, None if NumPy is not loaded."""
    if (numpy := sys.modules.get("numpy")) is None:
        return None
    name, keys, *rest = numpy.random.get_state()
    return name, keys.tobytes(), *rest


_OF_EVERY_MODULE: Final = frozenset(vars(nn.Module()))
_WITHOUT_VALUE: Final = (type, ModuleType, BuiltinFunctionType)


def changed(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Return the names under which two mappings differ, in order."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def digests_beside_state(module: nn.Module) -> dict[str, bytes]:
    """Digest what a module keeps outside its state, by name: attributes, and buffers that are not persistent.

    An attribute may hold anything, such as lists of tensors or other modules. Those of its class count, too, and so do
    global variables that its forward names.
    """
    state = {id(value): name for name, value in state_tensors(module).items()}
    own = {**state, **{id(part): f"module {name}" for name, part in module.named_modules()}}
    found: dict[str, bytes] = {}
    for path, part in module.named_modules():
        # `torch.compile` changes its own at its first run.
        if type(part).__module__.startswith("torch._dynamo"):
            continue
        forward: Any = type(part).forward
        names = forward.__code__.co_names if isinstance(forward, FunctionType) else ()
        of_class = {name: value for name, value in vars(type(part)).items() if not name.startswith("__")}
        values = {**{name: forward.__globals__.get(name) for name in names}, **of_class, **vars(part), **part._buffers}
        for name, value in values.items():
            if name not in _OF_EVERY_MODULE and id(value) not in state:
                found[f"{path}.{name}" if path else name] = digest(value, own)
    return found


def marks_of_state(module: nn.Module) -> dict[str, object]:
    """Return a value for each parameter and persistent buffer, by name, that differs once a forward changes it."""
    return {
        name: (id(value), _version(value), _sum(value) if isinstance(value, nn.Parameter) else content_of(value))
        for name, value in state_tensors(module).items()
    }


def digest(value: object, own: Mapping[int, str] | None = None) -> bytes:
    """Return a digest of a value with all that it refers to; `own`: names that stand for objects, by their ids."""
    pickler = _Digester(own or {})
    try:
        pickler.dump(value)
    except Exception:  # noqa: BLE001 - of any class: it cannot be pickled
        return repr(type(value)).encode()
    return blake2b(pickler.written.getbuffer()).digest()


class _Digester(pickle.Pickler):
    """Writes functions as what they close over, and objects that cannot be pickled as their type."""

    def __init__(self, own: Mapping[int, str]) -> None:
        self.written = io.BytesIO()
        self._own = own
        super().__init__(self.written, pickle.HIGHEST_PROTOCOL)

    def persistent_id(self, obj: object) -> object:
        if isinstance(obj, Tensor) and id(obj) not in self._own:
            return str(obj.dtype), tuple(obj.shape), _version(obj), content_of(obj)
        return obj.get_state().numpy().tobytes() if isinstance(obj, torch.Generator) else self._own.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        if obj is _token:
            return NotImplemented
        if isinstance(obj, FunctionType):
            closure = [cell.cell_contents for cell in obj.__closure__ or ()]
            return _token, (obj.__qualname__, obj.__defaults__, obj.__kwdefaults__, closure)
        if isinstance(obj, _WITHOUT_VALUE) or type(obj).__module__.startswith("torch._dynamo"):
            return _token, (type(obj).__qualname__, getattr(obj, "__qualname__", ""))
        try:
            reduced = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        except Exception:  # noqa: BLE001 - as above
            return _token, (type(obj).__qualname__,)
        return (_token, (reduced,)) if isinstance(reduced, str) else reduced


def _token(*_: object) -> None:
    """Stand for an object in a digest."""


def state_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and the persistent buffers of a module, by name."""
    entries = {**dict(module.named_parameters()), **module.state_dict(keep_vars=True)}
    return {name: each for name, each in entries.items() if isinstance(each, Tensor)}


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _sum(tensor: Tensor) -> str:
    if tensor.is_meta or tensor.is_quantized or tensor.layout is not torch.strided:
        return ""
    return str(tensor.detach().sum(dtype=torch.complex64 if tensor.is_complex() else torch.float32).item())


def content_of(tensor: Tensor) -> bytes:
    """Return a digest of the values of a tensor, wherever it is."""
    if tensor.is_meta or tensor.is_quantized:
        return b"" if tensor.is_meta else repr(tensor).encode()
    dense = tensor.detach().to_dense().resolve_conj()
    flat = (torch.view_as_real(dense) if dense.is_complex() else dense).cpu().contiguous().reshape(-1)
    return blake2b(flat.view(torch.uint8).numpy().data).digest() if flat.numel() else b""


# --- layers and seeds ------------------------------------------------------------------------------------------------


def build_layer(job: Job, layer: int, seed: int) -> nn.Module:
    """Build layer `layer` on the CPU, with the same weights in every process; torch's generator keeps its state.

    Its parameters are those of the factory, whatever the precision; see `chameleon_ft.models.precision`.
    """
    module = _initialize(job, layer, seed)
    for (first, first_name), *copies in job.tied:
        for name in (name for other, name in copies if other == layer):
            with torch.no_grad():
                module.get_parameter(name).copy_(_initialize(job, first, seed).get_parameter(first_name))
    return module


def initial_layer(job: Job, layer: int, seed: int) -> nn.Module:
    """Build layer `layer` on the CPU as a run begins with it: read from the job's files of weights, or initialised.

    Parameters that are all read from files are not initialised before. Raises ConfigError if the files cannot be read.
    """
    if job.weights is None or job.weights.path is None:
        return build_layer(job, layer, seed)
    parameters = [name for name, _ in build_on_meta(job, layer).named_parameters()]
    is_whole = len(names_read(job, layer, parameters)) == len(parameters)
    module = blank_layer(job, layer, seed) if is_whole else build_layer(job, layer, seed)
    read_weights(job, layer, module)
    return module


def blank_layer(job: Job, layer: int, seed: int) -> nn.Module:
    """Build layer `layer` on the CPU to load a state into: its parameters may hold anything, all else is as built.

    Initialising parameters takes most of the time of `build_layer`. They are initialised only where the rest of the
    layer depends on them; see `differs_if_blank`. Elsewhere the factory uses nothing that threads share, so other
    threads can run forwards meanwhile.
    """
    known = job.built_in_full
    is_built = differs_if_blank(job, layer, seed) if known is None else layer in known
    if is_built:
        return build_layer(job, layer, seed)
    with _SkipInitialization():
        return job.layers[layer]()


def differs_if_blank(job: Job, layer: int, seed: int) -> bool:
    """Return whether a layer without initialised parameters differs from one with them in more than its state.

    A factory may compute masks, tables or attributes from its initial weights. One that draws other random numbers, or
    changes torch's default type meanwhile, counts, too, because all threads share the generators and the default type.
    """
    with generator_lock, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(init_key(seed, layer))
        before, others, skipping = torch.default_generator.get_state(), OtherGenerators(), _SkipInitialization()
        try:
            with skipping:
                module = job.layers[layer]()
            blank = digests_beside_state(module)
        except Exception:  # noqa: BLE001 - the factory cannot bear weights that are not a number
            return True
        draws = not torch.equal(before, torch.default_generator.get_state()) or bool(others.used_since())
    del module
    return draws or skipping.changes_default or blank != digests_beside_state(_initialize(job, layer, seed))


def layers_built_in_full(job: Job, seed: int) -> tuple[int, ...]:
    """Return the layers that `differs_if_blank` names, of which those with the same factory are examined once."""
    differs = {id(factory): layer for layer, factory in reversed([*enumerate(job.layers)])}
    found = {factory: differs_if_blank(job, layer, seed) for factory, layer in differs.items()}
    return tuple(layer for layer, factory in enumerate(job.layers) if found[id(factory)])


class _SkipInitialization(TorchDispatchMode):
    """Fills parameters with NaN instead of random numbers, in the thread that enters it.

    Attributes:
        changes_default: Whether torch's default type was another one while a tensor was made.
    """

    _FILLS = frozenset({torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default})

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._default = torch.get_default_dtype()
        self.changes_default = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.changes_default |= torch.get_default_dtype() != self._default
        if func in self._FILLS and isinstance(args[0], torch.nn.Parameter) and args[0].is_floating_point():
            return args[0].fill_(math.nan)
        return func(*args, **(kwargs or {}))


def _initialize(job: Job, layer: int, seed: int) -> nn.Module:
    with generator_lock, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(init_key(seed, layer))
        return _require_module(job.layers[layer](), layer)


def _require_module(built: object, layer: int) -> nn.Module:
    if not isinstance(built, torch.nn.Module):
        raise ConfigError(f"the factory of layer {layer} returned {type(built).__name__}: it returns a torch.nn.Module")
    return built


def seed_forward(seed: int, *, step: int, micro_batch: int, layer: int, device: torch.device | None = None) -> None:
    """Seed the CPU's generator, and that of `device`, immediately before the forward of `layer` on `micro_batch`.

    A dropout mask is thus the same on any worker of one kind of device; between kinds it differs, as their generators
    do. Hold `generator_lock` until the forward has ended, if other threads build layers.
    """
    key = step_key(seed, step=step, micro_batch=micro_batch, layer=layer)
    # Not torch.manual_seed: it looks for every kind of accelerator, which takes longer than a small layer's forward.
    torch.default_generator.manual_seed(key)
    accelerator = torch.accelerator.current_accelerator()
    if device is not None and accelerator is not None and device.type == accelerator.type:
        module = torch.get_device_module(device)
        with module.device(device):
            module.manual_seed(key)


# --- sizes, found on the meta device, which computes and allocates nothing -----------------------------------------

_META = torch.device("meta")


def param_bytes(job: Job) -> tuple[int, ...]:
    """Return the bytes of each layer's parameters, first layer to last.

    Raises:
        ConfigError: the named layer cannot be built on the meta device.
    """
    return measure_layers(
        job, lambda layer, module, masters: sum(parameter.nbytes for parameter in module.parameters())
    )


def gradient_bytes(job: Job) -> tuple[int, ...]:
    """Return the bytes of each layer's gradients, first layer to last. Raises as `param_bytes`."""
    return measure_layers(job, lambda layer, module, masters: sum(map(_gradient_bytes, module.parameters())))


def frozen_bytes(job: Job) -> tuple[int, ...]:
    """Return the bytes of each layer's parameters that are read again and not kept, as `frozen_in` says.

    Raises as `param_bytes`, or ConfigError if the job's files cannot be read.
    """
    found = []
    for layer in range(job.num_layers):
        module, _ = _cast_on_meta(job, layer)
        names = frozen_names(frozen_in(job, layer, module))
        found.append(sum(module.get_parameter(name).nbytes for name in names))
    return tuple(found)


def tied_bytes(job: Job) -> dict[tuple[int, ...], int]:
    """Return the bytes of the gradients of the parameters that layers share, by the layers, ascending.

    Raises:
        ConfigError: a tied parameter does not exist, or copies differ in shape or type.
    """
    found: dict[tuple[int, ...], int] = {}
    for copies in job.tied:
        parameters = []
        for layer, name in copies:
            try:
                parameters.append(_cast_on_meta(job, layer)[0].get_parameter(name))
            except AttributeError as error:
                raise ConfigError(f"`tied` names the parameter {name!r} of layer {layer}: {error}") from None
        if len({(p.shape, p.dtype, p.requires_grad) for p in parameters}) > 1:
            raise ConfigError(f"`tied` has {copies}: these differ in shape, type or in whether they are trained")
        layers = tuple(sorted(layer for layer, _ in copies))
        found[layers] = found.get(layers, 0) + _gradient_bytes(parameters[0])
    return found


def measure_layers(job: Job, measure: Callable[[int, nn.Module, Mapping[str, nn.Parameter]], int]) -> tuple[int, ...]:
    """Measure each layer and its masters on the meta device, and layers with the same factory only once."""
    sizes: dict[int, int] = {}
    for layer, factory in enumerate(job.layers):
        if id(factory) not in sizes:
            sizes[id(factory)] = measure(layer, *_cast_on_meta(job, layer))
    return tuple(sizes[id(factory)] for factory in job.layers)


def _gradient_bytes(parameter: nn.Parameter) -> int:
    return parameter.numel() * (parameter.grad_dtype or parameter.dtype).itemsize if parameter.requires_grad else 0


def tensor_bytes(values: Mapping[str, Any]) -> int:
    """Return the bytes of the tensors among some values."""
    return sum(value.nbytes for value in values.values() if isinstance(value, torch.Tensor))


def _cast_on_meta(job: Job, layer: int) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    module = build_on_meta(job, layer)
    return module, cast_layer(module, job.precision, is_first=layer == 0)


def build_on_meta(job: Job, layer: int) -> nn.Module:
    """Build a layer on the meta device. Raises ConfigError if it cannot be built there, or not be trained."""
    try:
        with _META:
            built = job.layers[layer]()
    except Exception as error:
        raise ConfigError(
            f"layer {layer} cannot be built on torch's meta device ({type(error).__name__}: {error}); "
            "make sure that its factory works under `with torch.device('meta')`"
        ) from error
    module = _require_module(built, layer)
    for part in module.modules():
        if getattr(part, "track_running_stats", False):
            raise ConfigError(
                f"layer {layer} has a {type(part).__name__} that keeps running statistics, which would come out "
                "differently on each worker that holds it; take GroupNorm or LayerNorm, or track_running_stats=False"
            )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(
                f"layer {layer} has the parameter {name!r} without a size, which is known only after a forward; build "
                "it with its size, such as nn.Linear instead of nn.LazyLinear"
            )
        if parameter._post_accumulate_grad_hooks:
            raise ConfigError(
                f"layer {layer} has a hook on the sum of the gradients of {name!r}, of which each worker has a part; "
                "take register_hook, which sees the gradient of each micro-batch, or clip by the job's `clip_norm`"
            )
        if parameter.requires_grad and parameter.is_complex():
            raise ConfigError(
                f"layer {layer} trains the complex parameter {name!r}, which workers cannot share; train its real and "
                "imaginary parts as one real parameter, and join them in forward by torch.view_as_complex"
            )
    return module
