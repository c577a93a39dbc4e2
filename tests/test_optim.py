"""The optimizer and its learning rate."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from chameleon_ft.errors import ConfigError
from chameleon_ft.job.job import ModelParameters
from chameleon_ft.optim import (
    NO_DECAY,
    adamw,
    combined,
    constant,
    cosine,
    groups,
    linear,
    matrices,
    rate_shares,
    vectors,
    warmup_cosine,
    wsd,
)
from tests.golden import refused


def make_layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3, bias=False))


def set_gradients(layer: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_updates_are_those_of_the_plain_algorithm_with_decay_on_matrices_only() -> None:
    layer, plain = make_layer(), make_layer()
    optimizer = adamw(list(layer.parameters()), lr=0.1, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-6)
    state = [(torch.zeros_like(p), torch.zeros_like(p)) for p in plain.parameters()]
    for step in range(1, 4):
        set_gradients(layer, step)
        set_gradients(plain, step)
        optimizer.step()
        with torch.no_grad():
            for p, (mean, square) in zip(plain.parameters(), state, strict=True):
                assert p.grad is not None
                p.mul_(1 - 0.1 * (0.3 if p.ndim >= 2 else 0.0))
                mean.lerp_(p.grad, 0.2)
                square.lerp_(p.grad**2, 0.1)
                p.sub_(0.1 * (mean / (1 - 0.8**step)) / ((square / (1 - 0.9**step)).sqrt() + 1e-6))

    for ours, expected in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_state_moves_to_another_optimizer_of_the_same_layer() -> None:
    layer = make_layer()
    optimizer = adamw(list(layer.parameters()), lr=0.1)
    set_gradients(layer, 1)
    optimizer.step()

    other = copy.deepcopy(layer)
    moved = adamw(list(other.parameters()), lr=0.1)
    # A copy, as if it had come from another worker: torch keeps the very tensors that it is given.
    moved.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for model, optimizer_of_it in ((layer, optimizer), (other, moved)):
        set_gradients(model, 2)
        optimizer_of_it.step()

    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), other.parameters(), strict=True))
    tensors: list[Any] = [value for state in moved.state.values() for value in state.values()]
    assert all(isinstance(value, torch.Tensor) for value in tensors)


def test_a_layer_without_parameters_has_an_optimizer_too() -> None:
    adamw([], lr=0.1).step()


def test_the_rate_rises_linearly_and_falls_by_a_cosine() -> None:
    rates = [warmup_cosine(step, peak=1.0, floor=0.1, warmup_steps=4, total_steps=12) for step in range(14)]

    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[7] == pytest.approx(0.55)  # half way down
    assert rates[11:] == pytest.approx([0.1, 0.1, 0.1])
    assert rates[4] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 8)))


@given(
    step=st.integers(0, 10**6),
    peak=st.floats(1e-6, 1.0),
    share=st.floats(0, 1),
    warmup_steps=st.integers(0, 1000),
    total_steps=st.integers(1, 1000),
)
def test_the_rate_stays_within_its_bounds(
    step: int, peak: float, share: float, warmup_steps: int, total_steps: int
) -> None:
    floor = peak * share
    rate = warmup_cosine(step, peak=peak, floor=floor, warmup_steps=warmup_steps, total_steps=total_steps)

    lowest = peak / warmup_steps if step < warmup_steps else floor
    assert min(lowest, floor) * (1 - 1e-9) <= rate <= peak * (1 + 1e-9)
    if step >= max(warmup_steps, total_steps - 1):
        assert rate == pytest.approx(floor)


def test_a_run_of_one_step_without_warm_up_ends_at_the_floor() -> None:
    assert warmup_cosine(0, peak=1.0, floor=0.1, warmup_steps=0, total_steps=1) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("rates", "default", "expected"),
    [
        ([None], 0.1, [1.0]),
        ([0.01], 0.1, [1.0]),
        ([0.01, 1e-4], 1e-3, [1.0, 0.01]),
        ([1e-4, 0.01], 1e-3, [0.01, 1.0]),
        ([None, 1.0], 0.1, [1.0, 10.0]),
        ([None, 0.0], 0.0, [1.0, 1.0]),
    ],
)
def test_groups_keep_the_ratio_of_their_rates(rates: list[float | None], default: float, expected: list[float]) -> None:
    groups = [{"params": [nn.Parameter(torch.ones(1))]} | ({} if rate is None else {"lr": rate}) for rate in rates]
    assert rate_shares(torch.optim.SGD(groups, lr=default)) == pytest.approx(expected)


def named(layer: nn.Module) -> ModelParameters:
    return ModelParameters(layer.named_parameters())


def test_groups_have_the_options_of_all_that_choose_their_parameters_and_names_of_torch() -> None:
    layer = make_layer()
    made = torch.optim.AdamW(groups(named(layer), {vectors: NO_DECAY, "0.*": {"lr": 1.0}, "*.bias": {"lr": 2.0}}))
    found = {name: (group["lr"], group["weight_decay"]) for group in made.param_groups for name in group["param_names"]}
    rate, decay = made.defaults["lr"], made.defaults["weight_decay"]
    expected = {"0.weight": (1.0, decay), "0.bias": (2.0, 0.0), "1.weight": (rate, 0.0), "1.bias": (2.0, 0.0)}
    assert found == {**expected, "2.weight": (rate, decay)}
    assert len(made.param_groups) == 4
    assert {id(p) for group in made.param_groups for p in group["params"]} == set(map(id, layer.parameters()))


@pytest.mark.parametrize("options", [{"embedding*": NO_DECAY}, {lambda name, p: p.ndim == 3: NO_DECAY}], ids=["a", "b"])
def test_a_group_without_parameters_is_refused(options: Any) -> None:
    with refused(ConfigError):
        groups(named(make_layer()), options)


@pytest.mark.parametrize(
    "factories", [{matrices: torch.optim.Muon}, {"*": torch.optim.SGD, matrices: torch.optim.Muon}], ids=["some", "all"]
)
def test_each_parameter_has_one_optimizer_and_each_optimizer_parameters(factories: Any) -> None:
    with refused(ConfigError):
        combined(named(make_layer()), factories)


def test_schedules_rise_stay_and_fall_as_those_of_torch() -> None:
    def by_torch(decay: Any, *, stable: int, decay_steps: int) -> list[float]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=3)
        flat = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        last = decay(optimizer, decay_steps)
        parts = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, flat, last], [3, 3 + stable])
        rates = []
        for _ in range(14):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            parts.step()
        return rates

    def falling(optimizer: Any, steps: int) -> Any:
        return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)

    def cosine_of_torch(optimizer: Any, steps: int) -> Any:
        # It rises again after its end.
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda k: 0.1 + 0.9 * (1 + math.cos(math.pi * min(k, steps) / steps)) / 2
        )

    cases = [
        (linear(total_steps=12, warmup_steps=4, floor=0.1), by_torch(falling, stable=0, decay_steps=8)),
        (cosine(total_steps=12, warmup_steps=4, floor=0.1), by_torch(cosine_of_torch, stable=0, decay_steps=8)),
        (wsd(total_steps=12, warmup_steps=4, decay_steps=3, floor=0.1), by_torch(falling, stable=5, decay_steps=3)),
        (constant(warmup_steps=4), [0.25, 0.5, 0.75, *[1.0] * 11]),
    ]
    for schedule, expected in cases:
        assert [schedule(step) for step in range(14)] == pytest.approx(expected), schedule
    same = [warmup_cosine(step, peak=1.0, floor=0.1, warmup_steps=4, total_steps=12) for step in range(14)]
    assert [cases[1][0](step) for step in range(14)] == pytest.approx(same)
    assert wsd(total_steps=8, decay_steps=4, shape="sqrt")(5) == pytest.approx(1 - math.sqrt(0.5))


@pytest.mark.parametrize(
    "options", [{"total_steps": 5, "decay_steps": 6}, {"total_steps": 9, "decay_steps": 3, "floor": 2}]
)
def test_a_schedule_that_does_not_fit_is_refused(options: Any) -> None:
    with refused(ConfigError):
        wsd(**options)
