"""The judges of a run: a plain PyTorch loop of its job, or one that the user has written.

The plain loop is one process with one model, PyTorch and nothing of the runtime. It shares with a run only the
functions of the job and the seeds that they are called with. Layers are built whole, the loss is summed over
micro-batches, gradients are clipped by torch's `clip_grad_norm_`, and the optimizer of the job updates the parameters
that its factory was given. Under bf16 it keeps float32 masters, as hand-written loops do.
"""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from chameleon_ft.config import DEVICES, RunConfig
from chameleon_ft.data.samples import SamplesInOrder
from chameleon_ft.data.streams import POSITION_KEY
from chameleon_ft.errors import ConfigError
from chameleon_ft.events.kinds import JobChanged, SampleLeftOut
from chameleon_ft.events.records import Started, StepRecord
from chameleon_ft.job.job import Job, ModelParameters
from chameleon_ft.job.reference import call_function, load_job
from chameleon_ft.job.stored import read_frozen, read_weights
from chameleon_ft.keys import init_key, step_key
from chameleon_ft.side_outputs import SideOutputs, collecting, run_after_step, summed_buffers
from chameleon_ft.storage.checkpoints import is_complete, layer_part, read_mark, slice_part, sound_checkpoint
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.stores import Storage, checkpoint_storage
from chameleon_ft.trees import mapped
from chameleon_ft.weights import FROZEN

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_SLICE = re.compile(r"(?P<name>.*)\[(?P<first>\d+):\d+\]")

TOLERANCES: Final = {"fp32": 1e-5, "bf16": 2e-3}
"""Largest relative deviation of a loss that rounding explains, by precision."""

