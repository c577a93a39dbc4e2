"""The optimizer of a job, made of all parameters of the model, of which a worker updates some.

The job's factory is called as a plain loop calls it: with every parameter of the model, whole, in the order of the
layers. What it is given stands on the meta device, without values, because no worker has room for the model. Then the
optimizer holds, group by group, the parameters or slices that a worker updates in place of these. So a group means the
same on every worker, and the optimizer, with what it counts and what is attached to it, lives as long as its worker
trains.

An optimizer keeps values besides the state of parameters: in groups, on itself, and in hooks or schedulers that are
attached to it. Only values that training has changed count, so that a constant that is edited between two runs of a job
takes effect.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from chameleon_ft.errors import ConfigError
from chameleon_ft.job.job import Job, ModelParameters
from chameleon_ft.keys import generator_lock
from chameleon_ft.models.build import build_on_meta, measure_layers, tensor_bytes
from chameleon_ft.models.precision import parameter_like
from chameleon_ft.optim import Combined, rate_shares

_SCALARS: Final = (type(None), bool, int, float, complex, str, bytes, torch.dtype)
_OPAQUE: Final = (*_SCALARS, Tensor, nn.Module, type, ModuleType, torch.device, torch.Generator)
_PARAMS: Final = "params"
# Torch keeps the names of a group's parameters beside them.
_NAMES: Final = "param_names"

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
        # Values are kept, so that no other gets the id of one.
        seen: dict[int, Any] = {}
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
        # The cell may be empty.
        with contextlib.suppress(ValueError):
            yield 0, container.cell_contents
    elif isinstance(container, list):
        yield from enumerate(container)
    else:
        yield from ((key, own) for key, own in container.items() if key not in (_PARAMS, _NAMES))


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


Place = tuple[int, str]
"""A parameter: its layer, and its name in the layer."""


class ModelOptimizer:
    """The optimizer of a job, which holds nothing at first.

    Attributes:
        torch: the optimizer, of which only `hold` changes the parameters.
        values: that it keeps besides the state of parameters.
        parameters: The parameters of the model, without values, by place. Tied ones are one.

    Raises:
        ConfigError: the factory returns no optimizer, one of other parameters, or reads values of parameters.
    """

    def __init__(self, job: Job, parameters: Mapping[Place, nn.Parameter] | None = None) -> None:
        self._job = job
        self.parameters = _parameters_of(job) if parameters is None else parameters
        # Of the copies of a tied parameter, that of the first.
        self._names = {id(each): f"{layer}.{name}" for (layer, name), each in [*self.parameters.items()][::-1]}
        self.torch = self._made({})
        self._shares = rate_shares(self.torch)
        self._options = [
            {key: value for key, value in group.items() if key not in (_PARAMS, _NAMES)}
            for group in self.torch.param_groups
        ]
        self._classes = _classes_of_groups(self.torch)
        self._has_initial_state = len(self.torch.state) > 0
        self._groups = {id(each): group for group in self.torch.param_groups for each in group["params"]}
        given = {id(each) for each in self.parameters.values()}
        if self._groups.keys() - given:
            raise ConfigError(
                f"`optimizer` returned {type(self.torch).__name__} with a parameter that it was not given: only "
                "parameters of layers are trained; put it into a layer"
            )
        self.hold(())
        self.values = OptimizerValues(self.torch)

    def anew(self) -> Self:
        """Return the optimizer as it was at first."""
        return type(self)(self._job, self.parameters)

    def group_of(self, place: Place) -> dict[str, Any] | None:
        """Return the group of a parameter; None if the factory left it out, so that it is not updated."""
        return self._groups.get(id(self.parameters[place]))

    def kind_of(self, place: Place) -> type[torch.optim.Optimizer]:
        """Return the class that updates a parameter: of several that are combined, that of its group."""
        return self._classes.get(id(self.group_of(place)), type(self.torch))

    def is_elementwise(self, place: Place) -> bool:
        """Return whether each element of a parameter is updated by itself, so that slices of it may be.

        The job says so, or if it does not, the class that updates the parameter.
        """
        said = self._job.elementwise
        return self.kind_of(place) in _ELEMENTWISE if said is None else said

    @property
    def first_trained(self) -> int:
        """The first layer with a parameter that is trained."""
        return min((layer for (layer, _), each in self.parameters.items() if each.requires_grad), default=0)

    def hold(self, parts: Iterable[tuple[Place, nn.Parameter]]) -> None:
        """Update these parts from now on, each a parameter or a slice of it, without any state but an initial one."""
        held = list(parts)
        # In place: an optimizer may consist of others that share its groups and its state.
        for group in self.torch.param_groups:
            group["params"][:] = []
            group.get(_NAMES, [])[:] = []
        self.torch.state.clear()
        for place, own in held:
            if (own_group := self.group_of(place)) is not None:
                own_group["params"].append(own)
                if _NAMES in own_group:
                    own_group[_NAMES].append(self._names[id(self.parameters[place])])
        if self._has_initial_state and held:
            replaced: dict[int, list[nn.Parameter]] = defaultdict(list)
            for place, own in held:
                replaced[id(self.parameters[place])].append(own)
            made = self._made(replaced).state
            self.torch.state.update({own: made[own] for _, own in held if own in made})

    def step(self, step: int) -> float:
        """Update what is held from its gradients, maybe nothing, as step `step`; return the learning rate."""
        rate, scheduled = self._scheduled(step)
        before = [
            {key: group.get(key) for key in own} for group, own in zip(self.torch.param_groups, scheduled, strict=True)
        ]
        for group, own in zip(self.torch.param_groups, scheduled, strict=True):
            group.update(own)
        self.torch.step()
        # They go back to what they were, so that they are no values that the optimizer keeps.
        for group, own in zip(self.torch.param_groups, before, strict=True):
            group.update(own)
        return rate

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step: that of the job, or of the first group."""
        return self._scheduled(step)[0]

    def _scheduled(self, step: int) -> tuple[float, list[dict[str, Any]]]:
        """Return the learning rate of a step, and what the job sets in each group for it."""
        job = self._job
        if job.learning_rate is not None:
            rate = float(job.learning_rate(step))
            return rate, [{"lr": rate * share} for share in self._shares]
        if job.schedule is None:
            groups: list[dict[str, Any]] = [{} for _ in self._options]
        elif not callable(job.schedule):
            groups = job.schedule.options(step, self._options, self.torch.defaults)
        else:
            factor = float(job.schedule(step))
            groups = [
                {"lr": float(own.get("initial_lr", own["lr"])) * factor} if "lr" in own else {} for own in self._options
            ]
        return float({**self.torch.param_groups[0], **groups[0]}.get("lr", math.nan)), groups

    def _made(self, replaced: Mapping[int, list[nn.Parameter]]) -> torch.optim.Optimizer:
        """Call the factory, with parts in place of the parameters with these ids."""
        unique = {id(each): each for each in self.parameters.values()}
        given = ModelParameters(
            (self._names[key], own) for key, each in unique.items() for own in replaced.get(key, [each])
        )
        if not given:
            raise ConfigError("no layer of the job has a parameter: there is nothing to train")
        try:
            optimizer: object = self._job.optimizer(given)
        except (RuntimeError, NotImplementedError) as error:
            if "meta" not in str(error):
                raise
            raise ConfigError(
                f"`optimizer` reads values of parameters ({error}), but a worker has those of some layers only; form "
                "groups by shape, by an attribute that a layer's factory sets, or by order"
            ) from error
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"`optimizer` returned {type(optimizer).__name__}: it returns a torch.optim.Optimizer of the parameters"
            )
        return optimizer


