"""A pretended accelerator, `npu`, for runs without one: put `tests/pretended` on PYTHONPATH.

Its tensors are computed on the CPU, but torch takes them for those of another device: an operation that mixes them with
tensors of the host fails, as on a real one, and so does `numpy()`. It has a single device.

An operation is enqueued on the current stream, and returns before it has run (`torch_npu.streams`): its results have
their memory at once, by the shapes that torch's meta device tells, and garbage in it until the stream has passed the
operation. These wait for the current stream, as on a real one:

- whatever needs a value or a shape that depends on values: `item()`, `nonzero()`, `equal()`;
- a copy between host and device, unless it is `non_blocking` and the memory of the host is pinned:
  https://docs.nvidia.com/cuda/cuda-runtime-api/api-sync-behavior.html

Unlike on a real one, so do operations that draw random numbers, because they draw from the generator of the host. It
shows nothing about times or the size of memory. Autocast changes no types, and an exception in a backward ends the
process: torch's guard of streams, for a device in Python, cannot be left by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from enum import Enum, auto
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import backend_registration
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map

from torch_npu import streams

_NPU = "npu"
_ELSEWHERE = 1 << 60  # so that its addresses are none of the host
_BYTES: Final = 1 << 40  # of memory

aten = torch.ops.aten


class _Module:
    """The module that becomes `torch.npu`."""

    Stream = streams.Stream
    Event = streams.Event
    current_stream = staticmethod(streams.current_stream)
    default_stream = staticmethod(streams.default_stream)
    synchronize = staticmethod(streams.synchronize)
    default_generators = (torch.default_generator,)

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def is_initialized() -> bool:
        return streams.DEVICE.is_used

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return streams.DEVICE.is_bad_fork

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def set_device(device: object) -> None: ...

    @staticmethod
    def get_device_name(device: object = None) -> str:
        return "pretended NPU"

    @staticmethod
    def manual_seed(seed: int) -> None: ...

    @staticmethod
    def manual_seed_all(seed: int) -> None: ...

    @staticmethod
    def get_rng_state(device: object = None) -> Tensor:
        return torch.default_generator.get_state()

    @staticmethod
    def set_rng_state(state: Tensor, device: object = None) -> None:
        torch.default_generator.set_state(state)

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @staticmethod
    def mem_get_info(device: object = None) -> tuple[int, int]:
        return _BYTES, _BYTES

    @staticmethod
    def stream(stream: torch.Stream) -> torch.Stream:
        return stream

    @staticmethod
    def device(device: object) -> nullcontext[None]:
        return nullcontext()


class OnDevice(Tensor):
    """A tensor of the device, which wraps one of the host: the memory that the streams work on."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Self:
        made = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=torch.device(_NPU, 0),
        )
        made.held = held
        assert isinstance(made, cls)
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"{self.cpu()} on {_NPU}"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @property
    def data(self) -> Tensor:
        # It shares the memory, and not the count of changes in place.
        return OnDevice(self.held)

    @data.setter
    def data(self, value: Tensor) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.held = _unwrapped(value)

    def data_ptr(self) -> int:
        return self.held.data_ptr() + _ELSEWHERE

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()  # which names the memory

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _dispatch(func, args, kwargs or {})


class _How(Enum):
    """How an operation runs."""

    COPY = auto()
    MOVE = auto()
    IGNORED = auto()
    VIEW = auto()
    """At once, on the host: it needs no value, like another view of the same memory."""
    ALLOCATION = auto()
    LAUNCH = auto()
    HOST = auto()
    """On the host, once the stream has passed what is enqueued."""


_SPECIAL: Final = {
    aten.copy_.default: _How.COPY,
    aten._to_copy.default: _How.MOVE,
    aten.record_stream.default: _How.IGNORED,
    aten._has_compatible_shallow_copy_type.default: _How.VIEW,
    aten.is_same_size.default: _How.VIEW,
    aten.empty_like.default: _How.ALLOCATION,
    aten.new_empty.default: _How.ALLOCATION,
    aten.new_empty_strided.default: _How.ALLOCATION,
}
_ON_HOST: Final = {
    torch.Tag.nondeterministic_seeded,
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
    torch.Tag.inplace_view,
}
_how_of: Final[dict[Any, _How]] = dict(_SPECIAL)