# Gradient norms and weights amplify rounding: Adam divides by gradients near zero.
_OTHERS_FACTOR: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComparison:
    """One step of the run beside the same step of the plain loop."""

    step: int
    loss: float
    plain_loss: float
    grad_norm: float
    plain_grad_norm: float | None
    """None if the loop does not compute it."""

    @property
    def loss_deviation(self) -> float:
        """Relative to the plain loop; infinite if either is not a number."""
        return _deviation(self.loss, self.plain_loss)

    @property
    def grad_norm_deviation(self) -> float | None:
        """Relative to the plain loop; infinite if either is not a number, None if the loop does not compute it."""
        return None if self.plain_grad_norm is None else _deviation(self.grad_norm, self.plain_grad_norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightComparison:
    """The weights of a checkpoint beside those of a plain loop after as many steps.

    Attributes:
        step: The step of the checkpoint.
        deviation: L2 norm of the difference of all weights, relative to the norm of those of the loop.
        worst: name of the tensor with the largest relative deviation of its own.
        worst_deviation: The relative deviation of that tensor.
    """

    step: int
    deviation: float
    worst: str
    worst_deviation: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The deviation of a run from the plain loop."""

    steps: int
    tolerance: float
    max_relative_loss_deviation: float
    max_relative_grad_norm_deviation: float | None
    """None if the loop gives no gradient norms."""
    worst_step: int
    """Step of the largest deviation of the loss."""
    first_step_outside: int | None
    """First step whose loss deviates by more than the tolerance."""
    loop: str = "a plain loop"
    """The judge."""
    weights: WeightComparison | None = None
    weights_left_out: str = ""
    """Why final weights of the judge were not compared."""

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
            max_relative_grad_norm_deviation=max(
                (each.grad_norm_deviation for each in found if each.grad_norm_deviation is not None), default=None
            ),
            worst_step=worst.step,
            first_step_outside=min(outside, default=None),
        )

    @property
    def outside(self) -> tuple[str, ...]:
        """Parts that deviate by more than rounding explains; for all but the losses, that is 100 times as much."""
        others = {"gradient norm": self.max_relative_grad_norm_deviation or 0.0}
        if self.weights is not None:
            others["weights"] = self.weights.deviation
        return (
            *(("loss",) if self.first_step_outside is not None else ()),
            *(name for name, deviation in others.items() if deviation > _OTHERS_FACTOR * self.tolerance),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, and the parts that deviate."""
        return {**asdict(self), "outside": self.outside}

    def __str__(self) -> str:
        lines = [
            f"{self.steps} steps repeated in {self.loop}",
            "largest relative deviation",
            f"  of the loss           {self.max_relative_loss_deviation:.2e}, in step {self.worst_step}",
        ]
        if self.max_relative_grad_norm_deviation is not None:
            lines.append(f"  of the gradient norm  {self.max_relative_grad_norm_deviation:.2e}")
        if (weights := self.weights) is not None:
            lines.append(
                f"  of the weights        {weights.deviation:.2e}, in the checkpoint of step {weights.step}; "
                f"most in {weights.worst}, {weights.worst_deviation:.2e}"
            )
        if self.weights_left_out:
            lines.append(f"weights not compared: {self.weights_left_out}")
        if self.first_step_outside is not None:
            lines.append(f"OUTSIDE the tolerance of {self.tolerance:g}, first in step {self.first_step_outside}")
        elif self.outside:
            others = f"{_OTHERS_FACTOR * self.tolerance:g}"
            lines.append(
                f"{' and '.join(self.outside)} OUTSIDE {others}, {_OTHERS_FACTOR} times the tolerance of losses"
            )
        else:
            lines.append(f"within the tolerance of {self.tolerance:g}")
        return "\n".join(lines)


def repeat_run(
    run: RunDirectory, *, limit: int | None = None, loop_of: Callable[[RunConfig, Job], PlainLoop] | None = None
) -> Iterator[StepComparison]:
    """Train the job of `run` from its beginning and yield each committed step, up to `limit` of them.

    `loop_of` makes the plain loop.

    A forked run begins with the checkpoint that it was forked from. If a run was resumed with another job, it begins
    with the checkpoint that was read then, because the job before is not there any more.

    Raises ConfigError if the job cannot be loaded, a line of the records is damaged, a step is missing from them, or
    that checkpoint is not there any more.
    """
    config = run.config()
    records = _recorded_steps(run)
    events, damaged = run.readable_events()
    if damaged:
        raise ConfigError(damaged[0])
    # In runs of earlier versions the horizon of the learning rate was the number of steps. By time, not by step: a run
    # may go back further than where it was resumed, if that checkpoint is damaged.
    starts = [(event.time, event.horizon_steps or event.steps) for event in events if isinstance(event, Started)]
    jobs = {
        horizon: load_job(config.job, config.model_copy(update={"horizon_steps": horizon}))
        for horizon in {config.horizon, *(horizon for _, horizon in starts)}
    }
    loop = (loop_of or PlainLoop)(config, jobs[config.horizon])
    checkpoints, first = checkpoint_storage(config, run), config.forked.step
    changed = [event for event in events if isinstance(event, JobChanged)]
    if changed:
        first, changes = changed[-1].step, "; ".join(changed[-1].changes)
        if not is_complete(checkpoints, first):
            raise ConfigError(
                f"steps before {first} were trained with another job ({changes}), and the checkpoint of step {first} "
                "is not kept, so no loop can repeat the run; set checkpoint.keep to keep it"
            )
    if config.forked.run or changed:
        loop.load(checkpoints, first)
    loop.leave_out((event.epoch, event.sample) for event in events if isinstance(event, SampleLeftOut))
    for record in records[:limit]:
        # The step has changed nothing, or was trained with another job.
        if record.is_skipped or record.step < first:
            continue
        horizon = next((each for begun_at, each in reversed(starts) if begun_at <= record.time), config.horizon)
        plain = loop.run_step(record.step, jobs[horizon])
        yield StepComparison(
            step=record.step,
            loss=record.loss,
            plain_loss=plain.loss,
            grad_norm=record.grad_norm,
            plain_grad_norm=plain.grad_norm,
        )


def _recorded_steps(run: RunDirectory) -> list[StepRecord]:
    """Return the last record of each step in order. Raises ConfigError if one is missing or a line is damaged."""
    records, damaged = run.readable_steps()
    if damaged:
        raise ConfigError(damaged[0])
    last = {record.step: record for record in records}
    ordered = [last[step] for step in sorted(last)]
    for number, record in enumerate(ordered, run.config().forked.step):
        if record.step != number:
            raise ConfigError(f"metrics.jsonl has no record of step {number}, but later ones; the file is damaged")
    return ordered


def _deviation(value: float, plain: float) -> float:
    if not (math.isfinite(value) and math.isfinite(plain)):
        return math.inf
    if value == plain:
        return 0.0
    return abs(value - plain) / abs(plain) if plain else math.inf


class UsersLoop:
    """A generator that yields the loss of each step, or its loss and gradient norm, and may end with the weights.

    It yields one value for each step of the run, also of one that the run skipped, which is not compared. After the
    last it may return, or yield, the state dict of the whole model, with the names of `nn.Sequential(*layers)`:
    "LAYER.NAME" for each parameter and persistent buffer.

    Args:
        reference: ``path/to/file.py:function`` or ``package.module:function``; without ``:function`` it is ``loop``.
            The function gets the run's configuration if it requires an argument.
    """

    def __init__(self, run: RunDirectory, reference: str) -> None:
        self._run = run
        self.reference = reference
        self.weights: WeightComparison | None = None
        self.weights_left_out = ""
        """Why the weights were not compared; empty if they were, or if the loop has returned none."""

    def compare(self, *, limit: int | None = None) -> Iterator[StepComparison]:
        """Run the loop beside the records of the run, up to `limit` steps, and then compare the weights.

        Raises:
            ConfigError: there is no such function, it yields too few values or something else than numbers, or the
                weights do not fit the model. Errors of the function itself pass through.
        """
        records = _recorded_steps(self._run)
        loop = call_function(self.reference, self._run.config(), kind="loop")
        if not isinstance(loop, Iterator):
            raise self._error(f"its function returned {type(loop).__name__}; let it yield the loss of each step")
        for number, record in enumerate(records[:limit]):
            try:
                value = next(loop)
            except StopIteration:
                raise self._error(
                    f"it yielded {number} losses, but the run has {len(records)} steps; let it train as many, or "
                    f"compare only those by --steps {number}"
                ) from None
            if record.is_skipped:
                continue
            loss, grad_norm = self._numbers(value, record.step)
            yield StepComparison(
                step=record.step,
                loss=record.loss,
                plain_loss=loss,
                grad_norm=record.grad_norm,
                plain_grad_norm=grad_norm,
            )
        if limit is not None and limit < len(records):
            self.weights_left_out = f"only the first {limit} of {len(records)} steps were repeated"
        elif records:
            self._compare_weights(loop, records[-1].step + 1)

    def _numbers(self, value: Any, step: int) -> tuple[float, float | None]:
        parts = value if isinstance(value, (tuple, list)) else (value,)
        try:
            if len(parts) > 2:
                raise TypeError
            loss, *others = (float(part.detach() if isinstance(part, torch.Tensor) else part) for part in parts)
        except (TypeError, ValueError, RuntimeError):
            raise self._error(
                f"for step {step} it yielded {type(value).__name__} {value!r:.60}; yield the loss as a number, or the "
                "loss and the gradient norm"
            ) from None
        if not all(map(math.isfinite, (loss, *others))):
            raise self._error(f"for step {step} it yielded {value!r:.60}, which cannot be compared")
        return loss, others[0] if others else None

    def _compare_weights(self, loop: Iterator[Any], step: int) -> None:
        """Compare the weights that the loop ends with, if it does, with those of the newest checkpoint."""
        try:
            weights = next(loop)
        except StopIteration as end:
            weights = end.value
        if weights is None:
            return
        if not isinstance(weights, Mapping):
            self.weights_left_out = f"the loop goes on after the {step} steps of the run"
            return
        checkpoints = checkpoint_storage(self._run.config(), self._run)
        newest, _ = sound_checkpoint(checkpoints)
        if newest != step:
            found = "no checkpoint" if newest is None else f"its newest checkpoint is that of step {newest}"
            self.weights_left_out = f"the run has {step} steps, and {found}"
            return
        stored = stored_weights(self._run.config(), checkpoints, step)
        self.weights = self._weight_comparison(step, weights, stored)

    def _weight_comparison(
        self, step: int, weights: Mapping[str, Any], stored: Mapping[str, torch.Tensor]
    ) -> WeightComparison:
        names = sorted(weights.keys() ^ stored.keys())
        if names:
            which = "the run" if names[0] in weights else "the loop"
            raise self._error(
                f"{which} has no weights {names[0]!r}; return nn.Sequential(*layers).state_dict(), whose names are "
                f"such as {min(stored)!r}"
            )
        squares = dict[str, tuple[float, float]]()
        for name, value in weights.items():
            if not isinstance(value, torch.Tensor) or value.shape != stored[name].shape:
                shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise self._error(f"its weights {name!r} are {shape}, those of the run {tuple(stored[name].shape)}")
            own = value.detach().to("cpu", torch.float64)
            squares[name] = float((stored[name].double() - own).square().sum()), float(own.square().sum())
        relative = {name: _relative(*both) for name, both in squares.items()}
        worst = max(relative, key=relative.__getitem__)
        whole = _relative(*(math.fsum(column) for column in zip(*squares.values(), strict=True)))
        return WeightComparison(step=step, deviation=whole, worst=worst, worst_deviation=relative[worst])

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"loop {self.reference!r}: {problem}")


