"""The description of layers that are about to be sent: JSON, because what comes from a network is not to be unpickled.

None, booleans, numbers and strings stand for themselves. Any other value is an object of one entry, from its kind to
its content: {"tensor": [type, shape]} for a tensor that is sent separately, {"list": [...]}, {"dict": [[key, value],
...]} and so on.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from chameleon_ft.errors import ConfigError, ControlError

_META: Final = torch.device("meta")


def encode_description(states: Sequence[Mapping[str, Any]]) -> bytes:
    """Describe the states of layers: type and shape of each tensor, and the value of everything else.

    A tensor inside a list, tuple or dictionary is part of the description, with its content.

    Raises:
        ConfigError: a value is of a type that cannot be sent.
    """
    return json.dumps([{key: _encoded_entry(key, value) for key, value in state.items()} for state in states]).encode()


def decode_description(text: bytes) -> list[dict[str, Any]]:
    """Return the states that `encode_description` described, with tensors on the meta device for those sent separately.

    Raises:
        ControlError: `text` is not such a description.
    """
    try:
        return [{str(key): _decoded(value) for key, value in state.items()} for state in json.loads(text)]
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise ControlError(f"not a description of layers: {type(error).__name__}: {error}") from None


def _encoded_entry(key: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"tensor": [_dtype_name(value.dtype), list(value.shape)]}
    try:
        return _encoded(value)
    except TypeError as error:
        raise ConfigError(
            f"the state {key!r} of a layer has {error}, which cannot be sent to another worker; let the optimizer "
            "keep tensors, numbers, strings, or lists, tuples and dictionaries of them"
        ) from None


def _encoded(value: Any) -> Any:
    match value:
        case None | bool() | str():
            return value
        case int():
            return int(value)
        case float():
            return float(value)
        case complex():
            return {"complex": [value.real, value.imag]}
        case bytes():
            return {"bytes": _to_text(value)}
        case torch.dtype():
            return {"dtype": _dtype_name(value)}
        case Tensor():
            data = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            return {"data": [_dtype_name(value.dtype), list(value.shape), _to_text(data)]}
        case list():
            return {"list": [_encoded(each) for each in value]}
        case tuple():
            return {"tuple": [_encoded(each) for each in value]}
        case dict():
            return {"dict": [[_encoded(key), _encoded(each)] for key, each in value.items()]}
    raise TypeError(f"a value of type {type(value).__name__}")


def _decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        if isinstance(value, list):
            raise TypeError("a list without its kind")
        return value
    ((kind, content),) = value.items()
    match kind:
        case "tensor":
            dtype, shape = content
            return _announced(dtype, tuple(shape))
        case "data":
            dtype, shape, data = content
            content = bytearray(_from_text(data))
            flat = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
            return flat.view(_dtype(dtype)).view(shape)
        case "list":
            return [_decoded(each) for each in content]
        case "tuple":
            return tuple(_decoded(each) for each in content)
        case "dict":
            return {_decoded(key): _decoded(each) for key, each in content}
        case "complex":
            return complex(*content)
        case "bytes":
            return _from_text(content)
        case "dtype":
            return _dtype(content)
    raise KeyError(kind)


@lru_cache
def _announced(dtype: str, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=_dtype(dtype), device=_META)


@lru_cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name!r} is not the type of a tensor")
    return found


def _to_text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _from_text(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
