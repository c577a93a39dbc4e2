"""An optimizer is tried before a run, on small parameters: as a whole, on parts of them, and after a restart."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from chameleon_ft.errors import ConfigError
from chameleon_ft.models.optimizer_checks import check_optimizer
from tests.golden import refused
from tests.models.test_checks import CPU, job


@pytest.mark.parametrize("optimizer", [torch.optim.LBFGS, lambda ps: torch.optim.SparseAdam(list(ps))])
def test_an_optimizer_that_cannot_make_an_update_is_refused(optimizer: Any) -> None:
    with refused(ConfigError):
        check_optimizer(job(optimizer=optimizer), device=CPU)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Muon, torch.optim.Adafactor])
def test_an_optimizer_that_makes_an_update_is_taken(optimizer: Any) -> None:
    check_optimizer(job(layers=[partial(nn.Linear, 4, 4, bias=False)] * 2, optimizer=optimizer), device=CPU)


class Noisy(torch.optim.SGD):
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data += 0.1 * torch.randn(())


class Averaging(torch.optim.SGD):
    """Keeps on itself what depends on the parameters that it has."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.size = sum(float(p.grad.norm()) for group in self.param_groups for p in group["params"])
        super().step()


class Hiding(torch.optim.SGD):
    """Keeps momentum where no one looks."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.hidden: dict[Any, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.hidden[parameter] = self.hidden.get(parameter, 0.0) * 0.9 + parameter.grad
                parameter -= 0.1 * self.hidden[parameter]


def clipping(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def clip(own: torch.optim.Optimizer, *_: Any) -> None:
        nn.utils.clip_grad_norm_([p for group in own.param_groups for p in group["params"]], 0.1)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def clipping_what_it_was_given(parameters: Any) -> torch.optim.Optimizer:
    given = list(parameters)
    optimizer = torch.optim.SGD(given, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_(given, 0.1))
    return optimizer


class TwoApart(torch.optim.Optimizer):
    """Consists of others, which do not have its groups."""

    def __init__(self, parameters: Any) -> None:
        given = list(parameters)
        super().__init__(given, {"lr": 0.1})
        self.parts = [torch.optim.SGD([p for p in given if p.ndim == n], lr=0.1) for n in (1, 2)]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


class FirstOnly(torch.optim.SGD):
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["params"][0].grad is not None
        super().step()


def with_buffers(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.averages = [torch.zeros_like(p) for p in optimizer.param_groups[0]["params"]]  # type: ignore[attr-defined]
    return optimizer


def by_values(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in parameters if float(p.norm()) > 0.1], lr=0.1)


def of_others(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([*parameters, nn.Parameter(torch.ones(1))], lr=0.1)


def split(parameters: Any) -> torch.optim.Optimizer:
    return FirstOnly([{"params": [p for p in parameters if p.ndim == n]} for n in (1, 2)], lr=0.1)


def with_unit_norm(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    @torch.no_grad()
    def normalise(own: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in (p for group in own.param_groups for p in group["params"]):
            parameter /= parameter.norm()

    optimizer.register_step_post_hook(normalise)
    return optimizer


def test_a_hook_that_needs_whole_parameters_is_refused_unless_the_job_says_so() -> None:
    with refused(ConfigError):
        check_optimizer(job(optimizer=with_unit_norm), device=CPU)
    check_optimizer(job(optimizer=with_unit_norm, elementwise=False), device=CPU)


UPDATES = itertools.count()


def counted_in_a_process(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def set_rate(own: torch.optim.Optimizer, *_: Any) -> None:
        own.param_groups[0]["lr"] = 0.1 / (1 + next(UPDATES))

    optimizer.register_step_pre_hook(set_rate)
    return optimizer


@pytest.mark.parametrize(
    "optimizer",
    [
        *(counted_in_a_process, Noisy, Averaging, Hiding, clipping, clipping_what_it_was_given, TwoApart),
        *(split, with_buffers, by_values, of_others),
    ],
    ids=lambda each: each.__name__,
)
def test_an_optimizer_that_needs_more_than_a_worker_has_is_refused(optimizer: Any) -> None:
    with pytest.raises(ConfigError):
        check_optimizer(job(optimizer=optimizer), device=CPU)
