"""A pretended accelerator, `npu`, for runs without one: put `tests/pretended` on PYTHONPATH.

Its tensors are computed on the CPU, but torch takes them for those of another device: an operation that mixes them with
tensors of the host fails, as on a real one, and so does `numpy()`. It has a single device and no streams of its own, so
it shows nothing about the order of operations, times or memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

_NPU = "npu"
_ELSEWHERE = 1 << 60  # so that its addresses are none of the host


class _Stream:
    def synchronize(self) -> None: ...


class _Module:
    """The module that becomes `torch.npu`."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

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
    def current_stream(device: object = None) -> _Stream:
        return _STREAM

    @staticmethod
    def stream(stream: object) -> nullcontext[None]:
        return nullcontext()

    @staticmethod
    def device(device: object) -> nullcontext[None]:
        return nullcontext()


_STREAM = _Stream()


class _OnDevice(Tensor):
    """A tensor of the device, which wraps one of the host."""

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
        return f"{self.held} on {_NPU}"

    def tolist(self) -> Any:
        return self.held.tolist()

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.held = _unwrapped(value)

    def data_ptr(self) -> int:
        return self.held.data_ptr() + _ELSEWHERE

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _dispatch(func, args, kwargs or {})


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the tensors of the host, and wrap what it makes on the device."""
    if func is torch.ops.aten.copy_.default:
        return _copied(args[1], args[0])
    is_moved = func is torch.ops.aten._to_copy.default
    tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
    if not is_moved and any(not isinstance(each, _OnDevice) and each.dim() for each in tensors):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found {_NPU} and cpu")
    named = kwargs.get("device")
    on_device = any(isinstance(each, _OnDevice) for each in tensors) if named is None else _is_npu(named)
    made = func(*tree_map(_unwrapped, args), **{key: _unwrapped(value) for key, value in kwargs.items()})
    if not on_device:
        return made
    wrapped = tree_map(lambda each: _OnDevice(each) if isinstance(each, Tensor) else each, made)
    return wrapped if is_moved else return_and_correct_aliasing(func, args, kwargs, wrapped)


def _is_npu(device: Any) -> bool:
    return torch.device(device).type == _NPU


def _unwrapped(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == _NPU:
        return torch.device("cpu")
    return value.held if isinstance(value, _OnDevice) else value


def _copied(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _unwrapped(target).copy_(_unwrapped(source))
    return target


def _empty(size: Sequence[int], dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _OnDevice(torch.empty(size, dtype=dtype))


def _empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _OnDevice(torch.empty_strided(size, stride, dtype=dtype))


backend_registration._setup_privateuseone_for_python_backend(_NPU, backend_module=_Module)
_operators = torch.library.Library("aten", "IMPL")
_operators.impl("empty.memory_format", _empty, "PrivateUse1")
_operators.impl("empty_strided", _empty_strided, "PrivateUse1")
_operators.impl("_copy_from", _copied, "PrivateUse1")
