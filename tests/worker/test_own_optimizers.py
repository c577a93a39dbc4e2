"""Optimizers as jobs make them: on workers with some of the layers or slices they do what a plain torch loop does."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from chameleon_ft.config import Batch, Health, Parallel, Recovery, RunConfig, Snapshots
from chameleon_ft.job.job import Job, ModelParameters
from chameleon_ft.models.build import build_layer
from chameleon_ft.optim import NO_DECAY, combined, cosine, ema, groups, matrices, scheduler, vectors
from chameleon_ft.sync import Segment
from chameleon_ft.worker.checkpoint import CheckpointWriter, read_layer
from chameleon_ft.worker.execution.gradients import GradientBuffers
from chameleon_ft.worker.execution.layers import HeldLayers
from tests.configs import unhurried
from tests.harness import PATIENT, assert_as_the_plain_loop, fails
from tests.histories import train_until
from tests.worker.sliced import CPU, LAYERS, WHOLE, exchange, in_bf16, sharding
from tests.worker.toy import SEED, toy_job

STEPS = 5
JOINS = 2  # updates after which a worker gets a layer

Parameters = Sequence[nn.Parameter]


class Tagged(nn.Module):
    """Parameters of several sizes, of which one carries an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, 100)
        self.scale = nn.Parameter(torch.randn(130))
        self.up.weight.lr_scale = 10.0  # type: ignore[attr-defined]


def by_dimensions(own: Parameters) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in own if p.ndim >= 2], "weight_decay": 5.0},
        {"params": [p for p in own if p.ndim < 2], "weight_decay": 0.0, "lr": 1e-3},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def by_shape(own: Parameters) -> torch.optim.Optimizer:
    wide = {id(p) for p in own if p.shape[0] == 100}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in own if id(p) in wide], "momentum": 0.9},
        {"params": [p for p in own if id(p) not in wide]},
    ]
    return torch.optim.SGD(groups, lr=0.1)


def by_attribute(own: Parameters) -> torch.optim.Optimizer:
    return torch.optim.Adam([{"params": [p], "lr": 1e-3 * getattr(p, "lr_scale", 1.0)} for p in own])


def by_order(own: Parameters) -> torch.optim.Optimizer:
    ends: list[dict[str, Any]] = [{"params": own[:1], "lr": 0.3}, {"params": own[-1:], "lr": 0.2}]
    return torch.optim.SGD([*ends, {"params": own[1:-1]}], lr=0.1)


def with_numbers_left_out(own: Parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in own if p.ndim > 1], lr=0.1)


class ReadsAttributes(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * getattr(parameter, "lr_scale", 1.0) * parameter.grad


class Counting(torch.optim.Optimizer):
    """Counts its updates in its groups, on itself, and in an object of its own."""

    def __init__(self, own: Iterable[nn.Parameter]) -> None:
        super().__init__(own, {"lr": 0.1})
        self.counts: dict[str, list[int]] = {"all": [0]}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.k = getattr(self, "k", 0) + 1
        self.counts["all"][0] += 1
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rate = group["lr"] / (group["count"] + 10 * self.k + 100 * self.counts["all"][0])
                    parameter.sub_(rate * parameter.grad)


def scheduled(
    make: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler], own: Parameters
) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(own, lr=0.1, momentum=0.9)
    schedule = make(optimizer)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    return optimizer


def in_sequence(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    return lr_scheduler.SequentialLR(optimizer, [first, lr_scheduler.ExponentialLR(optimizer, 0.5)], milestones=[2])


def counted_in_a_closure(own: Parameters) -> torch.optim.Optimizer:
    optimizer, count = torch.optim.SGD(own, lr=1.0), 0

    def before(*_: Any) -> None:
        nonlocal count
        count += 1
        optimizer.param_groups[0]["lr"] = 1.0 / count

    optimizer.register_step_pre_hook(before)
    return optimizer


def counted_in_a_default(own: Parameters) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(own, lr=1.0)

    def before(*_: Any, counts: Any = {"n": 0}) -> None:  # noqa: B006
        counts["n"] += 1
        optimizer.param_groups[0]["lr"] = 1.0 / counts["n"]

    before.__kwdefaults__ = {"counts": {"n": 0}}
    optimizer.register_step_pre_hook(before)
    return optimizer


def counted_by_a_local_class(own: Parameters) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(own, lr=0.1, momentum=0.9)
    schedule = in_sequence(optimizer)

    class Stepping:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, *_: Any) -> None:
            self.calls += 1
            schedule.step()

    optimizer.register_step_post_hook(Stepping())
    return optimizer


def by_name(own: ModelParameters) -> torch.optim.Optimizer:
    made = groups(own, {vectors: NO_DECAY, "*.up.*": {"lr": 3e-3}, "0.*": {"lr": 0.1}})
    return torch.optim.AdamW(made, lr=1e-2, weight_decay=5.0)


