"""Checks of a job's optimizer and of its learning rates before any worker is started.

Small parameters in place of the model's show whether workers with some of the parameters, and after a restart, make the
update of a plain loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from chameleon_ft.errors import ConfigError
from chameleon_ft.job.job import Job
from chameleon_ft.models.build import digest
from chameleon_ft.models.optimizer import ModelOptimizer, Place, different_values
from chameleon_ft.models.precision import parameter_like

_MAX_TRIED_PARAMETERS: Final = 16
# Updates before a restart, and after it.
_UPDATES: Final = 3


def check_optimizer(job: Job, *, device: torch.device) -> None:
    """Let the optimizer update small parameters in place of some of the model's: together, apart, and after a restart.

    Raises:
        ConfigError: it cannot make an update; or an update depends on something that a worker does not have.
    """
    whole = _SmallOptimizer(ModelOptimizer(job), device)
    name = type(whole.model.torch).__name__
    try:
        whole.update(0)
    except Exception as error:
        raise ConfigError(
            f"`optimizer` returned {name}, which cannot make an update ({type(error).__name__}: {error}); it is called "
            "by step(), without a closure, and all gradients are dense"
        ) from error
    for step in range(1, _UPDATES):
        whole.update(step)
    first, values = {place: part.detach().clone() for place, part in whole.parts.items()}, whole.model.values.changed()
    for step in range(_UPDATES, 2 * _UPDATES):
        whole.update(step)
    tried = list(whole.parts)
    for places in (tried[:1], tried[1:]):
        some = _SmallOptimizer(whole.model.anew(), device, places)
        try:
            for step in range(_UPDATES):
                some.update(step)
        except Exception as error:
            raise ConfigError(
                f"`optimizer` returned {name}, which cannot update a part of the parameters ({type(error).__name__}: "
                f"{error}); a worker has those of some layers, so a group may be without any"
            ) from error
        if not some.is_close(first):
            raise ConfigError(
                f"`optimizer` returned {name}, which updates a parameter differently if it is alone; a worker has the "
                "parameters of some layers, so an update may depend only on the parameter's own gradient and state, "
                "and on no random numbers; to clip the norm of all gradients, set the job's `clip_norm`"
            )
        if different := different_values(some.model.values.changed(), values):
            raise ConfigError(
                f"`optimizer` returned {name}, which keeps {different[0]} with another value if it has other "
                "parameters; a worker has those of some layers, so keep it in state[parameter]"
            )
        again = _SmallOptimizer(whole.model.anew(), device, places)
        again.restore(some)
        for step in range(_UPDATES, 2 * _UPDATES):
            again.update(step)
        if not again.is_close(whole.parts):
            raise ConfigError(
                f"`optimizer` returned {name}, which updates parameters differently after its state is restored; keep "
                "tensors in state[parameter], and numbers in its groups, in its attributes or in those of an object "
                "that a hook of it uses"
            )
    _check_slices(whole, first)


def _check_slices(whole: _SmallOptimizer, updated: Mapping[Place, Tensor]) -> None:
    """Let the optimizer update halves of parameters whose slices workers may own. Raises ConfigError if that differs.

    Args:
        updated: the parameters after `_UPDATES` updates.
    """
    model = whole.model.anew()
    places = [place for place, part in whole.parts.items() if part.ndim and model.is_elementwise(place)]

    def halves(tensor: Tensor) -> list[Tensor]:
        return [half.view((1,) * (tensor.ndim - 1) + (-1,)) for half in tensor.reshape(-1).chunk(2)]

    def parts_of(place: Place) -> list[nn.Parameter]:
        return [parameter_like(model.parameters[place], half) for half in halves(torch.ones_like(updated[place]))]

    slices = {place: parts_of(place) for place in places}
    model.hold((place, own) for place, parts in slices.items() for own in parts)
    for step in range(_UPDATES):
        for place, parts in slices.items():
            for own, gradient in zip(parts, halves(whole.gradient(step, place)), strict=True):
                own.grad = gradient
        model.torch.step()
    for place, parts in slices.items():
        joined = torch.cat([own.detach().reshape(-1) for own in parts])
        if not torch.allclose(joined, updated[place].reshape(-1), equal_nan=True):
            name = type(model.torch).__name__
            raise ConfigError(
                f"`optimizer` returned {name}, which updates a part of a parameter differently than the whole, as a "
                "hook may that uses shapes or norms of parameters; say so by Job(elementwise=False), so that workers "
                "divide whole parameters only"
            )


class _SmallOptimizer:
    """The optimizer of a job with small parameters in place of some of the model's: up to two of each group."""

    def __init__(self, model: ModelOptimizer, device: torch.device, places: Iterable[Place] | None = None) -> None:
        self.model = model
        if places is None:
            kinds: dict[tuple[int, bool], Place] = {}
            for place, each in model.parameters.items():
                if each.requires_grad:
                    kinds.setdefault((id(model.group_of(place)), each.ndim > 1), place)
            places = list(kinds.values())[:_MAX_TRIED_PARAMETERS]
        shapes = {place: (2,) * model.parameters[place].ndim for place in places}
        self.parts = {
            place: parameter_like(each, torch.ones(shape, dtype=each.dtype, device=device))
            for place, shape in shapes.items()
            for each in (model.parameters[place],)
        }
        model.hold(self.parts.items())

    def update(self, step: int) -> None:
        """Update the parameters by random gradients, which depend on the step and the place."""
        for place, part in self.parts.items():
            part.grad = self.gradient(step, place)
        self.model.torch.step()

    def gradient(self, step: int, place: Place) -> Tensor:
        part, places = self.parts[place], list(self.model.parameters)
        random = torch.Generator().manual_seed(step * len(places) + places.index(place))
        return torch.randn(part.shape, generator=random).to(part)

    def restore(self, other: _SmallOptimizer) -> None:
        """Take over parameters and state, as another worker or a checkpoint has it."""
        for place, part in self.parts.items():
            part.data.copy_(other.parts[place])
            if state := other.model.torch.state.get(other.parts[place]):
                self.model.torch.state[part] = tree_map_only(Tensor, lambda value: value.detach().clone(), state)
        self.model.values.restore(other.model.values.changed())

    def is_close(self, parts: Mapping[Place, Tensor]) -> bool:
        return all(torch.allclose(part, parts[place], equal_nan=True) for place, part in self.parts.items())


