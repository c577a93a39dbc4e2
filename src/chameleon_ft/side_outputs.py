"""Values that a layer gives beside its output: auxiliary losses, metrics, and sums over the step.

They are collected where a forward is run: by a worker, by the plain loop, and when a job is examined. Elsewhere, as in
a forward that autograd runs again, the functions below do nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final, SupportsFloat

import torch
from torch import Tensor, nn

from chameleon_ft.errors import ConfigError

AUXILIARY: Final = "auxiliary_loss"
"""The name under which a layer is known to have auxiliary losses; no metric has it."""


def auxiliary_loss(value: Tensor | float, *, terms: SupportsFloat | None = None) -> None:
    """Add a loss to that of the job, from the forward of any layer.

    With the global batch's loss terms T, and t of them in a micro-batch, `value` adds ``value / T`` to the step's loss,
    as the job's own loss does; with terms of its own, ``t * (value / terms) / T``: then its mean over these weighs as
    much in each micro-batch as that of the job's loss. Evaluations leave it out.

    Args:
        value: a tensor of one number, or 0.0 where there is nothing to add.
        terms: how many terms `value` sums in this micro-batch, or their weights. With 0, nothing is added.

    Raises:
        ConfigError: `value` is no number with a gradient, or `terms` is negative.
    """
    if (side := _SIDE.get()) is None:
        return
    if side.is_training and not torch.is_grad_enabled():
        raise ConfigError(
            "auxiliary_loss is called without gradients, in torch.no_grad() or a reentrant checkpoint, so nothing "
            "would be trained by it; call it outside, or give torch.utils.checkpoint use_reentrant=False"
        )
    count = None if terms is None else _number("auxiliary_loss was called with terms", terms)
    if count is not None and count < 0:
        raise ConfigError(f"auxiliary_loss has {count:g} terms: give a number of 0 or more")
    number = _one("auxiliary_loss", value)
    if not number.is_floating_point():
        raise ConfigError(f"auxiliary_loss has a value of {number.dtype}: give a floating-point number")
    side.losses.append((number, count))


def log(name: str, value: Tensor | float, *, weight: SupportsFloat = 1.0) -> None:
    """Record a number under `name` from the forward of any layer in training.

    `metrics.jsonl` has its mean in each step: over the micro-batches, and over the layers that use the name.

    Args:
        name: any but "auxiliary_loss".
        value: a number, or a tensor of one; it gets no gradient.
        weight: its weight in the mean, such as the number of tokens; 0 where there is nothing to record.
    """
    if (side := _SIDE.get()) is None:
        return
    if not name or name == AUXILIARY:
        raise ConfigError(f"log was called with the name {name!r}: give another one")
    amount = _number(f"log({name!r}) was called with weight", weight)
    number = _one(f"log({name!r})", value).detach().float()
    total, weights = side.logged.get(name, (0.0, 0.0))
    # Without a weight, the value may be no number.
    side.logged[name] = (total + number * amount if amount else total, weights + amount)


# Before compiling, torch would otherwise follow them, though they do nothing that it could compile.
for _function in (auxiliary_loss, log):
    vars(_function)["_torchdynamo_disable"] = True


@dataclass(slots=True)
class SideOutputs:
    """The values that forwards have given beside their output.

    Attributes:
        is_training: The forwards are run with gradients.
        losses: Auxiliary losses, each with its own terms, if it has some.
        logged: name -> sum of the values, each by its weight, and sum of the weights.
        step_sums: What was added to each of the buffers that are summed over the step.
    """

    is_training: bool
    losses: list[tuple[Tensor, float | None]] = field(default_factory=list)
    logged: dict[str, tuple[Tensor | float, float]] = field(default_factory=dict)
    step_sums: list[Tensor] = field(default_factory=list)

    @property
    def names(self) -> tuple[str, ...]:
        """`AUXILIARY` if there are auxiliary losses, and the names of the metrics, in order."""
        return (*([AUXILIARY] if self.losses else []), *sorted(self.logged))

    @property
    def has_own_terms(self) -> bool:
        """Whether an auxiliary loss has terms of its own, so that those of the job's loss count."""
        return any(own is not None for _, own in self.losses)

    def roots(self, terms: float) -> list[tuple[Tensor, float]]:
        """Return the auxiliary losses, and how much each counts in a micro-batch with so many terms of the job's loss.

        So the sum over the global batch is divided by all terms of the job's loss.
        """
        return [(value, 1.0 if own is None else terms / own) for value, own in self.losses if own != 0]

    def loss(self, terms: float) -> Tensor:
        """Return the sum of the auxiliary losses of a micro-batch, to be added to the job's loss; see `roots`."""
        return sum((value * share for value, share in self.roots(terms)), torch.zeros(()))

    def sums(self, names: Sequence[str], terms: float, device: torch.device) -> Tensor:
        """Return two float32 numbers for each of the names: a sum, and the sum of its weights.

        Those of auxiliary losses are `loss`, and 0. What has none of the names is left out.
        """
        found: list[Tensor | float] = []
        for name in names:
            found += [self.loss(terms), 0.0] if name == AUXILIARY else self.logged.get(name, (0.0, 0.0))
        numbers = [torch.as_tensor(each, dtype=torch.float32, device=device).detach() for each in found]
        return torch.stack(numbers) if numbers else torch.zeros(0, device=device)