def _classes_of_groups(optimizer: torch.optim.Optimizer) -> dict[int, type[torch.optim.Optimizer]]:
    """Return the classes that update the groups of an optimizer, by the ids of the groups."""
    if isinstance(optimizer, Combined):
        return {key: kind for each in optimizer.optimizers for key, kind in _classes_of_groups(each).items()}
    return {id(group): type(optimizer) for group in optimizer.param_groups}


def _parameters_of(job: Job) -> dict[Place, nn.Parameter]:
    """Return the parameters of all layers in order, as the optimizer updates them, on the meta device.

    Those of a layer that exists already are its own.
    """
    found: dict[Place, nn.Parameter] = {}
    first = {copy: copies[0] for copies in job.tied for copy in copies[1:]}
    with generator_lock:
        for layer in range(job.num_layers):
            for name, parameter in build_on_meta(job, layer).named_parameters():
                is_rounded = job.precision.is_lower and parameter.dtype in (torch.float16, torch.bfloat16)
                found[layer, name] = parameter_like(parameter, parameter.float()) if is_rounded else parameter
    return {place: found[first.get(place, place)] for place in found}


# --- state -----------------------------------------------------------------------------------------------------------


def state_bytes(job: Job) -> tuple[int, ...]:
    """Return the bytes of each layer's state after a step, first layer to last.

    The state is what moves with a layer: parameters, or their masters, persistent buffers, and the state of the
    optimizer, which is found by a step on the meta device. If that fails, only the optimizer state created until then
    counts, which is all of it for most optimizers.

    Raises:
        ConfigError: the named layer cannot be built on the meta device.
    """
    optimizer = ModelOptimizer(job)

    def measure(layer: int, module: nn.Module, masters: Mapping[str, nn.Parameter]) -> int:
        state = _state_on_meta(optimizer, layer, module, masters)
        return tensor_bytes({**module.state_dict(), **masters}) + sum(map(tensor_bytes, state))

    return measure_layers(job, measure)


