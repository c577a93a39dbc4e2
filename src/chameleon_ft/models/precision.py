"""Casting of layers to the precision of a run.

Under bf16 a layer computes in bfloat16, as after ``layer.to(torch.bfloat16)``, except for what `Precision` leaves in
float32: modules, which get their inputs in float32 and return bfloat16, and parameters and buffers. What a micro-batch
adds to a gradient has the bits of bfloat16, and is summed in float32. The optimizer updates float32 masters, of which
the parameters are rounded copies.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from chameleon_ft.errors import ConfigError
from chameleon_ft.job.computation import Precision
from chameleon_ft.job.job import Job
from chameleon_ft.trees import leaves_of, mapped

_SENSITIVE: Final = ("norm", "router", "a_log", "inv_freq")


def cast_layer(module: nn.Module, precision: Precision, *, is_first: bool) -> dict[str, nn.Parameter]:
    """Cast a layer in place; return the masters of its trained parameters by name, of those that have one.

    The masters have the values that the parameters had before. Under fp32 the layer stays as it is, without masters.

    Args:
        is_first: True if the layer gets the inputs of the dataset, which are cast, too, as are those that other layers
            get by keyword.
    """
    if not precision.is_lower:
        return {}
    if is_first:
        module.register_forward_pre_hook(partial(_cast_inputs, torch.bfloat16), with_kwargs=True)
    elif len(arguments_of(module)) > 1:
        module.register_forward_pre_hook(_cast_keywords, with_kwargs=True)
    precision, masters = with_declared(module, precision), dict[int, nn.Parameter]()
    _cast(module, "", precision, masters)
    if kept_by_name(module, precision):
        # A tensor in float32 may have made the output float32.
        module.register_forward_hook(_output_in_bfloat16)
    return {name: masters[id(each)] for name, each in module.named_parameters() if id(each) in masters}


def arguments_of(module: nn.Module) -> list[inspect.Parameter]:
    """Return the arguments of a layer's forward; none if they are not known."""
    # `torch.compile` wraps a module.
    try:
        return list(inspect.signature(getattr(module, "_orig_mod", module).forward).parameters.values())
    except (TypeError, ValueError):
        return []


