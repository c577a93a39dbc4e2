"""The plain loop: one process with one model, PyTorch and nothing of the runtime.

It shares with a run only the functions of the job and the seeds that they are called with. Layers are built whole, the
loss is summed over micro-batches, gradients are clipped by torch's `clip_grad_norm_`, and the optimizer of the job
updates the parameters that its factory was given. Under bf16 it keeps float32 masters, as hand-written loops do.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from chameleon_ft.config import DEVICES, RunConfig
from chameleon_ft.data.samples import SamplesInOrder
from chameleon_ft.data.streams import POSITION_KEY
from chameleon_ft.errors import ConfigError
from chameleon_ft.job.job import Job, ModelParameters
from chameleon_ft.job.stored import read_weights
from chameleon_ft.keys import init_key, step_key
from chameleon_ft.side_outputs import SideOutputs, collecting, run_after_step, summed_buffers
from chameleon_ft.storage.checkpoints import layer_part
from chameleon_ft.storage.stores import Storage
from chameleon_ft.trees import mapped
from chameleon_ft.verify.stored_state import read_part, stored_layer

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


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
        position = read_part(checkpoints, layer_part(step, 0)).get(POSITION_KEY)
        if position is not None:
            self._samples.begin(self._config.samples_before(step), position)
        options = self._optimizer.defaults
        on_host = None if options.get("fused") or options.get("capturable") else "step"  # as torch has the counter
        for number, layer in enumerate(self._layers):
            module, optimizer, has_more = stored_layer(lambda: self._job, checkpoints, step, number)
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
        # Also of parameters that the optimizer leaves out, whose gradients count in the norm.
        for each in self._updated:
            each.grad = None
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

    def evaluated(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """Return the output of the last layer in evaluation mode, as the loss takes it, and the targets beside it."""
        whole = nn.ModuleList(self._layers)
        with torch.no_grad(), torch.random.fork_rng():
            whole.eval()
            output, _ = self._forward(inputs, targets, 0, 0)
            whole.train()
        if self._job.precision.is_lower:
            output = _cast_to(torch.float32, output)
        return output, self._on_device(targets)

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