def check_learning_rate(job: Job) -> None:
    """Call `learning_rate` or `schedule` for the first step. Raises ConfigError unless the step alone decides it."""
    if job.schedule is not None and not callable(job.schedule):
        try:
            ModelOptimizer(job).learning_rate(0)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"`schedule` cannot be computed for step 0 ({type(error).__name__}: {error}): give "
                "chameleon_ft.optim.scheduler a class of torch.optim.lr_scheduler and its options, or a function of an "
                "optimizer that returns a scheduler"
            ) from error
        return
    name, function = ("learning_rate", job.learning_rate) if job.schedule is None else ("schedule", job.schedule)
    if function is None:
        return
    rate: Any = function(0)
    try:
        is_rate = math.isfinite(rate) and rate >= 0
    except (TypeError, ValueError, RuntimeError):
        is_rate = False
    if not is_rate:
        noun = "rate" if job.schedule is None else "factor of the rates"
        raise ConfigError(f"`{name}` returned {rate!r:.60} for step 0: it returns the {noun}, a number of 0 or more")
    # The digest includes caches of the schedule.
    kept = digest(function)
    if function(0) != rate or digest(function) != kept:
        raise ConfigError(
            f"`{name}` depends on how often it has been called, which differs between workers; compute the rate from "
            "the number of the step alone, or give a scheduler of torch as `schedule`, by "
            "chameleon_ft.optim.scheduler(CLASS, ...)"
        )