def parameter_like(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    """Return a parameter with the memory of `values`, and the class and the attributes of another one."""
    made = nn.Parameter(values.detach(), parameter.requires_grad)
    if type(made) is nn.Parameter and isinstance(parameter, type(made)):
        made.__class__ = type(parameter)
    # A tensor of a class of its own keeps its memory in attributes.
    made.__dict__.update({key: own for key, own in parameter.__dict__.items() if key not in made.__dict__})
    return made


def loss_of(job: Job, output: Any, targets: Any) -> Tensor:
    """Return the job's loss of the last layer's output, which is computed in float32."""
    return job.loss(as_loss_input(job, output), targets)


def as_loss_input(job: Job, output: Any) -> Any:
    """Return the output of the last layer as the loss and metrics get it: under a lower precision, in float32."""
    if not job.precision.is_lower:
        return output
    return mapped(lambda leaf: leaf.float() if leaf.is_floating_point() else leaf, output)


def loss_and_terms(job: Job, output: Any, targets: Any) -> tuple[Tensor, float]:
    """Return the job's loss of the last layer's output, and its terms.

    Without terms, the loss and its gradient are zero: the job's own loss is not computed, which may divide by them.

    Raises:
        ConfigError: `loss_terms` returned something else than a number of 0 or more.
    """
    terms = terms_of(job, targets)
    if not terms:
        # A sum over nothing is connected to the output.
        leaves = leaves_of(output)
        connected = next((leaf for leaf in leaves if leaf.requires_grad), leaves[0])
        return connected.reshape(-1)[:0].sum().abs().float(), 0.0
    return loss_of(job, output, targets), terms


def terms_of(job: Job, targets: Any) -> float:
    """Return the terms of a micro-batch's loss. Raises ConfigError unless they are a number of 0 or more."""
    returned = job.loss_terms(targets)
    try:
        terms = float(returned)
    except (TypeError, ValueError, RuntimeError):
        terms = math.nan
    if not (math.isfinite(terms) and terms >= 0):
        raise ConfigError(
            f"`loss_terms` returned {returned!r:.60}: it returns how many terms `loss` sums, or the sum of their "
            "weights, as a number of 0 or more or a tensor of one"
        )
    return terms


def with_declared(module: nn.Module, precision: Precision) -> Precision:
    """Return the precision that also leaves in float32 what a layer, or a module in it, says.

    Models of transformers name parts of them in `_keep_in_fp32_modules` and `_keep_in_fp32_modules_strict`.
    """
    kept = [
        f"{path}.{between}{name}" if path else f"{between}{name}"
        for path, part in module.named_modules()
        for declared in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
        for name in sorted(getattr(part, declared, None) or ())
        for between in ("", "*.")
    ]
    return replace(precision, fp32_modules=(*precision.fp32_modules, *kept)) if kept else precision


def looks_sensitive(name: str) -> bool:
    """Return whether a parameter has a name as of those that models mostly keep in float32."""
    return any(part in name.lower() for part in _SENSITIVE)


def kept_by_name(module: nn.Module, precision: Precision) -> dict[str, Tensor]:
    """Return the parameters and buffers of a layer that bf16 leaves in float32 by their own names."""
    tensors, precision = [*module.named_parameters(), *module.named_buffers()], with_declared(module, precision)
    return {name: each for name, each in tensors if precision.is_lower and precision.keeps(name) and _is_cast(each)}


def _cast(module: nn.Module, name: str, precision: Precision, masters: dict[int, nn.Parameter]) -> None:
    """Cast a module and those in it; add the masters of its parameters, by the ids of the parameters."""
    if precision.keeps(type(module).__name__, *([name] if name else [])):
        module.register_forward_pre_hook(partial(_cast_inputs, torch.float32), with_kwargs=True)
        module.register_forward_hook(_output_in_bfloat16)
        for kept in module.parameters():
            if kept.requires_grad and _is_cast(kept):
                kept.register_hook(_rounded)
        return
    path = f"{name}." if name else ""
    for key, parameter in module._parameters.items():
        if parameter is None or not _is_cast(parameter) or id(parameter) in masters:
            continue
        if precision.keeps(path + key):
            if parameter.requires_grad:
                parameter.register_hook(_rounded)
            continue
        if parameter.requires_grad:
            masters[id(parameter)] = parameter_like(parameter, parameter.float())
            parameter.grad_dtype = torch.float32
        parameter.data = parameter.data.to(torch.bfloat16)
    for key, buffer in module._buffers.items():
        is_sum = key in getattr(module, "step_sums", ())
        if buffer is not None and _is_cast(buffer) and not is_sum and not precision.keeps(path + key):
            module._buffers[key] = buffer.to(torch.bfloat16)
    for key, child in module.named_children():
        _cast(child, path + key, precision, masters)


def _is_cast(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float32, torch.float16, torch.bfloat16)


def _rounded(gradient: Tensor) -> Tensor:
    """Round a contribution to a gradient to the bits of bfloat16: sums of few bits are exact in any order."""
    return gradient.to(torch.bfloat16).to(gradient.dtype)


def _output_in_bfloat16(_: nn.Module, __: Any, output: Any) -> Any:
    return _in(torch.bfloat16, output)


def _cast_keywords(_: nn.Module, args: Any, kwargs: Any) -> Any:
    return args, _in(torch.bfloat16, kwargs)


def _cast_inputs(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> Any:
    return _in(dtype, args), _in(dtype, kwargs)


def _in(dtype: torch.dtype, value: Any) -> Any:
    """Cast the tensors in a value that are float32 or bfloat16."""
    if isinstance(value, Tensor):
        return value.to(dtype) if _is_cast(value) else value
    if type(value) in (tuple, list):
        return type(value)(_in(dtype, each) for each in value)
    if type(value) is dict:
        return {key: _in(dtype, each) for key, each in value.items()}
    # Such as a dataclass of tensors that goes from layer to layer.
    return mapped(lambda each: _in(dtype, each), value)
