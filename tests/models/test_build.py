"""Layers are equal in every process, and sizes are those of the built layers."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from chameleon_ft.errors import ConfigError
from chameleon_ft.job.job import Job
from chameleon_ft.models.build import (
    blank_layer,
    build_layer,
    digests_beside_state,
    layers_built_in_full,
    param_bytes,
    seed_forward,
)
from chameleon_ft.models.llama import llama_layers, next_token_loss
from chameleon_ft.models.optimizer import state_bytes
from chameleon_ft.optim import adamw
from tests.golden import refused
from tests.models.jobs import CONFIG, LLAMA, Zeros, make_job


def test_a_layer_has_the_same_weights_whenever_it_is_built() -> None:
    first = [build_layer(LLAMA, layer, 7) for layer in range(4)]
    second = [build_layer(LLAMA, layer, 7) for layer in (3, 1, 0, 2)]
    again = [second[2], second[1], second[3], second[0]]

    for one, other in zip(first, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


class Keeping(nn.Module):
    """Keeps what `keep` computes from its weights."""

    def __init__(self, keep: Callable[[Keeping, Tensor], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 3))
        nn.init.normal_(self.weight)
        self.inner = nn.Identity()
        keep(self, self.weight.detach())

    def mask(self, value: Tensor, *, persistent: bool = False) -> None:
        self.register_buffer("kept", value, persistent=persistent)


def in_float64(layer: Keeping) -> None:
    """Make a parameter while torch's default type is another one, in all threads."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        layer.other = nn.Parameter(torch.zeros(3))
    finally:
        torch.set_default_dtype(default)


@pytest.mark.parametrize(
    ("keep", "is_built"),
    [
        (lambda layer, weight: layer.mask(weight.clone()), True),
        (lambda layer, weight: layer.mask(weight.abs() > 0.5), True),
        (lambda layer, weight: layer.mask((weight * 100).int()), True),
        (lambda layer, weight: setattr(layer, "kept", float(weight.std())), True),
        (lambda layer, weight: setattr(layer.inner, "kept", {"mask": (weight[0].tolist(),)}), True),
        (lambda layer, weight: setattr(layer, "kept", weight.numpy().argsort()), True),
        (lambda layer, weight: setattr(layer, "kept", (lambda mask: lambda x: x * mask)(weight > 0)), True),
        (lambda layer, weight: setattr(layer, "kept", [nn.Parameter(weight.clone(), requires_grad=False)]), True),
        (lambda layer, weight: setattr(layer, "kept", round(float(weight.abs().max()))), True),
        (lambda layer, weight: layer.mask(torch.randn(3)), True),
        (lambda layer, weight: setattr(layer, "kept", bool(random.random())), True),
        (lambda layer, weight: in_float64(layer), True),
        (lambda layer, weight: prune.l1_unstructured(layer, "weight", amount=0.5), True),
        (lambda layer, weight: layer.mask(weight > 0, persistent=True), False),
        (lambda layer, weight: layer.mask(torch.arange(3.0)), False),
        (lambda layer, weight: setattr(layer, "kept", [layer.weight, layer.inner, threading.Lock()]), False),
        (lambda layer, weight: parametrizations.weight_norm(layer), False),
    ],
)
def test_a_layer_is_built_in_full_if_more_than_its_state_depends_on_its_weights(
    keep: Callable[[Keeping, Tensor], None], is_built: bool
) -> None:
    job = make_job([nn.Identity, partial(Keeping, keep), nn.Identity], Zeros(3))
    state = torch.default_generator.get_state()
    assert layers_built_in_full(job, 7) == ((1,) if is_built else ())
    for known in (None, layers_built_in_full(job, 7)):
        blank = blank_layer(replace(job, built_in_full=known), 1, 7)
        assert torch.equal(torch.default_generator.get_state(), state)
        built = build_layer(job, 1, 7)
        assert digests_beside_state(blank) == digests_beside_state(built)
        assert any(parameter.isnan().any() for parameter in blank.parameters()) is not is_built


def test_a_layer_whose_state_comes_from_elsewhere_is_not_drawn() -> None:
    for layer in range(4):
        blank, built = blank_layer(LLAMA, layer, 7), build_layer(LLAMA, layer, 7)

        assert all(parameter.isnan().all() for parameter in blank.parameters() if parameter.ndim == 2)
        blank.load_state_dict(built.state_dict())
        for (name, one), (_, other) in zip(blank.named_buffers(), built.named_buffers(), strict=True):
            assert torch.equal(one, other), name


def test_layers_and_seeds_differ_in_their_weights() -> None:
    def query(layer: int, seed: int) -> Tensor:
        return build_layer(LLAMA, layer, seed).get_parameter("attention.query.weight")

    assert not torch.equal(query(1, 7), query(2, 7))
    assert not torch.equal(query(1, 7), query(1, 8))