_SIDE: ContextVar[SideOutputs | None] = ContextVar("_SIDE", default=None)


@dataclass(frozen=True, slots=True)
class SummedBuffer:
    """A buffer that a layer declares to be summed over the step: `name` in `module`, `path` in the layer."""

    module: nn.Module
    name: str
    path: str

    @property
    def value(self) -> Tensor:
        """The buffer as it is."""
        return self.module.get_buffer(self.name)


def summed_buffers(layer: nn.Module) -> tuple[SummedBuffer, ...]:
    """Return the buffers that the modules of a layer name in `step_sums`.

    Raises ConfigError if one is no buffer of its module, or a module has no `after_step`, a function of the sums.
    """
    found: list[SummedBuffer] = []
    for place, module in layer.named_modules():
        for name in (names := getattr(module, "step_sums", ())):
            if isinstance(names, str) or module._buffers.get(name) is None:
                raise ConfigError(
                    f"{type(module).__name__}.step_sums is {names!r:.60}: give a tuple of names of its own buffers"
                )
            if not callable(getattr(module, "after_step", None)):
                raise ConfigError(
                    f"{type(module).__name__} has step_sums and no after_step(self, sums), which would use them after "
                    "the update; give it one, or leave step_sums out"
                )
            found.append(SummedBuffer(module, name, f"{place}.{name}" if place else name))
    return tuple(found)


def run_after_step(buffers: Sequence[SummedBuffer], totals: Sequence[Tensor]) -> None:
    """Call `after_step` of each module that declares some buffers, with the sums of these over the step."""
    sums: dict[nn.Module, dict[str, Tensor]] = {}
    for each, total in zip(buffers, totals, strict=True):
        sums.setdefault(each.module, {})[each.name] = total
    with torch.no_grad():
        for module, own in sums.items():
            module.after_step(own)  # type: ignore[operator]


@contextmanager
def collecting(buffers: Sequence[SummedBuffer] = ()) -> Iterator[SideOutputs]:
    """Collect what the forwards that run inside the block give beside their output.

    Each of the buffers is zero at the beginning, and as before at the end.
    """
    side, before = SideOutputs(torch.is_grad_enabled()), [each.value for each in buffers]
    for each, own in zip(buffers, before, strict=True):
        each.module._buffers[each.name] = torch.zeros_like(own)
    token = _SIDE.set(side)
    try:
        yield side
        side.step_sums = [each.value.detach() for each in buffers]
    finally:
        _SIDE.reset(token)
        for each, own in zip(buffers, before, strict=True):
            each.module._buffers[each.name] = own


def _number(what: str, value: SupportsFloat) -> float:
    number = float(value.detach() if isinstance(value, Tensor) else value)
    if not math.isfinite(number):
        raise ConfigError(f"{what}={number}: give a finite number")
    return number


def _one(what: str, value: Tensor | float) -> Tensor:
    """Return a tensor without dimensions, which is no leaf of a graph if it has one."""
    tensor = value if isinstance(value, Tensor) else torch.tensor(float(value))
    if tensor.numel() != 1:
        raise ConfigError(f"{what} got a tensor of shape {tuple(tensor.shape)}: give one number, such as its sum")
    return (tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor).sum()


UNCOMPILED: Final = (auxiliary_loss, log, _number, _one)
"""Functions that have nothing for a compiler."""
