"""Values that an optimizer keeps besides the state of parameters: in groups, on itself, and in what is attached to it.

Schedulers of learning rates and other hooks belong to it. Only values that training has changed count, so that a
constant that is edited between two runs of a job takes effect.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import deque
from collections.abc import Iterator, Mapping
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from chameleon_ft.errors import ConfigError

_SCALARS: Final = (type(None), bool, int, float, complex, str, bytes, torch.dtype)
_OPAQUE: Final = (*_SCALARS, Tensor, nn.Module, type, ModuleType, torch.device, torch.Generator)
_PARAMS: Final = "params"  # of a group

Values = Mapping[tuple[str, Any], Any]
"""(Path of a container, key in it) -> value."""


class OptimizerValues:
    """The values of an optimizer that has just been made. They are found by the same paths in each worker.

    Raises:
        ConfigError: one of them is made of parameters, of which no worker has all, or is a parameter.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        if kept := [path for path, value, _ in self._objects() if isinstance(value, nn.Parameter)]:
            raise ConfigError(
                f"`optimizer` returned {type(optimizer).__name__}, which keeps a parameter in {kept[0]}, but a worker "
                "updates slices instead; let hooks take parameters from the optimizer's `param_groups` each time, and "
                "an optimizer of others share theirs: self.param_groups = [*first.param_groups, *second.param_groups]"
            )
        self._initial = copy.deepcopy(self._values())
        tensors = {place: filter(torch.is_tensor, tree_leaves(value)) for place, value in self._initial.items()}
        if odd := [f"{path}/{key}" for (path, key), own in tensors.items() if any(each.is_meta for each in own)]:
            raise ConfigError(
                f"`optimizer` returned {type(optimizer).__name__}, which keeps tensors of parameters in {odd[0]}; keep "
                "them in its state[parameter], from the first step on"
            )

    def changed(self) -> dict[tuple[str, Any], Any]:
        """Return copies of the values that are not as they were at first."""
        return copy.deepcopy(
            {
                place: value
                for place, value in self._values().items()
                if place not in self._initial or not _is_equal(value, self._initial[place])
            }
        )

    def restore(self, changed: Values) -> None:
        """Take over what `changed` gave, here or in another worker; all others are as they were at first.

        Raises:
            ConfigError: there is nothing that could have such a value.
        """
        containers = dict(self._containers())
        if missing := sorted(path for path, _ in changed if path not in containers):
            raise ConfigError(
                f"{type(self._optimizer).__name__} keeps values in {missing[0]}, which it does not have before its "
                "first step; make it with the optimizer, or keep them in its groups"
            )
        for path, key in self._values().keys() - self._initial.keys() - changed.keys():
            if isinstance(containers[path], dict):
                del containers[path][key]
        for (path, key), value in {**self._initial, **changed}.items():
            if path in containers:
                _put(containers[path], key, value)

    def _values(self) -> dict[tuple[str, Any], Any]:
        return {(path, key): value for path, each in self._containers() for key, value in _leaves(each)}

    def _containers(self) -> Iterator[tuple[str, Any]]:
        """Yield all dictionaries, lists and cells that may have values, each once, by path."""
        return ((path, container) for path, _, container in self._objects() if container is not None)

    def _objects(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield all that belongs to the optimizer, each once, by path, with the container that it is or has."""
        seen: dict[int, Any] = {}  # kept, so that no other gets the id of one
        waiting = deque[tuple[str, Any]]([("optimizer", self._optimizer)])
        while waiting:
            path, value = waiting.popleft()
            if id(value) in seen:
                continue
            seen[id(value)] = value
            container, parts = (None, []) if isinstance(value, _OPAQUE) else _opened(value)
            yield path, value, container
            waiting += [(f"{path}/{name}", part) for name, part in parts]


def different_values(changed: Values, other: Values) -> list[str]:
    """Return the paths of values that differ between two results of `OptimizerValues.changed`."""
    missing = object()
    return sorted(
        f"{place[0]}/{place[1]}"
        for place in changed.keys() | other.keys()
        if not _is_equal(changed.get(place, missing), other.get(place, missing))
    )


def _opened(value: Any) -> tuple[Any, list[tuple[str, Any]]]:
    """Return the container of what belongs to a value, None if it is constant, and what else belongs to it."""
    match value:
        case FunctionType():
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            defaults: dict[Any, Any] = {**dict(enumerate(value.__defaults__ or ())), **(value.__kwdefaults__ or {})}
            return vars(value), [
                *cells,
                *_globals_of(value),
                *_named(vars(value)),
                *((f"default-{key}", own) for key, own in defaults.items()),
            ]
        case MethodType():
            return None, [("self", value.__self__), ("function", value.__func__)]
        case functools.partial():
            return None, [("function", value.func), *_named(dict(enumerate(value.args))), *_named(value.keywords)]
        case CellType():
            return value, [("content", own) for _, own in _pairs(value) if not _is_data(own)]
        case tuple():
            return None, [(str(number), own) for number, own in enumerate(value)]
    container = value if isinstance(value, dict | list) else getattr(value, "__dict__", None)
    parts = _named(container if isinstance(container, dict) else dict(_pairs(container or [])))
    is_optimizer = isinstance(value, torch.optim.Optimizer)
    parts += [
        (name, own)
        for kind in type(value).__mro__
        if not _is_of_torch(kind)
        for name, own in vars(kind).items()
        if isinstance(own, FunctionType)
    ]
    return container, [
        (name, own) for name, own in parts if not _is_data(own) and not (is_optimizer and name == "state")
    ]


def _globals_of(function: FunctionType) -> list[tuple[str, Any]]:
    """Return what a function of a job uses of its module: functions, objects, and schedulers of learning rates."""
    module, found = function.__module__, []
    for name in () if _is_of_torch(function) else function.__code__.co_names:
        own = function.__globals__.get(name)
        is_function = isinstance(own, FunctionType) and own.__module__ == module
        is_object = isinstance(own, LRScheduler) or type(own).__module__ == module
        if is_function or is_object:
            found.append((name, own))
    return found


def _is_of_torch(value: Any) -> bool:
    return str(value.__module__).partition(".")[0] in ("torch", "builtins")


def _named(parts: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    # Hooks have numbers that count all hooks of a process.
    return [(key if isinstance(key, str) else str(number), own) for number, (key, own) in enumerate(parts.items())]


def _pairs(container: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the keys and values of a dictionary, a list or a cell, without the parameters of a group."""
    if isinstance(container, CellType):
        with contextlib.suppress(ValueError):  # it is empty
            yield 0, container.cell_contents
    elif isinstance(container, list):
        yield from enumerate(container)
    else:
        yield from ((key, own) for key, own in container.items() if key != _PARAMS)


def _leaves(container: Any) -> list[tuple[Any, Any]]:
    """Return the values of a container that are data, with their keys."""
    return [(key, own) for key, own in _pairs(container) if isinstance(key, str | int) and _is_data(own)]


def _put(container: Any, key: Any, value: Any) -> None:
    """Set a value, in place where others may refer to it."""
    value = copy.deepcopy(value)
    before = dict(_leaves(container)).get(key)
    match before, value:
        case list(), list():
            before[:] = value
        case dict(), dict():
            before.clear()
            before.update(value)
        case Tensor(), Tensor() if before.shape == value.shape and before.dtype == value.dtype:
            with torch.no_grad():
                before.copy_(value)
        case _ if isinstance(container, CellType):
            container.cell_contents = value
        case _:
            container[key] = value


def _is_data(value: Any) -> bool:
    """Return whether a value is made of numbers, strings and tensors alone; a group of parameters is not."""
    if type(value) in (list, tuple):
        return all(map(_is_data, value))
    if type(value) is dict:
        return _PARAMS not in value and all(isinstance(key, str | int) and _is_data(own) for key, own in value.items())
    return isinstance(value, _SCALARS) or (isinstance(value, Tensor) and not isinstance(value, nn.Parameter))


def _is_equal(value: Any, other: Any) -> bool:
    """Return whether two values are of one type, and equal; not a number equals itself."""
    if type(value) is not type(other):
        return False
    if isinstance(value, Tensor):
        return value.shape == other.shape and value.dtype == other.dtype and torch.equal(value.cpu(), other.cpu())
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(_is_equal(each, other[key]) for key, each in value.items())
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(_is_equal, value, other))
    return bool(value == other or (value != value and other != other))
