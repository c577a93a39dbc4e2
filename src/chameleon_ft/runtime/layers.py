"""The layers a rank holds: modules, optimizer, and gradients in flat buffers, one for each segment."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from chameleon_ft.job import Job
from chameleon_ft.models.build import blank_layer, build_layer, seed_forward
from chameleon_ft.models.recomputation import selective_recomputation
from chameleon_ft.plan import LayerRange
from chameleon_ft.sync import Segment

__all__ = ["GradientBuffers", "HeldLayers", "LayerState", "blank_module"]

# A norm in float64 is taken of a copy, which must not be one of all gradients; a launch costs more than a call.
_NORM_ELEMENTS = {True: 1 << 14, False: 1 << 22}  # on a CPU, elsewhere

LayerState = dict[str, Any]
"""One layer's state by flat key: ``module/NAME`` for parameters and persistent buffers, ``optimizer/NAME/KEY``."""


def blank_module(job: Job, layer: int, *, seed: int, device: torch.device) -> nn.Module:
    """Make a layer for `HeldLayers.take_in`; its parameters may hold anything."""
    return blank_layer(job, layer, seed).to(device).train()


class HeldLayers:
    """The modules of the layers a rank holds, on its device, and one optimizer over all their parameters."""

    def __init__(self, job: Job, layers: Iterable[int], *, seed: int, device: torch.device) -> None:
        self._job = job
        self._seed = seed
        self._device = device
        self._modules = {layer: build_layer(job, layer, seed).to(device).train() for layer in sorted(layers)}
        self._optimizer: torch.optim.Optimizer | None = None
        self._renew_optimizer()

    @property
    def layers(self) -> frozenset[int]:
        return frozenset(self._modules)

    def take_in(self, layer: int, state: Mapping[str, Any], module: nn.Module | None = None) -> None:
        """Hold one more layer, with the state that `state_of` gave elsewhere; tensors of `state` may be kept.

        Args:
            module: a blank one of the layer; tensors of `state` may be its own, then nothing is copied.
        """
        if module is None:
            module = blank_module(self._job, layer, seed=self._seed, device=self._device)
        self._modules = dict(sorted({**self._modules, layer: module}.items()))
        self._renew_optimizer()
        self.restore(layer, state)

    def keep_only(self, layers: Collection[int]) -> None:
        """Let go of all other layers, and of their memory."""
        if not self.layers.issubset(layers):
            self._modules = {layer: module for layer, module in self._modules.items() if layer in layers}
            self._renew_optimizer()

    def drop_gradients(self) -> None:
        """Let go of the gradients' memory, as far as nothing else needs it."""
        for module in self._modules.values():
            module.zero_grad(set_to_none=True)

    def forward(
        self, layers: LayerRange, boundary: Tensor, *, step: int, micro_batch: int, selective: Collection[int] = ()
    ) -> Tensor:
        """Run `layers` on one micro-batch, each with its own random key; keep less of those that are `selective`."""
        for layer in layers:
            seed_forward(self._seed, step=step, micro_batch=micro_batch, layer=layer, device=self._device)
            with selective_recomputation() if layer in selective else nullcontext():
                boundary = self._modules[layer](boundary)
        return boundary

    def parameters(self, layers: LayerRange) -> list[nn.Parameter]:
        """The trained parameters of `layers`, in order."""
        return [p for layer in layers for p in self._modules[layer].parameters() if p.requires_grad]

    def tied(self, layers: Collection[int]) -> list[list[nn.Parameter]]:
        """The trained parameters that exactly these layers share: of each, the copies in layers that are held."""
        groups = (
            [self._modules[layer].get_parameter(name) for layer, name in copies if layer in self._modules]
            for copies in self._job.tied_with(layers)
        )
        return [copies for copies in groups if copies and copies[0].requires_grad]

    def _placed(self, key: str, value: Any, parameter: nn.Parameter) -> Any:
        """Put a value of the optimizer's state where the optimizer keeps it: with its parameter, but for the counter.

        Torch keeps a counter called "step" on the CPU unless the update is fused or capturable.
        """
        if not isinstance(value, Tensor):
            return value
        assert self._optimizer is not None
        group = next(g for g in self._optimizer.param_groups if any(p is parameter for p in g["params"]))
        on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
        return value.to("cpu" if on_host else parameter.device)

    def update(self, step: int) -> float:
        """Run the optimizer on the gradients as they are and return the learning rate of that step."""
        if self._optimizer is None:
            return 0.0 if self._job.learning_rate is None else self._job.learning_rate(step)
        if self._job.learning_rate is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = self._job.learning_rate(step)
        self._optimizer.step()
        return float(self._optimizer.param_groups[0]["lr"])

    def state_of(self, layer: int) -> LayerState:
        """A layer's parameters, persistent buffers and optimizer state: its own tensors, which training changes."""
        module = self._modules[layer]
        state: LayerState = {f"module/{name}": value for name, value in module.state_dict().items()}
        if self._optimizer is not None:
            for name, parameter in module.named_parameters():
                for key, value in self._optimizer.state.get(parameter, {}).items():
                    state[f"optimizer/{name}/{key}"] = value
        return state

    def snapshot(self, layer: int) -> LayerState:
        """Copy what `state_of` gives to host memory."""
        state = self.state_of(layer).items()
        return {key: _to_host(value) if isinstance(value, Tensor) else value for key, value in state}

    def restore(self, layer: int, state: Mapping[str, Any]) -> None:
        """Take over what `state_of` or `snapshot` gave for this layer."""
        module = self._modules[layer]
        weights = {key.removeprefix("module/"): value for key, value in state.items() if key.startswith("module/")}
        module.load_state_dict(weights)
        if self._optimizer is None:
            return
        for name, parameter in module.named_parameters():
            prefix = f"optimizer/{name}/"
            own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            if own:
                self._optimizer.state[parameter] = {
                    key: self._placed(key, value, parameter) for key, value in own.items()
                }

    def _renew_optimizer(self) -> None:
        """Make an optimizer for the parameters that are held now; what it kept for them stays."""
        before = None if self._optimizer is None else self._optimizer.state
        parameters = [p for module in self._modules.values() for p in module.parameters() if p.requires_grad]
        self._optimizer = self._job.optimizer(parameters) if parameters else None
        if self._optimizer is not None and before is not None:
            self._optimizer.state.update({p: before[p] for p in parameters if p in before})


