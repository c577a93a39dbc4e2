"""One hop of a route, computed as the executor does, in phases that can be measured one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from chameleon_ft.config import RunConfig
from chameleon_ft.data.order import SampleOrder
from chameleon_ft.data.samples import load_micro_batch
from chameleon_ft.job import Job
from chameleon_ft.models.outputs import boundary_specs
from chameleon_ft.models.precision import loss_of
from chameleon_ft.plan import LayerRange
from chameleon_ft.runtime.device import wait_for_stream
from chameleon_ft.runtime.execution.gradients import GradientBuffers
from chameleon_ft.runtime.execution.layers import HeldLayers
from chameleon_ft.runtime.execution.split_backward import input_gradient
from chameleon_ft.runtime.profiling.memory import held_in_phases
from chameleon_ft.sync import Segment

Phases = dict[str, Callable[[], None]]
"""The parts of a computation by name, to be called one after the other."""


class ModelOnDevice:
    """A job whose layers are built a few at a time, with the first micro-batch of a run to run them on.

    Attributes:
        boundaries: the output of each layer for one micro-batch.
        samples: inputs and targets of the micro-batch.
    """

    def __init__(self, job: Job, config: RunConfig, device: torch.device) -> None:
        size = config.batch.micro_batch_size
        self.job = job
        self.boundaries = boundary_specs(job, size, device=device, seed=config.seed)
        self.seed = config.seed
        self.device = device
        self._order, self._size = SampleOrder(len(job.dataset), config.seed), size
        self.samples = self.read()

    @property
    def num_layers(self) -> int:
        return self.job.num_layers

    def read(self) -> tuple[Tensor, Tensor]:
        """Read the micro-batch, which takes as much memory as reading another one."""
        inputs, targets = load_micro_batch(self.job.dataset, self._order, 0, self._size)
        return inputs.to(self.device), targets.to(self.device)

    def kind(self, layer: int) -> str:
        """Return the name of the factory of `layer`, in lower case."""
        factory = self.job.layers[layer]
        name = str(getattr(getattr(factory, "func", factory), "__name__", "layer")).lower()
        return name if name.isidentifier() else "layer"

    def boundary_before(self, layer: int, *, alike: bool = False) -> Tensor:
        """Return the samples, or a random tensor of the shape and type that `layer` receives.

        An integer one is all zeros, a value that every layer accepts.

        Args:
            alike: whether all vectors of the random tensor are equal; samples stay as they are.
        """
        if layer == 0:
            return self.samples[0]
        boundary = self._like_output(layer - 1)
        return boundary.flatten()[: boundary.shape[-1]].expand_as(boundary).clone() if alike else boundary

    def gradient_after(self, layer: int) -> Tensor | None:
        """Return a gradient of the output of `layer`; None for the loss."""
        return None if layer == self.num_layers - 1 else self._like_output(layer)

    def boundary_bytes(self, layer: int) -> int:
        """Return the bytes that cross behind `layer`; none before the first and behind the last."""
        return self.boundaries[layer].num_bytes if 0 <= layer < self.num_layers - 1 else 0

    def synchronize(self) -> None:
        """Wait until the device has completed its work."""
        wait_for_stream(self.device)

    def _like_output(self, layer: int) -> Tensor:
        spec = self.boundaries[layer]
        make = torch.randn if _is_differentiable(spec.dtype) else torch.zeros
        return make(spec.shape, dtype=spec.dtype, device=self.device)


class ResidentLayers:
    """Some layers on the device, with accumulated gradients and an optimizer that has been used, as in a run.

    Attributes:
        param_bytes: bytes held for parameters and buffers.
        gradient_bytes: bytes held for gradients.
        optimizer_bytes: bytes held for the optimizer's state and the masters of parameters.
        commit_bytes: bytes in use only during a commit, for norm and update.
    """

    held: HeldLayers

    def __init__(self, model: ModelOnDevice, layers: LayerRange) -> None:
        self.model = model
        self.layers = layers
        held = held_in_phases(_in_phases(self._build(), "layers", "gradients", "optimizer", "commit"), model.device)
        self.param_bytes, self.gradient_bytes, self.optimizer_bytes = (
            held[name].after - held[name].before for name in ("layers", "gradients", "optimizer")
        )
        masters = self.held.master_bytes
        self.param_bytes, self.optimizer_bytes = self.param_bytes - masters, self.optimizer_bytes + masters
        self.commit_bytes = held["commit"].peak - held["commit"].before

    def _build(self) -> Iterator[None]:
        self.held = HeldLayers(self.model.job, self.layers, seed=self.model.seed, device=self.model.device)
        yield
        buffers = GradientBuffers(self.held, (Segment(self.layers, (0,)),))
        for _ in ("optimizer", "commit"):
            yield
            buffers.zero()
            buffers.square_sum(0)
            self.held.update(0)


class Hop:
    """Runs `layers`, which are resident, on one micro-batch, phase by phase.

    Args:
        selective: whether all of them are recomputed selectively.
        alike: whether all vectors of the input are equal.
    """

    def __init__(
        self, resident: ResidentLayers, layers: LayerRange, *, selective: bool = False, alike: bool = False
    ) -> None:
        self._selective = layers if selective else ()
        self._alike = alike
        self._held = resident.held
        self.model = resident.model
        self.layers = layers
        self.is_first = layers.start == 0
        self.is_last = layers.stop == self.model.num_layers

    def fused_phases(self) -> Phases:
        """The phases of a forward and a whole backward; the operations are F and B, and samples are read before F."""
        return _in_phases(self._fused(), "enter", "read", "F", "gradient", "B", "leave")

    def split_phases(self) -> Phases:
        """The phases of a forward and a backward in halves; not of a route's first hop, which has no I."""
        return _in_phases(self._split(), "enter", "F", "gradient", "graph", "I", "W", "leave")

    # Each phase ends with the release of what a run does not hold any more.

    def _fused(self) -> Iterator[None]:
        boundary = self._boundary()
        yield
        if self.is_first or self.is_last:
            self.model.read()
        yield
        output = self._forward(boundary)
        yield
        gradient = self.model.gradient_after(self.layers.stop - 1)
        yield
        if output.requires_grad:
            torch.autograd.backward(output, gradient)
        outgoing = boundary.grad
        del boundary, output, gradient
        yield
        del outgoing

    def _split(self) -> Iterator[None]:
        boundary = self._boundary()
        yield
        output = self._forward(boundary)
        yield
        gradient = self.model.gradient_after(self.layers.stop - 1)
        yield
        # The graph of I stays until W, as that of a layer does which other layers of its hop follow.
        graph = None if self.is_last else output.view_as(output)
        yield
        outgoing, weight_half = input_gradient(output, gradient, boundary, self._held.parameters(self.layers))
        del boundary, output, gradient
        yield
        weight_half()
        del weight_half, graph
        yield
        del outgoing

    def _boundary(self) -> Tensor:
        boundary = self.model.boundary_before(self.layers.start, alike=self._alike)
        return boundary if self.is_first else boundary.requires_grad_(_is_differentiable(boundary.dtype))

    def _forward(self, boundary: Tensor) -> Tensor:
        """Run F; samples are read outside it, as in a step."""
        output = self._held.forward(self.layers, boundary, step=0, micro_batch=0, selective=self._selective)
        if self.is_last:
            output = loss_of(self.model.job, output, self.model.samples[1])
        return output


def _in_phases(steps: Iterator[None], *names: str) -> Phases:
    """Name the phases that end with each `yield` of `steps`, and with its end. They must be called in this order."""
    return dict.fromkeys(names, partial(next, steps, None))


def _is_differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