def with_names(own: ModelParameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(own.named_parameters(), lr=1e-2)


class ByItsNames(torch.optim.SGD):
    """Updates a parameter by its name."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                parameter -= 0.1 * (int(name.partition(".")[0]) + 1) * parameter.grad


def by_its_names(own: ModelParameters) -> torch.optim.Optimizer:
    return ByItsNames(own.named_parameters(), lr=0.1)


class OfFlatState(torch.optim.SGD):
    """Keeps as many numbers as a parameter has, in another shape, and scales the update by the parameter's norm."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros(parameter.numel()).view(1, -1))
                mean.lerp_(parameter.grad.view(1, -1), 0.5)
                parameter -= group["lr"] * parameter.norm() * mean.view_as(parameter)


def muon_and_others(own: ModelParameters) -> torch.optim.Optimizer:
    return combined(
        own,
        {
            "0.*": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
            matrices: partial(torch.optim.Muon, lr=0.02),
            "*": lambda own: torch.optim.AdamW(groups(own, {"3.*": {"lr": 0.1}}), lr=1e-3),
        },
    )


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "by dimensions": by_dimensions,
    "by shape": by_shape,
    "by attribute": by_attribute,
    "by order": by_order,
    "some left out": with_numbers_left_out,
    "attributes in the update": partial(ReadsAttributes, lr=0.1),
    "counting": Counting,
    "LambdaLR": partial(scheduled, partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step))),
    "StepLR": partial(scheduled, partial(lr_scheduler.StepLR, step_size=2)),
    "SequentialLR": partial(scheduled, in_sequence),
    "a closure": counted_in_a_closure,
    "a default": counted_in_a_default,
    "a local class": counted_by_a_local_class,
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.5),
    "AdamW, fused": partial(torch.optim.AdamW, fused=True),
    "NAdam, foreach": partial(torch.optim.NAdam, foreach=True),
    "by name": by_name,
    "with names": with_names,
    "by its names": by_its_names,
    "Muon and others": muon_and_others,
    "Adafactor": torch.optim.Adafactor,
    "averaged": lambda own: ema(torch.optim.AdamW(own, lr=0.1), 0.5),
    "of a flat state": partial(OfFlatState, lr=0.1),
}


def own_job(name: str) -> Job:
    return replace(toy_job(LAYERS), layers=[Tagged] * LAYERS, optimizer=OPTIMIZERS[name], learning_rate=None)


def gradient(parameter: Tensor, step: int, layer: int, number: int) -> Tensor:
    return torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step * 1000 + layer * 10 + number))


def plainly(
    job: Job,
    steps: int = STEPS,
    make_schedule: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler] | None = None,
) -> list[list[Tensor]]:
    """Train all layers by torch alone; return the parameters of each. In bf16, masters are updated."""
    layers = [build_layer(job, layer, SEED) for layer in range(LAYERS)]
    optimizer = job.optimizer(ModelParameters(nn.Sequential(*layers).named_parameters()))
    schedule = None if make_schedule is None else make_schedule(optimizer)
    for step in range(steps):
        for layer, module in enumerate(layers):
            for number, parameter in enumerate(module.parameters()):
                parameter.grad = gradient(parameter, step, layer, number)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    dtype = torch.bfloat16 if job.precision.is_lower else torch.float32
    return [[parameter.detach().to(dtype) for parameter in module.parameters()] for module in layers]


def update(held: HeldLayers, step: int) -> None:
    GradientBuffers(held, [Segment((layer,), (0,)) for layer in sorted(held.layers)])  # type: ignore[arg-type]
    for layer in held.layers:
        for number, parameter in enumerate(held.parameters([layer])):
            assert parameter.grad is not None
            parameter.grad.copy_(gradient(parameter, step, layer, number))
    held.update(step)


def held_layers(job: Job, layers: Iterable[int]) -> HeldLayers:
    return HeldLayers(job, layers, seed=SEED, device=CPU)


