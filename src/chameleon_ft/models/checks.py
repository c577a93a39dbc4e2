"""Checks of the functions of a job by a call or two of each, before any worker is started."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from threading import Timer
from typing import Any, Final

import torch
from torch import Tensor, nn

from chameleon_ft.data.order import SampleOrder, read_sample
from chameleon_ft.data.samples import load_micro_batch
from chameleon_ft.errors import ConfigError
from chameleon_ft.job import BoundarySpec, Job
from chameleon_ft.job_record import Fact, JobRecord
from chameleon_ft.keys import generator_lock
from chameleon_ft.models.build import build_on_meta
from chameleon_ft.models.job_record import sketch
from chameleon_ft.models.kept import content_of, digest
from chameleon_ft.models.outputs import untracked_leaf
from chameleon_ft.models.precision import loss_of, terms_of

_ALIKE: Final = 1e-3  # relative
_READ_SAMPLES: Final = 4  # at least, each twice before a run, which may be slow to read
_RECORDED_SAMPLES: Final = 64  # at most, within this time
_READING_S: Final = 1.0
_TOLD_S: Final = 10.0  # after which a single read is reported, as in a run


class SampleReads:
    """The first samples of a run, read once, to see later whether they come out the same again.

    Args:
        most: number of samples to read; fewer if they are slow to read.

    Attributes:
        facts: the number of samples of the data set, and sketches of those that were read.
    """

    def __init__(self, job: Job, seed: int, *, most: int = _RECORDED_SAMPLES) -> None:
        self._job, self._seed = job, seed
        self._contents: dict[int, list[bytes]] = {}
        size, begun_s = len(job.dataset), time.monotonic()
        self.facts: dict[str, Fact] = {"number of samples": size}
        for number, index in enumerate(SampleOrder(size, seed).ids(0, min(most, size))):
            if number >= _READ_SAMPLES and time.monotonic() - begun_s > _READING_S:
                break
            tensors = self._tensors(index)
            self._contents[index] = _contents(tensors)
            names = (f"input of sample {index}", f"target of sample {index}")
            self.facts |= dict(zip(names, map(sketch, tensors), strict=False))

    def require(self, facts: Mapping[str, Fact]) -> None:
        """Raise ConfigError if the samples that were read are others than those of `facts`, of another process."""
        for change in JobRecord(data=facts).changes_to(JobRecord(data=self.facts)):
            raise ConfigError(
                f"`dataset` reads other samples here than in the process that examined the job: {change.text}; give "
                "all hosts the same data, and let no sample depend on the process that reads it, such as on its id, or "
                "on the hash of a string unless PYTHONHASHSEED is set"
            )

    def check(self) -> None:
        """Read each sample again. Raises ConfigError if one differs."""
        for index, before in self._contents.items():
            if _contents(self._tensors(index)) != before:
                raise ConfigError(
                    f"`dataset` reads sample {index} differently each time, but workers read it separately, for the "
                    "inputs and for the targets, and again after a failure; draw with Python's `random`, "
                    "`numpy.random` or torch's functions, whose global generators are seeded for each read of a "
                    "sample, instead of a generator of its own, the clock or a count of reads"
                )

    def _tensors(self, index: int) -> list[Tensor]:
        text = f"reading sample {index}, before the run, has taken {_TOLD_S:.0f} s so far"
        notice = Timer(_TOLD_S, lambda: print(text, file=sys.stderr, flush=True))
        notice.daemon = True
        notice.start()
        try:
            sample: Any = read_sample(self._job.dataset, index, seed=self._seed)
        finally:
            notice.cancel()
        # Others than pairs of tensors are refused elsewhere.
        return [each for each in sample if isinstance(each, Tensor)] if isinstance(sample, tuple) else []


def _contents(tensors: Iterable[Tensor]) -> list[bytes]:
    # Not the versions that torch counts: those of samples in one tensor, such as a cache, change with each write to it.
    return [f"{each.dtype} {each.shape} ".encode() + content_of(each) for each in tensors]


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


def check_loss(
    job: Job, output: BoundarySpec, micro_batch_size: int, *, device: torch.device, seed: int = 0
) -> tuple[Fact, tuple[str, ...]]:
    """Compute the loss of the first micro-batch, of random numbers as the output of the last layer.

    Returns it with its terms, and hints.

    Raises:
        ConfigError: `loss` or `loss_terms` cannot be called, or returns something else than it should; or `loss` has
            parameters of its own, or changes what it keeps.
    """
    _, targets = load_micro_batch(job.dataset, SampleOrder(len(job.dataset), seed), 0, micro_batch_size)
    targets = targets.to(device)
    before = digest((job.loss, job.loss_terms))
    with generator_lock, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        made = torch.rand(output.shape).to(device=device, dtype=output.dtype)
        made.requires_grad_(made.is_floating_point() or made.is_complex())
        try:
            loss: Any = loss_of(job, made, targets)
            terms = terms_of(job, targets)
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
                f"`loss` returned {found}: it returns the sum of the loss terms of a micro-batch, a tensor of one "
                'number; give torch\'s losses reduction="sum"'
            )
        if (leaf := untracked_leaf(loss, partial(loss_of, job, made, targets), own=[made])) is not None:
            raise ConfigError(
                f"`loss` computes with a parameter of its own, of shape {tuple(leaf.shape)}, which would not be "
                "trained; move it into the last layer, or freeze it by requires_grad_(False)"
            )
        if (after := digest((job.loss, job.loss_terms))) != before:
            for other in (2 * made.detach().flip(0), made):
                loss_of(job, other, targets), job.loss_terms(targets)
            if digest((job.loss, job.loss_terms)) != after:
                raise ConfigError(
                    "`loss` or `loss_terms` changes what it keeps, such as a count or a mean, of which each worker "
                    "would have another value; let it depend on nothing but the output and the targets"
                )
        if not (loss.requires_grad and torch.autograd.grad(loss, made, allow_unused=True)[0] is not None):
            raise ConfigError(
                "`loss` returned a number that has no gradient by the output of the last layer, so nothing would be "
                "trained; compute it from the output, without detach() or no_grad()"
            )
        hints: tuple[str, ...] = ()
        with contextlib.suppress(Exception):  # of any class: the loss takes no other shapes
            hints = _hints(job, made.detach(), targets, float(loss.detach()), terms)
    return ["loss and terms", float(loss.detach()), terms], hints


def _hints(job: Job, made: Tensor, targets: Tensor, loss: float, terms: float) -> tuple[str, ...]:
    """Return hints if the terms do not seem to be those that the loss sums."""

    def of(output: Tensor, targets: Tensor) -> tuple[float, float]:
        return float(loss_of(job, output, targets)), terms_of(job, targets)

    twice, twice_terms = of(torch.cat([made, made]), torch.cat([targets, targets]))
    if loss and terms and math.isclose(twice, loss, rel_tol=_ALIKE) and twice_terms > terms:
        return (
            "`loss` seems to return the mean over a micro-batch, which is divided by the terms again; return the sum",
        )
    if made.ndim > 2 and made.shape[:2] == targets.shape[:2]:
        places = 1
    elif targets.ndim > 1 and made.shape[2:] == targets.shape[1:]:
        places = -1
    else:
        return ()
    # The loss of every other place in a sample, such as a token, and of the others, which are terms if it is their sum.
    chosen = [torch.arange(first, targets.shape[places], 2, device=targets.device) for first in (0, 1)]
    halves = [of(made.index_select(places, each), targets.index_select(places, each)) for each in chosen]
    is_sum = math.isclose(sum(half for half, _ in halves), loss, rel_tol=_ALIKE)
    if is_sum and all(half > loss / 10 and counted == terms > 0 for half, counted in halves):
        return (
            f"`loss` seems to sum {targets.shape[places]} values of a sample that `loss_terms` does not count, which "
            "multiplies gradients; count them, as by loss_terms=torch.Tensor.numel",
        )
    return ()


def check_learning_rate(job: Job) -> None:
    """Call `learning_rate` for the first step. Raises ConfigError unless it returns a rate that the step decides."""
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
    kept = digest(job.learning_rate)  # with its caches
    if job.learning_rate(0) != rate or digest(job.learning_rate) != kept:
        raise ConfigError(
            "`learning_rate` depends on how often it has been called, which differs between workers; compute the rate "
            "from the number of the step alone, or attach a scheduler of torch to the optimizer, by "
            "`optimizer.register_step_post_hook(lambda *_: schedule.step())`"
        )