def _relative(difference: float, size: float) -> float:
    """Return the ratio of two norms from their squares; infinite if a difference is not a number."""
    if not difference:
        return 0.0
    return math.sqrt(difference / size) if math.isfinite(difference) and size else math.inf


@dataclass(frozen=True, slots=True)
class PlainStep:
    """A step of the plain loop.

    Attributes:
        loss: The mean before the update, with auxiliary losses; not a number if the batch has no loss terms.
        grad_norm: The norm of the gradient before clipping; likewise.
        terms: Loss terms of the batch.
        samples: Samples of the micro-batches that have terms.
        auxiliary_loss: The part of `loss` that is auxiliary losses.
        metrics: Means of what layers have logged.
    """

    loss: float = math.nan
    grad_norm: float = math.nan
    terms: float = 0.0
    samples: int = 0
    auxiliary_loss: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)


class PlainLoop:
    """A whole model and its optimizer, after the steps run so far."""

    def __init__(self, config: RunConfig, job: Job) -> None:
        self._config = config
        self._job = job
        self._device = torch.device(config.device if DEVICES[config.device].is_accelerator else "cpu")
        self._layers = list[nn.Module]()
        for number, factory in enumerate(job.layers):
            torch.manual_seed(init_key(config.seed, number))
            self._layers.append(factory().to(self._device).train())
            read_weights(job, number, self._layers[-1])
        for (first, first_name), *copies in job.tied:
            shared = self._layers[first].get_parameter(first_name)
            for layer, name in copies:
                _share(self._layers[layer], self._layers[layer].get_parameter(name), shared)
        self._masters: dict[nn.Parameter, nn.Parameter] = {}
        if job.precision.is_lower:
            self._layers[0].register_forward_pre_hook(partial(_cast_inputs, torch.bfloat16), with_kwargs=True)
            for module in self._layers:
                module.register_forward_pre_hook(_cast_fields, with_kwargs=True)
                self._cast(module)
        self._summed = [summed_buffers(layer) for layer in self._layers]
        self._parameters = list(nn.ModuleList(self._layers).parameters())
        self._updated = [self._masters.get(each, each) for each in self._parameters]
        names = [name for name, _ in nn.Sequential(*self._layers).named_parameters()]
        self._optimizer = job.optimizer(ModelParameters(zip(names, self._updated, strict=True)))
        self._own = [{**group} for group in self._optimizer.param_groups]
        self._samples = SamplesInOrder(job.dataset, config.seed, job.collate)

    def leave_out(self, draws: Iterable[tuple[int, int]]) -> None:
        """Leave these samples, of (epoch, number), out of all steps."""
        self._samples.left_out = frozenset(draws)

    def load(self, checkpoints: Storage, step: int) -> None:
        """Take over the state of all layers from a checkpoint. Raises ConfigError if it cannot be read."""
        position = _read(checkpoints, layer_part(step, 0)).get(POSITION_KEY)
        if position is not None:
            self._samples.begin(self._config.samples_before(step), position)
        options = self._optimizer.defaults
        on_host = None if options.get("fused") or options.get("capturable") else "step"  # as torch has the counter
        for number, layer in enumerate(self._layers):
            module, optimizer, has_more = _stored_layer(lambda: self._job, checkpoints, step, number)
            if has_more:
                raise ConfigError(
                    f"{checkpoints.place(layer_part(step, number))}: the optimizer keeps more than the state of "
                    "parameters, with which a plain loop cannot begin; verify a run that is neither forked nor resumed "
                    "with a changed job"
                )
            layer.load_state_dict(module)
            for name, parameter in layer.named_parameters():
                updated = self._masters.get(parameter, parameter)
                if updated is not parameter:
                    updated.data.copy_(module[name])
                if own := optimizer.get(name):
                    self._optimizer.state[updated] = {
                        key: value.to(self._device) if isinstance(value, torch.Tensor) and key != on_host else value
                        for key, value in own.items()
                    }

    @property
    def learning_rate(self) -> float:
        """The rate of the first group of the optimizer."""
        return float(self._optimizer.param_groups[0].get("lr", 0.0))

    def run_step(self, step: int, scheduling: Job) -> PlainStep:
        """Run one step with the rates of a job; nothing is changed if the batch has no loss terms."""
        self._optimizer.zero_grad()
        batch = self._config.batch
        loss_sum, auxiliary_sum, terms, samples = 0.0, 0.0, 0.0, 0
        collected: list[list[SideOutputs]] = []
        for micro_batch in range(batch.micro_batches_at(step)):
            start = self._config.first_sample(step) + micro_batch * batch.micro_batch_size
            inputs, whole = self._samples.micro_batch(start, batch.micro_batch_size)
            left_out = self._samples.left_out_of(start, batch.micro_batch_size)
            counted = [row for row in range(batch.micro_batch_size) if row not in left_out]
            targets = mapped(lambda tensor: tensor[counted], whole) if left_out else whole  # noqa: B023 - now
            own_terms = float(self._job.loss_terms(targets))
            output, sides = self._forward(inputs, whole, step, micro_batch)
            if left_out:
                output = output[counted]
            loss = auxiliary = sum((side.loss(own_terms) for side in sides), torch.zeros((), device=self._device))
            if own_terms:
                if self._job.precision.is_lower:
                    output = _cast_to(torch.float32, output)
                loss = self._job.loss(output, self._on_device(targets)) + auxiliary
                samples += len(counted)
            if loss.requires_grad:
                loss.backward()
            loss_sum += loss.item()
            auxiliary_sum += auxiliary.item()
            collected.append(sides)
            terms += own_terms
        if not terms:
            return PlainStep()
        for parameter, master in self._masters.items():
            master.grad, parameter.grad = parameter.grad, None
        norms = []
        for parameter in self._updated:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to_dense().div_(terms)
                norms.append(torch.linalg.vector_norm(parameter.grad, dtype=torch.float64))
        # Both steps of clip_grad_norm_, whose norm in float32 would part two trajectories in bfloat16 at once.
        grad_norm = nn.utils.get_total_norm(norms)
        if self._job.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(self._updated, self._job.clip_norm, grad_norm)
        if self._job.clip_value is not None:
            nn.utils.clip_grad_value_(self._updated, self._job.clip_value)
        self._schedule(step, scheduling)
        self._optimizer.step()
        for parameter, master in self._masters.items():
            parameter.data.copy_(master)
        for number, buffers in enumerate(self._summed):
            added = zip(*(sides[number].step_sums for sides in collected), strict=True)
            run_after_step(buffers, [torch.stack(each).sum(0, dtype=each[0].dtype) for each in added])
        metrics = _means(side for sides in collected for side in sides)
        return PlainStep(loss_sum / terms, grad_norm.item(), terms, samples, auxiliary_sum / terms, metrics)

    def _schedule(self, step: int, job: Job) -> None:
        """Set the rates of a step."""
        rates, schedule = [own.get("initial_lr", own.get("lr", 1.0)) for own in self._own], job.schedule
        if job.learning_rate is not None:
            # The schedule is that of the default rate, or of the largest one if no group has the default.
            default, rate = self._optimizer.defaults.get("lr"), float(job.learning_rate(step))
            base = default if default in rates and default else max(rates)
            options = [{"lr": rate if own == base else rate * own / base} for own in rates]
        elif callable(schedule):
            options = [{"lr": own * schedule(step)} for own in rates]
        elif schedule is not None:
            options = schedule.options(step, self._own, self._optimizer.defaults)
        else:
            return
        for group, own in zip(self._optimizer.param_groups, options, strict=True):
            group.update(own)

    def _forward(self, inputs: Any, targets: Any, step: int, micro_batch: int) -> tuple[Any, list[SideOutputs]]:
        """(micro-batch, ...) -> output of the last layer for it, and what each layer gives beside its output."""
        hidden, sides = self._on_device(inputs), list[SideOutputs]()
        fields = {**hidden, "labels": self._on_device(targets)} if isinstance(hidden, dict) else {}
        for number, layer in enumerate(self._layers):
            torch.manual_seed(step_key(self._config.seed, step=step, micro_batch=micro_batch, layer=number))
            first, *others = self._fields_of(number, layer, fields)
            with collecting(self._summed[number]) as side:
                hidden = layer(fields[first] if first else hidden, **{name: fields[name] for name in others})
            sides.append(side)
        return hidden, sides

    def _fields_of(self, number: int, layer: nn.Module, fields: Mapping[str, Any]) -> Sequence[str]:
        """Return the fields of a micro-batch that a layer gets, the one by position first; that is empty after 0."""
        if not fields:
            return [""]
        if self._job.fields:
            return ["", *self._job.fields[number]][number == 0 :]
        first, *others = inspect.signature(getattr(layer, "_orig_mod", layer).forward).parameters
        named = [name for name in others if name in fields]
        if number:
            return ["", *named]
        only = [name for name in fields if name not in (*named, "labels", "attention_mask")]
        return [first if first in fields else "input_ids" if "input_ids" in only else only[0], *named]

    def _on_device(self, tree: Any) -> Any:
        return mapped(lambda tensor: tensor.to(self._device), tree)

    def _cast(self, layer: nn.Module) -> None:
        """Have a layer compute in bfloat16, but for the modules that the job keeps, with masters of its parameters."""
        declared = [
            f"{path}.{between}{name}".removeprefix(".")
            for path, module in layer.named_modules()
            for key in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
            for name in getattr(module, key, None) or ()
            for between in ("", "*.")
        ]
        patterns = (*self._job.precision.fp32_modules, *declared)
        kept, keeps = set[nn.Module](), replace(self._job.precision, fp32_modules=patterns).keeps
        for name, module in layer.named_modules():
            if keeps(type(module).__name__, *([name] if name else [])) and module not in kept:
                kept.update(module.modules())
                module.register_forward_pre_hook(partial(_cast_inputs, torch.float32), with_kwargs=True)
                module.register_forward_hook(lambda _, __, output: _cast_to(torch.bfloat16, output))
        own = {name: each for name, each in [*layer.named_parameters(), *layer.named_buffers()] if keeps(name)}
        if own:
            layer.register_forward_hook(lambda _, __, output: _cast_to(torch.bfloat16, output))
        for parameter in (each for module in kept for each in module._parameters.values()):
            own |= {} if parameter is None else {str(id(parameter)): parameter}
        for tensor in (each for each in own.values() if each.requires_grad):
            # By definition of the precision, a micro-batch adds numbers of bfloat16 to a gradient.
            tensor.register_hook(lambda gradient: gradient.to(torch.bfloat16).to(gradient.dtype))
        in_float32 = set(map(id, own.values()))
        for module in layer.modules():
            if module in kept:
                continue
            for parameter in module._parameters.values():
                if parameter is None or id(parameter) in in_float32:
                    continue
                if parameter.dtype in _FLOATS and parameter not in self._masters:
                    if parameter.requires_grad:
                        master: nn.Parameter = parameter.detach().float().clone().as_subclass(type(parameter))
                        master.requires_grad_()
                        self._masters[parameter] = master
                        # An optimizer may tell the parameter by its attributes.
                        vars(master).update(vars(parameter))
                        # Gradients are summed over micro-batches and tied layers.
                        parameter.grad_dtype = torch.float32
                    parameter.data = parameter.data.to(torch.bfloat16)
            for key, buffer in module._buffers.items():
                if id(buffer) not in in_float32 and key not in getattr(module, "step_sums", ()):
                    module._buffers[key] = _cast_to(torch.bfloat16, buffer)