class GradientBuffers:
    """The gradients of the held layers as views into one flat buffer for each segment and element type.

    Autograd accumulates into the views in place, so that a segment is reduced without being gathered first. The copies
    of a tied parameter have one view together, which sums their gradients.
    """

    def __init__(self, held: HeldLayers, segments: Sequence[Segment]) -> None:
        self.segments = tuple(
            segment
            for segment in segments
            if (not held.layers.isdisjoint(segment.tied) if segment.tied else held.layers.issuperset(segment.layers))
        )
        tied = {segment: held.tied(segment.tied) for segment in self.segments if segment.tied}
        elsewhere = {id(copy) for groups in tied.values() for copies in groups for copy in copies}
        self._buffers = {
            segment: _flat_gradients(
                tied[segment]
                if segment.tied
                else [[p] for p in held.parameters(segment.layers) if id(p) not in elsewhere]
            )
            for segment in self.segments
        }

    def of(self, segment: Segment) -> tuple[Tensor, ...]:
        """The flat buffers of a segment, one for each element type of its parameters."""
        return self._buffers[segment]

    def zero(self) -> None:
        """Start a step."""
        for buffer in self._all():
            buffer.zero_()

    def scale(self, factor: float) -> None:
        for buffer in self._all():
            buffer.mul_(factor)

    def square_sum(self, worker: int) -> float:
        """The squared L2 norm of the segments that `worker` is the first holder of.

        Every layer has one first holder, so that the sum of this over all workers counts each layer once.
        """
        own = [buffer for segment in self.segments if segment.holders[0] == worker for buffer in self.of(segment)]
        parts = [part for buffer in own for part in buffer.split(_NORM_ELEMENTS[buffer.is_cpu])]
        return math.fsum(float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2 for part in parts)

    def _all(self) -> Iterable[Tensor]:
        for buffers in self._buffers.values():
            yield from buffers


def _flat_gradients(parameters: Sequence[Sequence[nn.Parameter]]) -> tuple[Tensor, ...]:
    """Give the copies of each parameter, mostly there is one, their view."""
    buffers: list[Tensor] = []
    by_type = sorted(parameters, key=lambda copies: str(copies[0].dtype))
    for dtype, group in groupby(by_type, key=lambda copies: copies[0].dtype):
        same = list(group)
        buffer = torch.zeros(sum(copies[0].numel() for copies in same), dtype=dtype, device=same[0][0].device)
        offset = 0
        for copies in same:
            size = copies[0].numel()
            for copy in copies:
                copy.grad = buffer[offset : offset + size].view_as(copy)
            offset += size
        buffers.append(buffer)
    return tuple(buffers)


def _to_host(value: Tensor) -> Tensor:
    # `clone` also where the tensor is on the CPU already: training goes on changing it.
    return value.detach().to("cpu", copy=True)
