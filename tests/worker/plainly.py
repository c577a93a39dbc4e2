"""Torch's own loop beside runs of small jobs, and the job of runs that are about their samples: of next tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from chameleon_ft.job.job import Job
from chameleon_ft.keys import init_key


def built(factories: Sequence[Callable[[], nn.Module]], seed: int = 0) -> list[Any]:
    """Return the layers with the weights that a run begins with."""
    layers = []
    for number, factory in enumerate(factories):
        torch.manual_seed(init_key(seed, number))
        layers.append(factory())
    return layers


def losses_of(
    factories: Sequence[Callable[[], nn.Module]],
    optimizer: Callable[..., torch.optim.Optimizer],
    batches: Iterable[Any],
    mean: Callable[[list[Any], Any], Tensor],
) -> list[float]:
    """Train on whole batches by a loss of (layers, batch), as anyone would, and return the losses."""
    layers, losses = built(factories), []
    made = optimizer(nn.ModuleList(layers).parameters())
    for batch in batches:
        loss = mean(layers, batch)
        made.zero_grad()
        loss.backward()
        made.step()
        losses.append(loss.item())
    return losses


_LAYERS: list[Callable[[], nn.Module]] = [
    partial(nn.Embedding, 16, 8),
    partial(nn.Linear, 8, 8),
    partial(nn.Linear, 8, 16),
]
_SGD = partial(torch.optim.SGD, lr=0.5)


def next_tokens(dataset: Any) -> Job:
    """Return the job of samples of (tokens, next tokens), which are less than 16."""

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")

    return Job(layers=_LAYERS, loss=loss, loss_terms=Tensor.numel, dataset=dataset, optimizer=_SGD)


def losses_of_next_tokens(batches: Iterable[Sequence[tuple[Tensor, Tensor]]]) -> list[float]:
    """Return the losses of training that job on batches of samples."""

    def mean(layers: list[Any], batch: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        inputs, targets = (torch.stack(each) for each in zip(*batch, strict=True))
        return functional.cross_entropy(nn.Sequential(*layers)(inputs).flatten(0, 1), targets.flatten())

    return losses_of(_LAYERS, _SGD, batches, mean)
