"""The plain loop that a run is compared with: one process, one model, PyTorch and nothing of the runtime.

It shares with the runtime only the definition of the job: its layers, their seeds and precision, the order of the
samples, the optimizer and its learning rate. Plans, programs, messages and recoveries take no part, so agreement shows
that they changed nothing.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from chameleon_ft.config import DEVICES, RunConfig
from chameleon_ft.data import SampleOrder
from chameleon_ft.data.samples import load_micro_batch
from chameleon_ft.errors import ConfigError
from chameleon_ft.job import Job, load_job
from chameleon_ft.models.build import build_layer, seed_forward, tie
from chameleon_ft.models.precision import cast_layer, loss_of
from chameleon_ft.observe import (
    RunDirectory,
    StepRecord,
    Storage,
    checkpoint_storage,
    layer_part,
    slice_part,
    slices_of,
)
from chameleon_ft.observe.readable import readable_events, readable_steps

__all__ = ["TOLERANCES", "StepComparison", "Verification", "repeat_run"]

_CLIP_EPSILON: Final = 1e-6  # as in torch.nn.utils.clip_grad_norm_

TOLERANCES: Final = {"fp32": 1e-5, "bf16": 2e-3}
"""Largest relative deviation of a loss that rounding explains, by precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComparison:
    """One step of the run beside the same step of the plain loop."""

    step: int
    loss: float
    plain_loss: float
    grad_norm: float
    plain_grad_norm: float

    @property
    def loss_deviation(self) -> float:
        """Relative to the plain loop; infinite if either is not a number."""
        return _deviation(self.loss, self.plain_loss)

    @property
    def grad_norm_deviation(self) -> float:
        """Relative to the plain loop; infinite if either is not a number."""
        return _deviation(self.grad_norm, self.plain_grad_norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The deviation of a run from the plain loop."""

    steps: int
    tolerance: float
    max_relative_loss_deviation: float
    max_relative_grad_norm_deviation: float
    worst_step: int
    """Step of the largest deviation of the loss."""
    first_step_outside: int | None
    """First step whose loss deviates by more than the tolerance."""

    @classmethod
    def of(cls, comparisons: Iterable[StepComparison], *, tolerance: float) -> Verification:
        """Sum up `comparisons`. Raises ConfigError if there are none."""
        found = list(comparisons)
        if not found:
            raise ConfigError("this run has committed no step yet; let it train before it is verified")
        worst = max(found, key=lambda comparison: comparison.loss_deviation)
        outside = [comparison.step for comparison in found if comparison.loss_deviation > tolerance]
        return cls(
            steps=len(found),
            tolerance=tolerance,
            max_relative_loss_deviation=worst.loss_deviation,
            max_relative_grad_norm_deviation=max(comparison.grad_norm_deviation for comparison in found),
            worst_step=worst.step,
            first_step_outside=min(outside, default=None),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        verdict = (
            f"within the tolerance of {self.tolerance:g}"
            if self.first_step_outside is None
            else f"OUTSIDE the tolerance of {self.tolerance:g}, first in step {self.first_step_outside}"
        )
        return (
            f"{self.steps} steps repeated in a plain loop\n"
            "largest relative deviation\n"
            f"  of the loss           {self.max_relative_loss_deviation:.2e}, in step {self.worst_step}\n"
            f"  of the gradient norm  {self.max_relative_grad_norm_deviation:.2e}\n"
            f"{verdict}"
        )


def repeat_run(run: RunDirectory, *, limit: int | None = None) -> Iterator[StepComparison]:
    """Train the job of `run` from its beginning and yield each committed step, up to `limit` of them.

    A forked run begins with the checkpoint that it was forked from.

    Raises ConfigError if the job cannot be loaded, a line of the records is damaged, or a step is missing from them.
    """
    config = run.config()
    (events, damaged_events), (records, damaged_steps) = readable_events(run), readable_steps(run)
    if damaged := [*damaged_steps, *damaged_events]:
        raise ConfigError(damaged[0])
    starts = [(event["time"], event["steps"]) for event in events if event["event"] == "started"]
    # A learning rate may depend on the number of steps, which a resumed run may have changed. By time, not by step: a
    # run may go back further than where it was resumed, if that checkpoint is damaged.
    jobs = {
        steps: load_job(config.job, config.model_copy(update={"steps": steps}))
        for steps in {config.steps, *(steps for _, steps in starts)}
    }
    loop = _PlainLoop(config, jobs[config.steps])
    if config.forked.run:
        loop.load(checkpoint_storage(config, run), config.forked.step)
    for record in _committed(records, first=config.forked.step)[:limit]:
        if record.is_skipped:  # it has changed nothing
            continue
        steps = next((steps for begun_at, steps in reversed(starts) if begun_at <= record.time), config.steps)
        rate = jobs[steps].learning_rate
        plain_loss, plain_grad_norm = loop.run_step(record.step, None if rate is None else rate(record.step))
        yield StepComparison(
            step=record.step,
            loss=record.loss,
            plain_loss=plain_loss,
            grad_norm=record.grad_norm,
            plain_grad_norm=plain_grad_norm,
        )


class _PlainLoop:
    """A whole model and its optimizer, after the steps run so far."""

    def __init__(self, config: RunConfig, job: Job) -> None:
        self._config = config
        self._job = job
        self._device = torch.device(config.device if DEVICES[config.device].is_accelerator else "cpu")
        self._layers = [
            build_layer(job, layer, config.seed).to(self._device).train() for layer in range(job.num_layers)
        ]
        casts = [cast_layer(layer, job.precision, is_first=not number) for number, layer in enumerate(self._layers)]
        masters = {
            layer.get_parameter(name): master
            for layer, own in zip(self._layers, casts, strict=True)
            for name, master in own.items()
        }
        tie(job, self._layers)  # of tied parameters, the masters of the first copies remain
        self._parameters = list(nn.ModuleList(self._layers).parameters())
        self._masters = {each: masters[each] for each in self._parameters if each in masters}
        self._optimizer = job.optimizer([self._updated(parameter) for parameter in self._parameters])
        self._order = SampleOrder(len(job.dataset), config.seed)

    def load(self, checkpoints: Storage, step: int) -> None:
        """Take over the state of all layers from a checkpoint. Raises ConfigError if it cannot be read."""
        options = self._optimizer.defaults
        on_host = None if options.get("fused") or options.get("capturable") else "step"  # as torch has the counter
        for number, layer in enumerate(self._layers):
            state = _read(checkpoints, layer_part(step, number))
            for place in slices_of(checkpoints, step):
                if place[0] == number:
                    state |= _read(checkpoints, slice_part(step, *place))
            module = {key.removeprefix("module/"): value for key, value in state.items() if key.startswith("module/")}
            layer.load_state_dict(module)
            for name, parameter in layer.named_parameters():
                if (master := self._masters.get(parameter)) is not None:
                    master.data.copy_(module[name])
                if own := _optimizer_state(state, name, parameter):
                    self._optimizer.state[self._updated(parameter)] = {
                        key: value.to(self._device) if isinstance(value, torch.Tensor) and key != on_host else value
                        for key, value in own.items()
                    }

    def run_step(self, step: int, rate: float | None) -> tuple[float, float]:
        """Run one step; return the mean loss before the update and the norm of the gradient before clipping."""
        for parameter in self._parameters:
            parameter.grad = None
        batch = self._config.batch
        first = self._config.first_sample(step)
        loss_sum, terms = 0.0, 0
        for micro_batch in range(batch.micro_batches):
            start = first + micro_batch * batch.micro_batch_size
            inputs, targets = load_micro_batch(self._job.dataset, self._order, start, batch.micro_batch_size)
            loss = loss_of(self._job, self._forward(inputs, step, micro_batch), targets.to(self._device))
            loss.backward()
            loss_sum += loss.item()
            terms += int(self._job.loss_terms(targets))  # which may count them in a tensor
        gradients = self._dense_gradients()
        grad_norm = _norm(gradients) / terms
        largest = math.inf if self._job.clip_norm is None else self._job.clip_norm
        # One factor instead of two roundings: in bf16 the last bit of a gradient makes another trajectory.
        factor = min(1.0, largest / (grad_norm + _CLIP_EPSILON)) / terms
        for gradient in gradients:
            gradient *= factor
        if rate is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = rate
        for parameter, master in self._masters.items():
            master.grad = parameter.grad
        self._optimizer.step()
        with torch.no_grad():
            for parameter, master in self._masters.items():
                parameter.copy_(master)
        return loss_sum / terms, grad_norm

    def _dense_gradients(self) -> list[torch.Tensor]:
        """Return all gradients, once they are dense, as those that workers send to each other."""
        gradients = []
        for parameter in self._parameters:
            if parameter.grad is not None:
                if parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()
                gradients.append(parameter.grad)
        return gradients

    def _updated(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the master of a parameter; the parameter itself if it has none."""
        return self._masters.get(parameter, parameter)

    def _forward(self, inputs: torch.Tensor, step: int, micro_batch: int) -> torch.Tensor:
        """(micro-batch, ...) -> output of the last layer for it."""
        hidden = inputs.to(self._device)
        for number, layer in enumerate(self._layers):
            seed_forward(self._config.seed, step=step, micro_batch=micro_batch, layer=number, device=self._device)
            hidden = layer(hidden)
        return hidden


def _norm(gradients: Iterable[torch.Tensor]) -> float:
    """Return the L2 norm over all gradients, summed in float64."""
    return math.sqrt(math.fsum(float(torch.linalg.vector_norm(each, dtype=torch.float64)) ** 2 for each in gradients))


def _read(checkpoints: Storage, part: str) -> dict[str, Any]:
    """Read the state of a layer, or of a slice of one, as docs/files.md describes it."""
    try:
        with checkpoints.reading(part) as files:
            stored = FileSystemReader(files).read_metadata().state_dict_metadata
            state: dict[str, Any] = {
                key: torch.empty(entry.size, dtype=entry.properties.dtype)
                if isinstance(entry, TensorStorageMetadata)
                else None
                for key, entry in stored.items()
            }
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that there is no process group
                load(state, checkpoint_id=files, no_dist=True)
    except (OSError, CheckpointException) as error:
        place = checkpoints.place(part)
        raise ConfigError(f"{place}: the state that the run was forked from cannot be read: {error}") from None
    return state


def _optimizer_state(state: dict[str, Any], name: str, parameter: nn.Parameter) -> dict[str, Any]:
    """Return the optimizer's state of a parameter, which may be in slices: NAME[first:last] is one."""
    pieces: dict[str, dict[int, Any]] = {}
    for entry, value in state.items():
        if match := re.fullmatch(rf"optimizer/{re.escape(name)}(?:\[(\d+):\d+\])?/([^/]*)", entry):
            pieces.setdefault(match[2], {})[int(match[1] or 0)] = value
    found = {}
    for key, by_start in pieces.items():
        first, *others = (by_start[start] for start in sorted(by_start))
        if others and isinstance(first, torch.Tensor) and first.ndim > 0:
            first = torch.cat([each.reshape(-1) for each in (first, *others)]).view(parameter.shape)
        found[key] = first
    return found


def _committed(records: Iterable[StepRecord], *, first: int) -> list[StepRecord]:
    """Return the last record of each step from `first` on, in order. Raises ConfigError if one is missing."""
    last = {record.step: record for record in records}
    ordered = [last[step] for step in sorted(last)]
    for number, record in enumerate(ordered, first):
        if record.step != number:
            raise ConfigError(f"metrics.jsonl has no record of step {number}, but later ones; the file is damaged")
    return ordered


def _deviation(value: float, plain: float) -> float:
    if not (math.isfinite(value) and math.isfinite(plain)):
        return math.inf
    if value == plain:
        return 0.0
    return abs(value - plain) / abs(plain) if plain else math.inf
