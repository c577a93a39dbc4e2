"""The optimizer of a job, made of all parameters of the model, of which a worker updates some.

The job's factory is called as a plain loop calls it: with every parameter of the model, whole, in the order of the
layers. What it is given stands on the meta device, without values, because no worker has room for the model. Then the
optimizer holds, group by group, the parameters or slices that a worker updates in place of these. So a group means the
same on every worker, and the optimizer, with what it counts and what is attached to it, lives as long as its worker
trains.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Self

import torch
from torch import nn

from chameleon_ft.errors import ConfigError
from chameleon_ft.job import Job
from chameleon_ft.keys import generator_lock
from chameleon_ft.models.build import build_on_meta, measure_layers, tensor_bytes
from chameleon_ft.models.optimizer_values import OptimizerValues
from chameleon_ft.models.precision import parameter_like
from chameleon_ft.optim import rate_shares

Place = tuple[int, str]
"""A parameter: its layer, and its name in the layer."""


class ModelOptimizer:
    """The optimizer of a job, which holds nothing at first.

    Attributes:
        torch: the optimizer, of which only `hold` changes the parameters.
        values: that it keeps besides the state of parameters.
        parameters: those of the model, without values, by place. Tied ones are one.

    Raises:
        ConfigError: the factory returns no optimizer, one of other parameters, or reads values of parameters.
    """

    def __init__(self, job: Job, parameters: Mapping[Place, nn.Parameter] | None = None) -> None:
        self._job = job
        self.parameters = _parameters_of(job) if parameters is None else parameters
        self.torch = self._made({})
        self._shares = rate_shares(self.torch)
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

    def hold(self, parts: Iterable[tuple[Place, nn.Parameter]]) -> None:
        """Update these parts from now on, each a parameter or a slice of it, without any state but an initial one."""
        held = list(parts)
        # In place: an optimizer may consist of others that share its groups and its state.
        for group in self.torch.param_groups:
            group["params"][:] = []
        self.torch.state.clear()
        for place, own in held:
            if (own_group := self.group_of(place)) is not None:
                own_group["params"].append(own)
        if self._has_initial_state and held:
            replaced: dict[int, list[nn.Parameter]] = defaultdict(list)
            for place, own in held:
                replaced[id(self.parameters[place])].append(own)
            made = self._made(replaced).state
            self.torch.state.update({own: made[own] for _, own in held if own in made})

    def step(self, rate: float | None) -> None:
        """Update what is held from its gradients, maybe nothing; `rate`: of the job's schedule, if it has one."""
        own = [group.get("lr") for group in self.torch.param_groups]
        if rate is not None:
            for group, share in zip(self.torch.param_groups, self._shares, strict=True):
                group["lr"] = rate * share
        self.torch.step()
        if rate is not None:  # so that rates are nothing that the optimizer keeps
            for group, before in zip(self.torch.param_groups, own, strict=True):
                group["lr"] = before

    def _made(self, replaced: Mapping[int, list[nn.Parameter]]) -> torch.optim.Optimizer:
        """Call the factory, with parts in place of the parameters with these ids."""
        unique = {id(each): each for each in self.parameters.values()}
        given = [own for key, each in unique.items() for own in replaced.get(key, [each])]
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
        optimizer.torch.step()
    return list(optimizer.torch.state.values())