def _means(sides: Iterable[SideOutputs]) -> dict[str, float]:
    """Return the means of what was logged."""
    found: dict[str, list[float]] = {}
    for name, (total, weight) in (each for side in sides for each in side.logged.items()):
        sums = found.setdefault(name, [0.0, 0.0])
        sums[0] += float(total)
        sums[1] += weight
    return {name: total / weight for name, (total, weight) in found.items() if weight}


def _share(layer: nn.Module, copy: nn.Parameter, shared: nn.Parameter) -> None:
    for module in layer.modules():  # which may use it in several places
        module._parameters.update({name: shared for name, own in module._parameters.items() if own is copy})


def _cast_inputs(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> Any:
    return _cast_to(dtype, (args, kwargs))


def _cast_fields(_: nn.Module, args: Any, kwargs: Any) -> Any:
    return args, _cast_to(torch.bfloat16, kwargs)


def _cast_to(dtype: torch.dtype, value: Any) -> Any:
    return mapped(lambda tensor: tensor.to(dtype) if tensor.dtype in _FLOATS else tensor, value)


def stored_weights(config: RunConfig, checkpoints: Storage, step: int, average: str = "") -> dict[str, torch.Tensor]:
    """Return the parameters, or their masters, and buffers of a checkpoint, by the names of `nn.Sequential(*layers)`.

    The job of `config` is loaded if some are in its files of weights alone. `average` names what the optimizer keeps of
    each parameter to return instead. Raises ConfigError if they cannot be read, or no parameter has that.
    """
    job = cache(partial(load_job, config.job, config))
    found = dict[str, torch.Tensor]()
    kept = set[str]()
    for layer in range(read_mark(checkpoints, step)["layers"]):
        module, optimizer, _ = _stored_layer(job, checkpoints, step, layer)
        kept.update(*optimizer.values())
        averages = {name: own[average] for name, own in optimizer.items() if average in own}
        found |= {f"{layer}.{name}": averages.get(name, value) for name, value in module.items()}
    if average and average not in kept:
        raise ConfigError(
            f"the optimizer keeps no {average!r} of parameters, but {', '.join(sorted(kept)) or 'nothing'}; average "
            "them by chameleon_ft.optim.ema"
        )
    return found


def _stored_layer(
    job: Callable[[], Job], checkpoints: Storage, step: int, layer: int
) -> tuple[dict[str, Any], dict[str, dict[str, Any]], bool]:
    """Return parameters, or their masters, and buffers of a layer by name, and the optimizer's state by parameter.

    Also returns whether the optimizer keeps anything else. Raises ConfigError if they cannot be read.
    """
    whole = _read(checkpoints, layer_part(step, layer))
    frozen = whole.get(FROZEN, "")
    module: dict[str, Any] = {**read_frozen(job(), layer, frozen)} if frozen else {}
    # The slices of a parameter by their first elements, for each key of the optimizer, which is empty for a master.
    pieces = dict[tuple[str, str], dict[int, Any]]()
    slices = read_mark(checkpoints, step).get("slices", ())
    parts = (_read(checkpoints, slice_part(step, *place)) for place in slices if place[0] == layer)
    for entries in (whole, *parts):
        for entry, value in entries.items():
            kind, _, place = entry.partition("/")
            name, _, key = (place, "", "") if kind == "module" else place.rpartition("/")
            if match := _SLICE.fullmatch(name):
                pieces.setdefault((match["name"], key), {})[int(match["first"])] = value
            elif kind == "module":
                module[name] = value
            elif kind == "optimizer":
                pieces.setdefault((name, key), {})[0] = value
    optimizer = dict[str, dict[str, Any]]()
    for (name, key), by_start in pieces.items():
        first, *others = (by_start[start] for start in sorted(by_start))
        if isinstance(first, torch.Tensor) and first.ndim and (others or not key):
            first = torch.cat([each.reshape(-1) for each in (first, *others)]).view(module[name].shape)
        if key:
            optimizer.setdefault(name, {})[key] = first
        else:
            module[name] = first
    return module, optimizer, "values" in whole


def _read(checkpoints: Storage, part: str) -> dict[str, Any]:
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
        raise ConfigError(f"{checkpoints.place(part)}: its state cannot be read: {error}") from None
    return state