def _found_how(func: Any) -> _How:
    returned = func._schema.returns
    if func.is_view:
        return _How.VIEW
    if _ON_HOST.intersection(func.tags) or any("Tensor" not in str(each.type) for each in returned):
        return _How.HOST
    return _How.LAUNCH


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Enqueue an operation on the current stream, or run it, and wrap what it makes on the device."""
    if (how := _how_of.get(func)) is None:
        how = _how_of[func] = _found_how(func)
    if how is _How.COPY:
        return _copied(args[1], args[0], *args[2:], **kwargs)
    if how is _How.MOVE:
        return _moved(args[0], **kwargs)
    if how is _How.IGNORED:
        return None
    _require_one_device(func, args, kwargs)
    if (named := kwargs.get("device")) is not None and torch.device(named).type != _NPU:
        # The memory of the host, of a shape that is taken from the device.
        return func(*_map(_unwrapped, args), **_unwrapped_fields(kwargs))
    if isinstance(out := kwargs.get("out"), OnDevice):
        (spec,) = _specs(func, args, kwargs)
        if spec[0] != out.shape:
            out.data = OnDevice(_allocated(spec))  # torch resizes it
    if how is _How.ALLOCATION:
        return OnDevice(_allocated(_specs(func, args, kwargs)[0]))
    own, fields = _map(_launched, args), {key: _map(_launched, value) for key, value in kwargs.items()}
    if how is _How.LAUNCH:
        return _launch(func, args, kwargs, own, fields)
    if how is _How.HOST:
        streams.current_stream().synchronize()
    made = func(*own, **fields)
    wrapped = tree_map(lambda each: OnDevice(each) if isinstance(each, Tensor) else each, made)
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


def _launch(func: Any, args: Any, kwargs: dict[str, Any], own: Any, fields: dict[str, Any]) -> Any:
    returned = func._schema.returns
    if not returned or all(each.alias_info is not None for each in returned):
        _enqueue(lambda: func(*own, **fields))
        if len(returned) == 1 and func._schema.arguments[0].alias_info is not None:
            return args[0]
        return return_and_correct_aliasing(func, args, kwargs, args) if returned else None
    if (specs := _specs(func, args, kwargs)) is None:
        streams.current_stream().synchronize()
        made = func(*own, **fields)
        return tree_map(lambda each: OnDevice(each) if isinstance(each, Tensor) else each, made)
    memory = [None if spec is None else _allocated(spec) for spec in specs]

    def run() -> None:
        made = func(*own, **fields)
        for place, each in zip(memory, _flat(made), strict=True):
            if place is not None:
                assert place.shape == each.shape, f"{func}: {each.shape}, but {place.shape} by the meta device"
                place.copy_(each)

    _enqueue(run)
    wrapped = [None if each is None else OnDevice(each) for each in memory]
    if len(returned) == 1 and "[]" not in str(returned[0].type):
        result: Any = wrapped[0]
    else:
        result = wrapped if len(returned) == 1 else tuple(wrapped)
    return result if not func._schema.is_mutable else return_and_correct_aliasing(func, args, kwargs, result)


def _enqueue(work: Callable[[], object]) -> None:
    stream = streams.current_stream()
    assert isinstance(stream, streams.Stream)
    stream.queue.put(work)


_Spec = tuple[Sequence[int], Sequence[int], torch.dtype]
"""Shape, strides and type."""

_specs_of_call: Final[dict[Any, Sequence[_Spec | None] | None]] = {}


def _specs(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the specs of what an operation makes; None if that depends on values, or the meta device lacks it."""
    try:
        call = func, _key(args), _key(tuple(sorted(kwargs.items())))
        if call in _specs_of_call:
            return _specs_of_call[call]
    except TypeError:
        call = None
    try:
        made = func(*_map(_meta, args), **{key: _map(_meta, value) for key, value in kwargs.items()})
    except NotImplementedError:
        specs = None
    else:
        specs = [None if each is None else (each.shape, each.stride(), each.dtype) for each in _flat(made)]
    if call is not None:
        _specs_of_call[call] = specs
    return specs


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device.type
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    return type(value), value


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)([_map(function, each) for each in value])
    return function(value)


def _flat(made: Any) -> Iterator[Any]:
    if isinstance(made, list | tuple):
        for each in made:
            yield from _flat(each)
    else:
        yield made


