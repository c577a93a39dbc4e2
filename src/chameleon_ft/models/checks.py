"""Checks of the functions of a job by a call or two of each, before any worker is started."""

from __future__ import annotations

import math
from collections import defaultdict
from hashlib import blake2b
from typing import Any, Final

import torch
from torch import Tensor, nn

from chameleon_ft.data.order import SampleOrder, read_sample
from chameleon_ft.data.samples import load_micro_batch
from chameleon_ft.errors import ConfigError
from chameleon_ft.job import BoundarySpec, Job
from chameleon_ft.keys import generator_lock
from chameleon_ft.models.build import build_on_meta
from chameleon_ft.models.precision import loss_of, terms_of

__all__ = [
    "SampleReads",
    "check_learning_rate",
    "check_loss",
    "check_separate_parameters",
]

_READ_SAMPLES: Final = 4  # each twice before a run, which may be slow to read


class SampleReads:
    """The first samples of a run, read once, to see later whether they come out the same again."""

    def __init__(self, job: Job, seed: int) -> None:
        self._job, self._seed = job, seed
        size = len(job.dataset)
        self._digests = {
            index: self._digest(index) for index in SampleOrder(size, seed).ids(0, min(_READ_SAMPLES, size))
        }

    def check(self) -> None:
        """Read each sample again. Raises ConfigError if one differs."""
        for index, before in self._digests.items():
            if self._digest(index) != before:
                raise ConfigError(
                    f"`dataset` reads sample {index} differently each time, but workers read it separately, for the "
                    "inputs and for the targets, and again after a failure; draw with Python's `random`, "
                    "`numpy.random` or torch's functions, whose global generators are seeded for each read of a "
                    "sample, instead of a generator of its own, the clock or a count of reads"
                )

    def _digest(self, index: int) -> bytes:
        sample: Any = read_sample(self._job.dataset, index, seed=self._seed)
        # Others than pairs of tensors are refused elsewhere.
        tensors = [each for each in sample if isinstance(each, Tensor)] if isinstance(sample, tuple) else []
        found = [(str(each.dtype), each.shape, _bytes_of(each)) for each in tensors]
        return blake2b(repr(found).encode()).digest()


def _bytes_of(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def check_separate_parameters(job: Job) -> None:
    """Build the layers on the meta device, those with the same factory at most twice.

    Raises:
        ConfigError: two layers have the same trained parameter, without being tied.
    """
    modules: list[nn.Module] = []  # kept, so that no other parameter gets the id of one
    places: dict[int, tuple[int, str]] = {}
    builds: dict[int, int] = defaultdict(int)
    for layer, factory in enumerate(job.layers):
        builds[id(factory)] += 1
        if builds[id(factory)] > 2:
            continue
        modules.append(build_on_meta(job, layer))
        for name, parameter in modules[-1].named_parameters():
            first = places.setdefault(id(parameter), (layer, name))
            are_tied = any({first, (layer, name)}.issubset(copies) for copies in job.tied)
            if parameter.requires_grad and first[0] != layer and not are_tied:
                raise ConfigError(
                    f"layers {first[0]} and {layer} share the parameter {name!r}, of which each worker would train a "
                    "copy of its own; let each factory build its own parameters, and name the copies that are to stay "
                    "equal in the job's `tied`"
                )


def check_loss(job: Job, output: BoundarySpec, micro_batch_size: int, *, device: torch.device, seed: int = 0) -> None:
    """Compute the loss of the first micro-batch, of random numbers as the output of the last layer.

    Raises:
        ConfigError: `loss` or `loss_terms` cannot be called, or returns something else than it should.
    """
    _, targets = load_micro_batch(job.dataset, SampleOrder(len(job.dataset), seed), 0, micro_batch_size)
    targets = targets.to(device)
    with generator_lock, torch.random.fork_rng(devices=[]):
        made = torch.rand(output.shape).to(device=device, dtype=output.dtype)
        made.requires_grad_(made.is_floating_point() or made.is_complex())
        try:
            loss: Any = loss_of(job, made, targets)
            terms_of(job, targets)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"the loss of an output of shape {output.shape} and targets of shape {tuple(targets.shape)} cannot be "
                f"computed ({type(error).__name__}: {error}); check that `loss` takes the output of the last layer and "
                "the stacked targets, and `loss_terms` the targets"
            ) from error
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(
            f"`loss` returned {found}: it returns the sum of the loss terms of a micro-batch, a tensor of one number; "
            'give torch\'s losses reduction="sum"'
        )
    if not loss.requires_grad:
        raise ConfigError(
            "`loss` returned a number that has no gradient by the output of the last layer, so nothing would be "
            "trained; compute it from the output, without detach() or no_grad()"
        )


def check_learning_rate(job: Job) -> None:
    """Call `learning_rate` for the first step. Raises ConfigError unless it returns a rate."""
    if job.learning_rate is None:
        return
    rate: Any = job.learning_rate(0)
    try:
        is_rate = math.isfinite(rate) and rate >= 0
    except (TypeError, ValueError, RuntimeError):
        is_rate = False
    if not is_rate:
        raise ConfigError(
            f"`learning_rate` returned {rate!r:.60} for step 0: it returns the rate, a number of 0 or more"
        )
