"""A small job with every kind of layer that the runtime must not care about, and the plain loop that it is held to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from chameleon_ft.config import Batch
from chameleon_ft.data import SampleOrder
from chameleon_ft.data.samples import load_micro_batch
from chameleon_ft.job.job import Job
from chameleon_ft.models.build import build_layer, seed_forward
from chameleon_ft.models.checks import boundary_specs
from chameleon_ft.side_outputs import auxiliary_loss, log
from chameleon_ft.worker.context import RankContext
from chameleon_ft.worker.control_client import Activity
from chameleon_ft.worker.fault_injection import FaultInjector

WIDTH, IDS, SEED = 6, 9, 11


class Mixed(nn.Module):
    """Weights of two element types, of which some are frozen, and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.fine = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64) / 3)
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.dropout(torch.tanh(self.inner(x)) * self.fine.to(x.dtype) + self.frozen)
        return x + change


class Constant(nn.Module):
    """Does not depend on what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        # By a value, as a gate would: a layer that never passes a gradient on is refused.
        return x if float(x.detach().abs().sum()) < 0 else self.value.expand_as(x)


class Routed(nn.Module):
    """Two experts with a router, and biases that level their loads. An auxiliary loss depends on parameters alone."""

    step_sums = ("load", "mass")
    load: Tensor
    mass: Tensor
    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("load", torch.zeros(2, dtype=torch.int64), persistent=False)
        self.register_buffer("mass", torch.zeros(()))
        self.register_buffer("bias", torch.zeros(2))
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.value = nn.Parameter(torch.randn(WIDTH) / 3)
        self.only = nn.Parameter(torch.randn(WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        shares, scale = self.router(x).softmax(-1), self.value.exp()
        for value, terms in self._auxiliary(shares, scale):
            auxiliary_loss(value, terms=terms)
        log("share", shares[..., 0].mean())
        log("positive", (x > 0).float().mean(), weight=float((x > 0).sum()))
        chosen = functional.one_hot((shares.detach() + self.bias).argmax(-1), 2)
        self.load += chosen.flatten(0, -2).sum(0)
        self.mass += shares.detach().max(-1).values.sum()
        parts = [each[..., None] * own(x) for each, own in zip((shares * chosen).unbind(-1), self.experts, strict=True)]
        return x + torch.tanh((parts[0] + parts[1]) * scale)

    def after_step(self, sums: Mapping[str, Tensor]) -> None:
        load = sums["load"].float()
        self.bias += 0.1 * (load.mean() - load).sign() + 1e-3 * sums["mass"]

    def auxiliary(self, x: Tensor) -> list[tuple[Tensor, float | None]]:
        """Return the losses that its forward adds, each with its terms."""
        return self._auxiliary(self.router(x).softmax(-1), self.value.exp())

    def _auxiliary(self, shares: Tensor, scale: Tensor) -> list[tuple[Tensor, float | None]]:
        chosen = float((shares.detach()[..., 0] > 0.5).sum())
        return [
            (shares.flatten(0, -2).mean(0).square().sum(), None),
            (shares[..., 0].square().sum(), chosen),
            ((scale * self.only).square().sum(), 1.0),
        ]


class Penalised(nn.Module):
    """Has nothing but an auxiliary loss."""

    def forward(self, x: Tensor) -> Tensor:
        auxiliary_loss(self.auxiliary(x)[0][0])
        return x.relu()

    def auxiliary(self, x: Tensor) -> list[tuple[Tensor, float | None]]:
        return [(x.square().mean(), None)]


class Samples:
    """(ids, classes), of which some count for nothing: micro-batches have different numbers of loss terms."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(index)
        ids = torch.randint(IDS, (3,), generator=random)
        return ids, torch.where(torch.arange(3) < index % 3, -1, ids)


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")


def loss_terms(targets: Tensor) -> int:
    return int((targets >= 0).sum())


def toy_rank(
    job: Job, *, worker: int = 0, micro_batch_size: int = 2, faults: FaultInjector | None = None, **changes: Any
) -> RankContext:
    """What the parts of a rank on a CPU share, without failures unless some are given."""
    no_log: Any = None
    return RankContext(
        worker=worker,
        job=job,
        boundaries=boundary_specs(job, micro_batch_size),
        device=torch.device("cpu"),
        activity=Activity(),
        faults=faults or FaultInjector(worker, (), log=no_log, disconnect=lambda: None),
        **changes,
    )


