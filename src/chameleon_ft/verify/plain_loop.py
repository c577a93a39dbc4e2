"""The plain loop that a run is compared with: one process, one model, PyTorch and nothing of the runtime.

It shares with a run only the functions of the job and the seeds that they are called with. Layers are built whole, the
loss is summed over micro-batches, gradients are clipped by torch's `clip_grad_norm_`, and the optimizer of the job
updates the parameters that its factory was given. Under bf16 it keeps float32 masters, as hand-written loops do.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from chameleon_ft.config import DEVICES, RunConfig
from chameleon_ft.data import SampleOrder
from chameleon_ft.data.samples import load_micro_batch
from chameleon_ft.job import Job
from chameleon_ft.keys import init_key, step_key
from chameleon_ft.observe import Storage
from chameleon_ft.verify.stored_state import stored_layer

__all__ = ["PlainLoop"]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


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
        for (first, first_name), *copies in job.tied:
            shared = self._layers[first].get_parameter(first_name)
            for layer, name in copies:
                _share(self._layers[layer], self._layers[layer].get_parameter(name), shared)
        self._masters: dict[nn.Parameter, nn.Parameter] = {}
        if job.precision.is_lower:
            self._layers[0].register_forward_pre_hook(_in_bfloat16, with_kwargs=True)
            for module in self._layers:
                self._cast(module)
        self._parameters = list(nn.ModuleList(self._layers).parameters())
        self._updated = [self._masters.get(each, each) for each in self._parameters]
        self._optimizer = job.optimizer(self._updated)
        self._own_rates = [group.get("initial_lr", group.get("lr", 1.0)) for group in self._optimizer.param_groups]
        self._order = SampleOrder(len(job.dataset), config.seed)

    def load(self, checkpoints: Storage, step: int) -> None:
        """Take over the state of all layers from a checkpoint. Raises ConfigError if it cannot be read."""
        options = self._optimizer.defaults
        on_host = None if options.get("fused") or options.get("capturable") else "step"  # as torch has the counter
        for number, layer in enumerate(self._layers):
            module, optimizer = stored_layer(checkpoints, step, number)
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

    def run_step(self, step: int, rate: float | None) -> tuple[float, float]:
        """Run one step; return the mean loss before the update and the norm of the gradient before clipping.

        Both are not a number, and nothing is changed, if the batch has no loss terms.
        """
        self._optimizer.zero_grad()
        batch = self._config.batch
        loss_sum, terms = 0.0, 0.0
        for micro_batch in range(batch.micro_batches):
            start = self._config.first_sample(step) + micro_batch * batch.micro_batch_size
            inputs, targets = load_micro_batch(self._job.dataset, self._order, start, batch.micro_batch_size)
            if not (own_terms := float(self._job.loss_terms(targets))):
                continue
            output = self._forward(inputs, step, micro_batch)
            if self._job.precision.is_lower and output.dtype in _FLOATS:
                output = output.float()
            loss = self._job.loss(output, targets.to(self._device))
            loss.backward()
            loss_sum += loss.item()
            terms += own_terms
        if not terms:
            return math.nan, math.nan
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
        if rate is not None:
            # The schedule is that of the default rate, or of the largest one if no group has the default.
            default, rates = self._optimizer.defaults.get("lr"), self._own_rates
            base = default if default in rates and default else max(rates)
            for group, own in zip(self._optimizer.param_groups, rates, strict=True):
                group["lr"] = rate if own == base else rate * own / base
        self._optimizer.step()
        for parameter, master in self._masters.items():
            parameter.data.copy_(master)
        return loss_sum / terms, grad_norm.item()

    def _forward(self, inputs: torch.Tensor, step: int, micro_batch: int) -> torch.Tensor:
        """(micro-batch, ...) -> output of the last layer for it."""
        hidden = inputs.to(self._device)
        for number, layer in enumerate(self._layers):
            torch.manual_seed(step_key(self._config.seed, step=step, micro_batch=micro_batch, layer=number))
            hidden = layer(hidden)
        return hidden

    def _cast(self, layer: nn.Module) -> None:
        """Have a layer compute in bfloat16, but for the modules that the job keeps, with masters of its parameters."""
        kept, keeps = set[nn.Module](), self._job.precision.keeps
        for name, module in layer.named_modules():
            if keeps(type(module).__name__, *([name] if name else [])) and module not in kept:
                kept.update(module.modules())
                module.register_forward_pre_hook(_in_float32, with_kwargs=True)
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
                        vars(master).update(vars(parameter))  # attributes by which an optimizer may tell it
                        parameter.grad_dtype = torch.float32  # sums over micro-batches and tied layers
                    parameter.data = parameter.data.to(torch.bfloat16)
            for key, buffer in module._buffers.items():
                if id(buffer) not in in_float32:
                    module._buffers[key] = _cast_to(torch.bfloat16, buffer)


def _share(layer: nn.Module, copy: nn.Parameter, shared: nn.Parameter) -> None:
    for module in layer.modules():  # which may use it in several places
        module._parameters.update({name: shared for name, own in module._parameters.items() if own is copy})


def _in_bfloat16(_: nn.Module, args: Any, kwargs: Any) -> Any:
    return _cast_to(torch.bfloat16, (args, kwargs))


def _in_float32(_: nn.Module, args: Any, kwargs: Any) -> Any:
    return _cast_to(torch.float32, (args, kwargs))


def _cast_to(dtype: torch.dtype, value: Any) -> Any:
    return tree_map(
        lambda each: each.to(dtype) if isinstance(each, torch.Tensor) and each.dtype in _FLOATS else each, value
    )
