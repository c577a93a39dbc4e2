"""Digests of all that an object keeps, by which a change is noticed: of a layer beside its state, and of a loss."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from hashlib import blake2b
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn

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
    state = {id(value): name for name, value in _state(module).items()}
    own = {**state, **{id(part): f"module {name}" for name, part in module.named_modules()}}
    found: dict[str, bytes] = {}
    for path, part in module.named_modules():
        if type(part).__module__.startswith("torch._dynamo"):  # of torch.compile, which changes it at its first run
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
    return {name: (id(value), _version(value), _sum(value)) for name, value in _state(module).items()}


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


def _state(module: nn.Module) -> dict[str, Tensor]:
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