def test_building_leaves_the_callers_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    build_layer(LLAMA, 1, 7)

    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_dropout_of_a_layer_depends_only_on_its_step_and_micro_batch(layer: int) -> None:
    inputs = torch.ones(2, 8, dtype=torch.int64) if layer == 0 else torch.ones(2, 8, 16)

    def run(step: int, micro_batch: int, *, draws_before: int) -> Tensor:
        module = build_layer(LLAMA, layer, 7)
        torch.rand(draws_before)
        seed_forward(7, step=step, micro_batch=micro_batch, layer=layer)
        output: Tensor = module(inputs)
        return output

    expected = run(5, 1, draws_before=0)
    assert torch.equal(run(5, 1, draws_before=11), expected)
    assert not torch.equal(run(6, 1, draws_before=0), expected)
    assert not torch.equal(run(5, 2, draws_before=0), expected)


def test_dropout_drops_in_training_only_and_by_its_share() -> None:
    embedding = build_layer(LLAMA, 0, 0)
    ids = torch.arange(50).repeat(40, 1)
    dropped = embedding(ids) == 0

    assert float(dropped.float().mean()) == pytest.approx(0.5, abs=0.02)
    assert not (embedding.eval()(ids) == 0).any()


def test_complex_parameters_are_refused_if_they_are_trained() -> None:
    class Rotated(nn.Module):
        def __init__(self, *, trained: bool) -> None:
            super().__init__()
            self.angle = nn.Parameter(torch.ones(4, dtype=torch.complex64), requires_grad=trained)

    with refused(ConfigError):
        param_bytes(make_job([partial(Rotated, trained=True)], Zeros(4)))
    assert param_bytes(make_job([partial(Rotated, trained=False)], Zeros(4))) == (32,)


def test_a_parameter_whose_sum_of_gradients_is_changed_by_a_hook_is_refused() -> None:
    """The sum at that moment depends on the plan."""

    class Clipped(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.weight.register_post_accumulate_grad_hook(lambda parameter: None)

    with refused(ConfigError):
        param_bytes(make_job([nn.Identity, Clipped], Zeros(4)))


def test_a_layer_without_sizes_is_refused() -> None:
    with refused(ConfigError):
        param_bytes(make_job([nn.Identity, partial(nn.LazyLinear, 4)], Zeros(4)))


def test_a_factory_that_fails_is_named() -> None:
    def broken() -> nn.Module:
        raise RuntimeError("no weights here")

    with refused(ConfigError):
        param_bytes(make_job([nn.Identity, broken], Zeros(4)))


def test_parameter_bytes_are_those_of_the_built_layers() -> None:
    expected = [sum(p.nbytes for p in build_layer(LLAMA, layer, 0).parameters()) for layer in range(4)]

    assert list(param_bytes(LLAMA)) == expected


class Buffered(nn.Module):
    """Has a weight that is trained and one that is not, and a buffer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.zeros(3, 5))
        self.frozen = nn.Parameter(torch.zeros(7), requires_grad=False)
        self.register_buffer("kept", torch.zeros(11))
        self.register_buffer("made", torch.zeros(13), persistent=False)

    def forward(self, boundary: Tensor) -> Tensor:
        return boundary * self.trained.sum()


def _adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return adamw(parameters, lr=0.1)


def _momentum(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _amsgrad(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, amsgrad=True, fused=True)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, _momentum, torch.optim.AdamW, _adamw, _amsgrad])
def test_the_state_of_a_layer_is_that_of_torch_after_a_step(optimizer: Any) -> None:
    job = Job(
        layers=(*llama_layers(CONFIG), Buffered, nn.Identity),
        loss=next_token_loss,
        dataset=Zeros(8),
        optimizer=optimizer,
    )
    expected = []
    for layer in range(job.num_layers):
        module = build_layer(job, layer, 0)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.grad = torch.ones_like(parameter)
        kept: list[Tensor] = []
        if trained:
            used = optimizer(trained)
            used.step()
            kept = [value for own in used.state.values() for value in own.values() if isinstance(value, Tensor)]
        expected.append(sum(tensor.nbytes for tensor in [*module.state_dict().values(), *kept]))
    assert list(state_bytes(job)) == expected


class _Unable(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise NotImplementedError("only on a device")


def test_an_optimizer_that_makes_no_step_here_is_taken_to_keep_nothing() -> None:
    job = Job(layers=[Buffered], loss=next_token_loss, dataset=Zeros(8), optimizer=_Unable)
    assert state_bytes(job) == (4 * (3 * 5 + 7 + 11),)