def assert_trained(held: HeldLayers, expected: list[list[Tensor]]) -> None:
    for layer in held.layers:
        for one, other in zip(held.parameters([layer]), expected[layer], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("precise", [True, False], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_workers_with_some_layers_and_one_that_joins_train_as_plain_torch(name: str, precise: bool) -> None:
    job = own_job(name) if precise else in_bf16(own_job(name))
    workers = [held_layers(job, [0, 1]), held_layers(job, [2, 3, 4]), held_layers(job, ())]
    for step in range(STEPS):
        if step == JOINS:
            newcomer = held_layers(job, ())
            for layer in (1, 4):
                newcomer.take_in(layer, copy.deepcopy(workers[layer // 2 and 1].state_of(layer)))
            workers.append(newcomer)
        for each in workers:
            update(each, step)
    expected = plainly(job)
    for each in workers:
        assert_trained(each, expected)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slices_are_updated_as_plain_torch_updates_whole_parameters(name: str) -> None:
    job, owned, workers = own_job(name), sharding(3, 2), 3
    held = [HeldLayers(job, WHOLE, seed=SEED, device=CPU, owned=owned.owned_by(worker)) for worker in range(workers)]
    for step in range(STEPS):
        for each in held:
            update(each, step)
        exchange(held, owned)
    expected = plainly(job)
    for each in held:
        assert_trained(each, expected)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_has_all_that_the_optimizer_keeps(name: str, tmp_path: Path) -> None:
    job = own_job(name)
    held = held_layers(job, range(LAYERS))
    for step in range(JOINS):
        update(held, step)
    writer = CheckpointWriter(tmp_path, saved=lambda _: None, before_write=lambda _: None)
    writer.submit(0, JOINS, {layer: held.snapshot(layer) for layer in range(LAYERS)}, copy_s=0.0)
    assert writer.join(unless=lambda: False)
    resumed = held_layers(job, ())
    for layer in range(LAYERS):
        resumed.take_in(layer, read_layer(tmp_path, JOINS, layer))
    for step in range(JOINS, STEPS):
        update(resumed, step)
    assert_trained(resumed, plainly(job))


def one_cycle(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """Sets momentum as well as rates, those of each group."""
    return lr_scheduler.OneCycleLR(optimizer, [0.1, 0.01, 0.2], total_steps=STEPS)


SCHEDULES: dict[str, tuple[Any, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]]] = {
    "a function": (lambda step: 1 / (1 + step), partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step))),
    "cosine": (
        cosine(total_steps=4),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: (0.8535534, 0.5, 0.1464466, 0, 0, 0)[step]),
    ),
    "of torch": (scheduler(one_cycle), one_cycle),
    "in sequence": (scheduler(in_sequence), in_sequence),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_scales_the_rate_of_each_group_and_depends_on_the_step_alone(name: str) -> None:
    schedule, of_torch = SCHEDULES[name]
    job = replace(own_job("by order"), schedule=schedule)
    expected = plainly(job, make_schedule=of_torch)
    for layers in ([0, 1], [2, 3, 4]):  # one after the other: it begins again, as after a return to a checkpoint
        held = held_layers(job, layers)
        for step in range(STEPS):
            update(held, step)
        assert_trained(held, expected)


def test_averages_of_slices_are_those_of_torch() -> None:
    job, owned, workers = own_job("averaged"), sharding(3, 2), 3
    held = [HeldLayers(job, WHOLE, seed=SEED, device=CPU, owned=owned.owned_by(worker)) for worker in range(workers)]
    model = nn.Sequential(*(build_layer(job, layer, SEED) for layer in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    for step in range(STEPS):
        for each in held:
            update(each, step)
        exchange(held, owned)
        for layer, module in enumerate(model):
            for number, parameter in enumerate(module.parameters()):
                parameter.grad = gradient(parameter, step, layer, number)
        optimizer.step()
        averaged.update_parameters(model)
    expected = dict(averaged.module.named_parameters())
    for layer in range(LAYERS):
        found: dict[str, Tensor] = {}
        for each in held:
            for key, value in each.owned_state_of(layer).items():
                if match := re.fullmatch(r"optimizer/(.+)\[(\d+):(\d+)\]/ema", key):
                    whole = found.setdefault(match[1], torch.zeros_like(expected[f"{layer}.{match[1]}"]))
                    whole.view(-1)[int(match[2]) : int(match[3])] = value.reshape(-1)
        for name, average in found.items():
            torch.testing.assert_close(average, expected[f"{layer}.{name}"].detach())
        assert found.keys() == {name for name, _ in model[layer].named_parameters()}


def with_all_habits(own: Parameters) -> torch.optim.Optimizer:
    """Groups by shape and attribute, with rates of their own, and a scheduler."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in own if p.ndim > 1 and p.shape[0] == 9], "weight_decay": 5.0},
        {"params": [p for p in own if p.ndim > 1 and p.shape[0] != 9], "lr": 3e-3, "weight_decay": 0.0},
        {"params": [p for p in own if p.ndim <= 1], "lr": 1e-4 * getattr(own[-1], "lr_scale", 1.0)},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 4))
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    return optimizer


def tagged_head() -> nn.Module:
    head = toy_job(5).layers[-1]()
    for parameter in head.parameters():
        parameter.lr_scale = 10.0  # type: ignore[attr-defined]
    return head


def real_job() -> Job:
    job = toy_job(LAYERS, clip_norm=1.0)
    return replace(job, layers=[*job.layers[:-1], tagged_head], optimizer=with_all_habits, learning_rate=None)


@pytest.mark.multiprocess
def test_a_worker_that_comes_back_has_the_schedule_of_the_others(tmp_path: Path) -> None:
    config = RunConfig(
        job=f"{__file__}:real_job",
        workers=2,
        steps=100_000,
        seed=SEED,
        parallel=Parallel(dp=2, pp=1),
        batch=Batch(micro_batches=4, micro_batch_size=2),
        snapshots=Snapshots(every=0),
        timeouts=PATIENT,
        recovery=Recovery(policy="chameleon", respawn=True, respawn_delay_s=0.0, worker_mtbf_hours=1e6),
        health=Health(detect_slow=False, check_every=2),
        failures=(*unhurried(2), fails(1, step=3)),
    )
    ended = train_until(config, tmp_path / "run", lambda ended: ended.events("join"))
    assert not ended.events("state_differs")
    assert_as_the_plain_loop(ended, steps=200)
