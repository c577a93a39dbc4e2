"""One hop of a route, computed as the executor does, in pieces that can be measured one by one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from chameleon_ft.data.order import SampleOrder
from chameleon_ft.data.samples import load_micro_batch
from chameleon_ft.job import BoundarySpec, Job
from chameleon_ft.plan import LayerRange
from chameleon_ft.runtime.layers import GradientBuffers, HeldLayers
from chameleon_ft.runtime.profiling.memory import held_in_phases
from chameleon_ft.runtime.split_backward import PendingWeightGradient, WholeBackward, input_gradient
from chameleon_ft.sync import Segment

__all__ = ["Hop", "ModelOnDevice", "ResidentLayers", "StateBytes"]


class ModelOnDevice:
    """A job whose layers are built a few at a time, with one micro-batch to run them on.

    Attributes:
        boundaries: what leaves each layer for one micro-batch.
        samples: inputs and targets of the micro-batch.
    """

    def __init__(
        self,
        job: Job,
        *,
        boundaries: tuple[BoundarySpec, ...],
        micro_batch_size: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self.job = job
        self.boundaries = boundaries
        self.seed = seed
        self.device = device
        self._ids = SampleOrder(len(job.dataset), seed).ids(0, micro_batch_size)
        self.samples = self.load()

    @property
    def num_layers(self) -> int:
        return self.job.num_layers

    def load(self) -> tuple[Tensor, Tensor]:
        """Load the micro-batch, which costs what loading another one costs."""
        inputs, targets = load_micro_batch(self.job.dataset, self._ids)
        return inputs.to(self.device), targets.to(self.device)

    def kind(self, layer: int) -> str:
        """What the factory of `layer` is called, in lower case."""
        factory = self.job.layers[layer]
        name = str(getattr(getattr(factory, "func", factory), "__name__", "layer")).lower()
        return name if name.isidentifier() else "layer"

    def boundary_before(self, layer: int) -> Tensor:
        """What comes in to `layer`; random where an earlier layer makes it.

        Its size is what is needed and its values are not: an integer one is all zeros, which every layer knows.
        """
        if layer == 0:
            return self.samples[0]
        return self._like(self.boundaries[layer - 1])

    def gradient_after(self, layer: int) -> Tensor | None:
        """The gradient that comes in for the output of `layer`; None for the loss."""
        return None if layer == self.num_layers - 1 else self._like(self.boundaries[layer])

    def boundary_bytes(self, layer: int) -> int:
        """Bytes of what crosses behind `layer`; none before the first and behind the last."""
        return self.boundaries[layer].num_bytes if 0 <= layer < self.num_layers - 1 else 0

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def _like(self, spec: BoundarySpec) -> Tensor:
        if spec.dtype.is_floating_point or spec.dtype.is_complex:
            return torch.randn(spec.shape, dtype=spec.dtype, device=self.device)
        return torch.zeros(spec.shape, dtype=spec.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes that a worker holds for its layers all the time; buffers count as parameters.

    `commit_bytes` are those that it works with in a commit, for norm and update.
    """

    param_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    commit_bytes: int


class ResidentLayers:
    """Some layers on the device, with gradients that are added up and an optimizer that has been used, as in a run.

    Attributes:
        state: what that takes.
    """

    held: HeldLayers

    def __init__(self, model: ModelOnDevice, layers: LayerRange) -> None:
        self.model = model
        self.layers = layers
        taken_in = held_in_phases(
            {
                "layers": self._build,
                "gradients": self._add_gradients,
                "optimizer": self._commit,
                "commit": self._commit,
            },
            model.device,
        )
        taken = {name: during.after - during.before for name, during in taken_in.items()}
        commit = taken_in["commit"].peak - taken_in["commit"].before
        self.state = StateBytes(taken["layers"], taken["gradients"], taken["optimizer"], commit)

    def _build(self) -> None:
        self.held = HeldLayers(self.model.job, self.layers, seed=self.model.seed, device=self.model.device)

    def _add_gradients(self) -> None:
        self._buffers = GradientBuffers(self.held, (Segment(self.layers, (0,)),))

    def _commit(self) -> None:
        self._buffers.zero()
        self._buffers.square_sum(0)
        self.held.update(0)


class Hop:
    """Runs `layers`, which are resident, on one micro-batch: `enter`, `forward`, then `backward` or its halves.

    With `selective`, all of them are recomputed selectively.
    """

    def __init__(self, resident: ResidentLayers, layers: LayerRange, *, selective: bool = False) -> None:
        self._selective = layers if selective else ()
        self._resident = resident
        self._model = resident.model
        self.layers = layers
        self._boundary: Tensor | None = None
        self._output: Tensor | None = None
        self._incoming: Tensor | None = None
        self._outgoing: Tensor | None = None
        self._pending: PendingWeightGradient | WholeBackward | None = None
        self._graph: Tensor | None = None

    @property
    def is_first(self) -> bool:
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        return self.layers.stop == self._model.num_layers

    def enter(self) -> None:
        """Receive what comes in for the forward."""
        boundary = self._model.boundary_before(self.layers.start)
        self._boundary = boundary if self.is_first else boundary.requires_grad_(_is_differentiable(boundary))

    def forward(self) -> None:
        """The forward, which loads the samples that it needs, as in a step."""
        assert self._boundary is not None
        if self.is_first:
            self._model.load()
        output = self._resident.held.forward(
            self.layers, self._boundary, step=0, micro_batch=0, selective=self._selective
        )
        if self.is_last:
            if not self.is_first:
                self._model.load()
            output = self._model.job.loss(output, self._model.samples[1])
        self._output = output

    def receive_gradient(self) -> None:
        """Receive what comes in for the backward."""
        self._incoming = self._model.gradient_after(self.layers.stop - 1)

    def backward(self) -> None:
        """All of the backward in one go."""
        boundary, output = self._taken()
        if output.requires_grad:
            torch.autograd.backward(output, self._incoming)
        self._outgoing, self._incoming = boundary.grad, None

    def input_grad(self) -> None:
        """The half that makes the gradient of the input."""
        boundary, output = self._taken()
        parameters = self._resident.held.parameters(self.layers)
        self._outgoing, self._pending = input_gradient(output, self._incoming, boundary, parameters)
        self._incoming = None

    def weight_grad(self) -> None:
        """The other half."""
        assert self._pending is not None
        self._pending.run()
        self._pending = self._graph = None

    def keep_graph(self) -> None:
        """Keep, until W, all that I has been through, as a layer does that other layers of its hop come after."""
        assert self._output is not None
        self._graph = self._output.view_as(self._output)

    def leave(self) -> None:
        """Let go of the gradient that goes on to the hop before."""
        self._outgoing = None

    def _taken(self) -> tuple[Tensor, Tensor]:
        boundary, output = self._boundary, self._output
        assert boundary is not None
        assert output is not None
        self._boundary = self._output = None
        return boundary, output


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