def toy_job(
    layers: int,
    *,
    clip_norm: float | None = None,
    constant_at: int | None = None,
    tied: bool = False,
    kinds: Sequence[Callable[[], nn.Module]] = (Mixed, nn.ReLU, Mixed),
) -> Job:
    """A job of any number of layers; with one layer it is all in one. Tied, its first and its last share a matrix."""
    head = partial(nn.Linear, WIDTH, IDS)
    inner = [kinds[layer % len(kinds)] for layer in range(layers - 2)]
    factories: list[Callable[[], nn.Module]]
    if layers == 1:
        factories = [lambda: nn.Sequential(nn.Embedding(IDS, WIDTH), head())]
    else:
        factories = [partial(nn.Embedding, IDS, WIDTH), *inner, head]
    if constant_at is not None:
        factories[constant_at] = Constant
    return Job(
        layers=factories,
        loss=loss,
        loss_terms=loss_terms,
        dataset=Samples(),
        optimizer=partial(torch.optim.AdamW, lr=0.05, eps=1e-2),  # where gradients are rounding, no sign of theirs
        learning_rate=lambda step: 0.05 / (step + 1),
        clip_norm=clip_norm,
        tied=(((0, "weight"), (layers - 1, "weight")),) if tied else (),
    )


def examined(job: Job, micro_batch_size: int) -> Job:
    """Return the job with what its examination finds that layers give beside their output."""
    side: dict[int, tuple[str, ...]] = {}
    boundary_specs(job, micro_batch_size, side=side)
    return replace(job, side_outputs=tuple(side.values()))


@dataclass
class PlainStep:
    """One step of the plain loop: its loss, norm, and gradients and weights by layer and name."""

    loss: float
    auxiliary: float
    terms: float
    grad_norm: float
    gradients: dict[tuple[int, str], Tensor]
    weights: dict[tuple[int, str], Tensor]
    sums: dict[tuple[int, str], Tensor] = field(default_factory=dict)


def train_plainly(job: Job, batch: Batch, steps: int) -> list[PlainStep]:
    """The loop that anybody would write, with the keys of the job's random numbers."""
    layers = [build_layer(job, layer, SEED).train() for layer in range(job.num_layers)]
    if job.tied:
        layers[-1].weight = layers[0].weight
    named = {
        (number, name): parameter
        for number, layer in enumerate(layers)
        for name, parameter in layer.named_parameters()
        if parameter.requires_grad
    }
    parameters = list({id(parameter): parameter for parameter in named.values()}.values())
    optimizer = job.optimizer(parameters)
    order = SampleOrder(len(job.dataset), SEED)
    done = []
    for step in range(steps):
        optimizer.zero_grad()
        total, auxiliary, terms = 0.0, 0.0, 0.0
        for micro_batch in range(batch.micro_batches):
            inputs, targets = load_micro_batch(
                job.dataset, order, _first(batch, step, micro_batch), batch.micro_batch_size
            )
            own_terms, more = float(job.loss_terms(targets)), torch.zeros(())
            for number, layer in enumerate(layers):
                if isinstance(layer, Routed | Penalised):
                    found = layer.auxiliary(inputs)
                    more = more + sum(
                        own if count is None else own * own_terms / count for own, count in found if count != 0
                    )
                seed_forward(SEED, step=step, micro_batch=micro_batch, layer=number)
                inputs = layer(inputs)
            value = job.loss(inputs, targets) + more
            value.backward()
            total += value.item()
            auxiliary += more.item()
            terms += own_terms
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad /= terms
        norm = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in parameters])
        )
        if job.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, job.clip_norm)
        gradients = {key: p.grad.clone() for key, p in named.items() if p.grad is not None}
        assert job.learning_rate is not None
        for group in optimizer.param_groups:
            group["lr"] = job.learning_rate(step)
        optimizer.step()
        weights = {key: p.detach().clone() for key, p in named.items()}
        sums: dict[tuple[int, str], Tensor] = {}
        for number, layer in enumerate(layers):
            if isinstance(layer, Routed):
                own = {"load": layer.load.clone(), "mass": layer.mass.clone()}
                sums |= {(number, name): total for name, total in own.items()}
                layer.load.zero_()
                layer.mass.zero_()
                with torch.no_grad():
                    layer.after_step(own)
        done.append(PlainStep(total / terms, auxiliary / terms, terms, float(norm), gradients, weights, sums))
    return done


def _first(batch: Batch, step: int, micro_batch: int) -> int:
    return step * batch.samples + micro_batch * batch.micro_batch_size