def _meta(value: Any) -> Any:
    if isinstance(value, OnDevice):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _unwrapped(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == _NPU:
        return torch.device("cpu")
    return value.held if isinstance(value, OnDevice) else value


def _unwrapped_fields(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: _map(_unwrapped, value) for key, value in kwargs.items()}


def _launched(value: Any) -> Any:
    """Return an argument as a kernel takes it: a number in memory of the host is taken when it is enqueued."""
    if isinstance(value, Tensor) and not isinstance(value, OnDevice):
        return value.clone()
    return _unwrapped(value)


def _require_one_device(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    for each in _flat((args, list(kwargs.values()))):
        if isinstance(each, Tensor) and not isinstance(each, OnDevice) and each.dim():
            raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found {_NPU} and cpu")


def _allocated(spec: _Spec) -> Tensor:
    shape, strides, dtype = spec
    made = torch.empty_strided(shape, strides, dtype=dtype)
    fill_with_garbage(made)
    return made


def fill_with_garbage(tensor: Tensor) -> None:
    """Fill memory of the host with what is no sensible value: NaN, -1, True."""
    if tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(float("nan") if tensor.dtype.is_floating_point or tensor.dtype.is_complex else -1)


def _moved(source: Tensor, **kwargs: Any) -> Tensor:
    """Return a copy on a named device, or of another type."""
    is_non_blocking = bool(kwargs.pop("non_blocking", False))
    device = torch.device(kwargs.pop("device", None) or source.device)
    like = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta")
    spec: Tensor = aten._to_copy.default(like, **{**kwargs, "device": torch.device("meta")})
    if device.type == "meta":
        return spec
    made = _allocated((spec.shape, spec.stride(), spec.dtype))
    if device.type == _NPU:
        return _copied(source, OnDevice(made), is_non_blocking)
    # As torch does: the memory is pinned if the copy is not waited for.
    return _copied(source, _pinned(made) if is_non_blocking else made, is_non_blocking)


def _copied(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy to a tensor of the same or of another device."""
    held, own = _unwrapped(target), _unwrapped(source)
    _enqueue(lambda: held.copy_(own))
    on_host = [each for each in (source, target) if not isinstance(each, OnDevice)]
    if on_host and not (non_blocking and _is_pinned(on_host[0])):
        streams.current_stream().synchronize()
    return target


def _empty(size: Sequence[int], dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    like = torch.empty(size, dtype=dtype, device="meta")
    return OnDevice(_allocated((like.shape, like.stride(), like.dtype)))


def _empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return OnDevice(_allocated((size, stride, dtype or torch.get_default_dtype())))


# --- pinned memory of the host, which is named by the address of its storage

_PINNED: Final[dict[int, StorageWeakRef]] = {}
_torch_empty: Final = torch.empty


def _pinned(tensor: Tensor) -> Tensor:
    # Any thread may pin.
    for address, held in tuple(_PINNED.items()):
        if held.expired():
            _PINNED.pop(address, None)
    storage = tensor.untyped_storage()
    _PINNED[storage.data_ptr()] = StorageWeakRef(storage)
    return tensor


def _is_pinned(tensor: Tensor, device: object = None) -> bool:
    if isinstance(tensor, OnDevice):
        return False
    found = _PINNED.get(tensor.untyped_storage().data_ptr())
    return found is not None and not found.expired()


def _pin_memory(tensor: Tensor, device: object = None) -> Tensor:
    return tensor if _is_pinned(tensor) else _pinned(tensor.clone())


def _empty_of_host(*size: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
    made = _torch_empty(*size, **kwargs)
    return _pinned(made) if pin_memory else made


_torch_apply: Final[Any] = nn.Module._apply


def _apply(module: nn.Module, function: Callable[[Tensor], Tensor], *arguments: Any, **keywords: Any) -> nn.Module:
    """Move or convert a module: its parameters keep their attributes, as those that torch moves in place."""
    before = [(name, parameter) for name, parameter in module._parameters.items() if parameter is not None]
    _torch_apply(module, function, *arguments, **keywords)
    for name, parameter in before:
        if (after := module._parameters[name]) is not parameter:
            vars(after).update({key: value for key, value in vars(parameter).items() if key not in vars(after)})
    return module


def _autoload() -> None:
    """Do nothing: torch has imported this module by calling it, at the end of its own import.

    See https://docs.pytorch.org/tutorials/unstable/python_extension_autoload.html.
    """


def __getattr__(name: str) -> Any:
    """Return a kernel that other packages import if they find this one."""
    if not name.startswith("npu_"):
        raise AttributeError(name)

    def kernel(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(name)

    return kernel


def _register() -> torch.library.Library:
    """Register the device with torch, which knows no streams of a device in Python: its own are replaced."""
    backend_registration._setup_privateuseone_for_python_backend(_NPU, backend_module=_Module)
    operators = torch.library.Library("aten", "IMPL")
    operators.impl("empty.memory_format", _empty, "PrivateUse1")
    operators.impl("empty_strided", _empty_strided, "PrivateUse1")
    operators.impl("_copy_from", _copied, "PrivateUse1")
    replaced: Any = torch
    replaced.Stream, replaced.Event, replaced.empty = streams.Stream, streams.Event, _empty_of_host
    replaced.nn.Module._apply = _apply
    replaced.Tensor.pin_memory, replaced.Tensor.is_pinned = _pin_memory, _is_pinned
    accelerator: Any = torch.accelerator
    accelerator.current_stream, accelerator.set_stream = streams.current_stream, streams.set_stream
    accelerator.synchronize = streams.synchronize
    accelerator.get_memory_info = _Module.mem_get_info
    accelerator.memory_allocated = accelerator.memory_reserved = lambda device=None: 0
    return operators


_OPERATORS: Final = _register()
