"""Compilation of all layers of a job before a process takes part in training.

A worker may get any layer later, by a failure, a migration or a new plan, and no step is to wait for a compiler then.
Equal layers are compiled once, so a model has few that differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from chameleon_ft.data.samples import MASK
from chameleon_ft.errors import ConfigError
from chameleon_ft.job.job import Job
from chameleon_ft.keys import generators_kept
from chameleon_ft.models.optimizer import ModelOptimizer
from chameleon_ft.plan import LayerRange
from chameleon_ft.schedule import Operation, OperationKind
from chameleon_ft.trees import Boundary, BoundarySpec, is_differentiable, leaves_of
from chameleon_ft.worker.execution.backward import SavedActivations
from chameleon_ft.worker.execution.layers import HeldLayers
from chameleon_ft.worker.execution.micro_batches import MicroBatch


def compile_layers(
    job: Job, boundaries: Sequence[Boundary], micro_batch: Boundary, *, seed: int, device: torch.device
) -> None:
    """Run each kind of layer forward and backward, and in an evaluation, as a worker does; nothing is left of it.

    Args:
        boundaries: output of each layer.
        micro_batch: inputs and targets, as they are read.

    Raises:
        ConfigError: the named layer cannot be compiled.
    """
    read = MicroBatch(*micro_batch.unflatten([stand_in(leaf, device) for leaf in micro_batch.leaves]))
    if MASK in read.fields:
        read.fields[MASK].fill_(1)
    # All are initialised, which takes less time than reading them.
    job, optimizer, known = replace(job, weights=None), ModelOptimizer(job), set[object]()
    build = partial(HeldLayers, job, seed=seed, device=device, boundaries=boundaries, optimizer=optimizer)
    first_trained = build(()).first_trained
    with generators_kept(device):
        for layer, factory in enumerate(job.layers):
            before = boundaries[layer - 1] if layer else None
            has_gradient = layer > first_trained
            kind = id(factory), before, has_gradient, tuple(job.keywords(layer)), layer + 1 == job.num_layers
            if kind in known:
                continue
            known.add(kind)
            held = build([layer])
            boundary = read.input_of(job)
            if before is not None:
                leaves = [stand_in(leaf, device, has_gradient=has_gradient) for leaf in before.leaves]
                boundary = before.unflatten(leaves)
            try:
                _run(job, held, layer, boundary, read, boundaries)
            except ConfigError:
                raise
            except Exception as error:
                cause = getattr(error, "inner_exception", error)
                reason = str(cause).strip().partition("\n")[0]
                raise ConfigError(
                    f'layer {layer} cannot be compiled, as compile = "{job.compile.shapes}" asks for '
                    f"({type(cause).__name__}: {reason}); change what the compiler does not take, put it into a "
                    "function with @torch.compiler.disable, or leave compile out"
                ) from error


def stand_in(spec: BoundarySpec, device: torch.device, *, has_gradient: bool = False) -> Tensor:
    """Return a random tensor, or zeros, a value that every layer accepts, where the type is not floating-point."""
    make = torch.randn if is_differentiable(spec.dtype) else torch.zeros
    return make(spec.shape, dtype=spec.dtype, device=device, requires_grad=has_gradient and spec.has_gradient)


def _run(
    job: Job, held: HeldLayers, layer: int, boundary: object, read: MicroBatch, boundaries: Sequence[Boundary]
) -> None:
    layers, is_last = LayerRange(layer, layer + 1), layer + 1 == job.num_layers
    operation = Operation(OperationKind.FORWARD, 0, 0, layers, None, None, first=layer == 0, last=is_last)
    saved = SavedActivations(held, operation, step=0, num_layers=job.num_layers, fields=read.fields, terms=lambda: 1.0)
    output = saved.forward(boundary)
    gradients: list[Tensor | None] = [None]
    if is_last:
        differentiable = [leaf for leaf in leaves_of(output) if is_differentiable(leaf.dtype)]
        saved.end_in(torch.stack([leaf.float().sum() for leaf in differentiable]).sum())
    else:
        specs = boundaries[layer].leaves
        gradients = [stand_in(spec, leaves_of(output)[0].device) if spec.has_gradient else None for spec in specs]
    saved.backward(gradients)
    if job.evaluation is not None:
        with held.evaluating(), torch.no_grad():
            held.forward(layers, boundary, step=0, micro_batch=0, fields=read.fields)
