"""The built-in Llama with parts that a drawn run has, and with held-out samples."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from benchmarks._sequence_draws import Part
from chameleon_ft import auxiliary_loss, log
from chameleon_ft.config import TrainConfig
from chameleon_ft.data import Buckets
from chameleon_ft.data.samples import IGNORED
from chameleon_ft.job.datasets import Dataset
from chameleon_ft.job.job import Job, ModelParameters
from chameleon_ft.models.llama import llama_job
from chameleon_ft.optim import NO_DECAY, combined, cosine, ema, groups, matrices, scheduler, vectors, wsd

_EXPERTS = 4
_RATE = 1e-3


def job(config: TrainConfig, *, parts: str = "") -> Job:
    """Return the job of the built-in Llama; `parts`: names of `Part`, with spaces between them."""
    own, drawn, given = llama_job(config), random.Random(config.seed), frozenset(parts.split())
    changes: dict[str, Any] = {"weights": None, "evaluation": own.dataset, "metrics": {"certainty": _certainty}}
    layers = list(own.layers)
    wrappers: dict[Part, Any] = {"routed": _Routed, "experts": _Experts}
    for part, wrapper in wrappers.items():
        if part in given:
            layers[1:-1] = [partial(wrapper, each, config.model.dim) for each in layers[1:-1]]
    if "trees" in given:
        first, *blocks, last = layers
        layers = [partial(_First, first), *(partial(_Between, each) for each in blocks), partial(_Last, last)]
        changes["tied"] = [[(layer, f"inner.{name}") for layer, name in copies] for copies in own.tied]
    if "frozen" in given:
        frozen = _frozen_layers(drawn, len(layers) - 1) - {layer for copies in own.tied for layer, _ in copies}
        layers = [partial(_frozen, each) if layer in frozen else each for layer, each in enumerate(layers)]
    if "optimizer" in given:
        changes |= _optimizer(drawn, config.steps)
    if "buckets" in given:
        lengths = tuple(config.model.seq_len * quarters // 4 for quarters in (1, 2, 4))
        changes["dataset"] = changes["evaluation"] = _Cut(own.dataset, lengths[-1])
        changes |= {"collate": Buckets(lengths), "loss_terms": _labels}
    if "stream" in given:
        changes["dataset"] = _Stream(changes.get("dataset", own.dataset))
    return replace(own, layers=layers, **changes)


def _certainty(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.log_softmax(-1).amax(-1)[targets != IGNORED].sum()


def _labels(targets: Tensor) -> Tensor:
    return (targets != IGNORED).sum()


# --- layers ----------------------------------------------------------------------------------------------------------


class _Routed(nn.Module):
    """A block, and a router after it with an auxiliary loss, and with biases that follow sums over the step.

    All is continuous, so rounding changes no choice.
    """

    step_sums = ("mass", "tokens")
    mass: Tensor
    tokens: Tensor
    bias: Tensor

    def __init__(self, block: Callable[[], nn.Module], dim: int) -> None:
        super().__init__()
        self.block = block()
        self.router = nn.Linear(dim, _EXPERTS, bias=False)
        self.values = nn.Parameter(torch.randn(_EXPERTS, dim) / dim)
        self.register_buffer("mass", torch.zeros(_EXPERTS), persistent=False)
        self.register_buffer("tokens", torch.zeros((), dtype=torch.int64))
        self.register_buffer("bias", torch.zeros(_EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        shares = (self.router(x) + self.bias).softmax(-1)
        loads = shares.flatten(0, -2).float()
        self.mass += loads.detach().sum(0)
        self.tokens += len(loads)
        auxiliary_loss(0.1 * loads.mean(0).square().sum(), terms=1)
        auxiliary_loss(1e-3 * loads.square().sum())
        log("largest_load", loads.mean(0).max())
        routed: Tensor = shares @ self.values
        return x + routed

    def after_step(self, sums: Mapping[str, Tensor]) -> None:
        self.bias += 0.1 * (1 / _EXPERTS - sums["mass"] / sums["tokens"])


class _Experts(nn.Module):
    """A block, and a mixture of experts after it: each token goes to one, and an expert without tokens does not run."""

    def __init__(self, block: Callable[[], nn.Module], dim: int) -> None:
        super().__init__()
        self.block = block()
        self.choice = nn.Linear(dim, 2 * _EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2 * _EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        tokens = x.flatten(0, -2)
        weights, chosen = self.choice(tokens).softmax(-1).max(-1)
        output = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            places = (chosen == number).nonzero().squeeze(-1)
            if len(places):
                output = output.index_add(0, places, weights[places, None] * expert(tokens[places]))
        return x + output.view_as(x)


@dataclass(frozen=True)
class _Passed:
    """The tree between layers: `first` is the output of layer 0, which all later ones use, and is returned twice."""

    x: Any
    first: Any
    ids: Any
    is_space: Any


class _First(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.inner = layer()

    def forward(self, ids: Tensor) -> _Passed:
        x = self.inner(ids)
        return _Passed(x, x, ids, ids == ord(" "))


class _Between(_First):
    def forward(self, passed: _Passed) -> _Passed:  # type: ignore[override]
        scale = 0.1 + 1e-4 * passed.ids.unsqueeze(-1)
        others = (scale * passed.first).masked_fill(passed.is_space.unsqueeze(-1), 0.0)
        return replace(passed, x=self.inner(passed.x) + others.to(passed.x.dtype))


class _Last(_First):
    def forward(self, passed: _Passed) -> Tensor:  # type: ignore[override]
        logits: Tensor = self.inner(passed.x + passed.first)
        return logits


def _frozen_layers(drawn: random.Random, last: int) -> set[int]:
    first_trained = drawn.choice([0, 1, last // 2, last])
    return {*range(first_trained), *(layer for layer in range(1, last) if drawn.random() < 0.3)}


def _frozen(factory: Callable[[], nn.Module]) -> nn.Module:
    return factory().requires_grad_(False)


# --- optimizers and data ---------------------------------------------------------------------------------------------


def _optimizer(drawn: random.Random, steps: int) -> dict[str, Any]:
    """Return a drawn optimizer with its schedule and with clipping by value."""
    schedules: list[Any] = [
        cosine(total_steps=steps, warmup_steps=2),
        wsd(total_steps=steps, decay_steps=steps // 2),
        scheduler(lr_scheduler.ExponentialLR, gamma=0.9),
        lambda step: 1 / (1 + step),
    ]
    return {
        "optimizer": drawn.choice([_by_name, _of_matrices, _averaged]),
        "learning_rate": None,
        "schedule": drawn.choice(schedules),
        "clip_value": drawn.choice([None, 0.01]),
    }


def _by_name(own: ModelParameters) -> torch.optim.Optimizer:
    made = groups(own, {vectors: NO_DECAY, "*.attention.*": {"lr": 3 * _RATE}, "*.output.weight": {"lr": 2 * _RATE}})
    return torch.optim.AdamW(made, lr=_RATE, weight_decay=0.1)


def _of_matrices(own: ModelParameters) -> torch.optim.Optimizer:
    # Muon rounds to bfloat16, so it would make more of sums in another order than the tolerance allows.
    others = partial(torch.optim.AdamW, lr=_RATE)
    return combined(own, {"0.*": others, matrices: partial(torch.optim.Adafactor, lr=_RATE), "*": others})


def _averaged(own: ModelParameters) -> torch.optim.Optimizer:
    return ema(torch.optim.AdamW(own.named_parameters(), lr=_RATE), 0.9)


@dataclass(frozen=True)
class _Cut:
    """The samples of a dataset, each cut to a length of its own."""

    dataset: Dataset
    most: int

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        length = 2 + index * 7 % (self.most - 1)
        inputs, targets = self.dataset[index]
        return inputs[:length], targets[:length]


@dataclass
class _Stream:
    """The samples of a map-style dataset in the order of their numbers, with the next number as the state."""

    dataset: Dataset
    next: int = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.next < len(self.dataset):
            self.next += 1
            yield self.dataset[self.next - 1]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]