def names_of_state(job: Job) -> frozenset[str]:
    """Return the names of the values that the optimizer keeps of a parameter after a step. Raises as `state_bytes`."""
    optimizer, names = ModelOptimizer(job), set[str]()

    def note(layer: int, module: nn.Module, masters: Mapping[str, nn.Parameter]) -> int:
        names.update(*_state_on_meta(optimizer, layer, module, masters))
        return 0

    measure_layers(job, note)
    return frozenset(names)


def _state_on_meta(
    optimizer: ModelOptimizer, layer: int, module: nn.Module, masters: Mapping[str, nn.Parameter]
) -> list[Mapping[str, Any]]:
    """Return the optimizer's state of each trained parameter of a layer after a step."""
    trained = {name: masters.get(name, each) for name, each in module.named_parameters() if each.requires_grad}
    # Copies, because a factory may return a module that exists already, with real parameters.
    parts = [
        ((layer, name), parameter_like(each, torch.empty_like(each, device="meta"))) for name, each in trained.items()
    ]
    for _, part in parts:
        part.grad = torch.empty_like(part)
    # An optimizer that fails on the meta device may work on a real one.
    with contextlib.suppress(Exception):
        optimizer.hold(parts)
        for group in optimizer.torch.param_groups:
            # The meta device lacks these kernels; the state is the same without them.
            group.update({name: False for name in ("fused", "foreach") if name in group})
        try:
            optimizer.torch.step()
        except Exception:  # noqa: BLE001 - of any class
            # Of several in one, each makes its own state.
            for each in optimizer.torch.optimizers if isinstance(optimizer.torch, Combined) else ():
                with contextlib.suppress(Exception):
                    each.step()
    return list(optimizer.torch.state.values())


_ELEMENTWISE: Final = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
"""Optimizers of torch in which an element depends on its own gradient and state alone. A subclass may add to that."""


def undivided_optimizer(job: Job) -> str:
    """Return the name of an optimizer that may update elements together, as `ModelOptimizer.is_elementwise` says.

    Empty if there is none. Raises ConfigError as `ModelOptimizer`.
    """
    model = ModelOptimizer(job)
    kinds = {model.kind_of(place) for place in model.parameters if not model.is_elementwise(place)}
    return " and ".join(sorted(kind.__name__ for kind in kinds))
