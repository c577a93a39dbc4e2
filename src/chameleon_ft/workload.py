"""The work of a training step: the costs of the layers, and the micro-batches that pass through them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Final

from chameleon_ft.errors import ConfigError

__all__ = ["LayerCost", "TiedParameters", "Workload", "is_recomputed"]


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Cost of one layer for one micro-batch on a worker of speed 1.

    Attributes:
        name: a name for people ("embedding", "block 3").
        forward_s: seconds of the forward.
        input_grad_s: seconds of the half of the backward that computes the gradient of the layer's input.
        weight_grad_s: seconds of the half of the backward that computes the gradients of the layer's parameters.
        fused_backward_s: seconds of the backward in one go; None if that is the sum of both halves. Halves are often
            slower together, because they repeat some work.
        param_bytes: bytes of the layer's parameters.
        activation_bytes: bytes kept from the forward until the backward, including the layer's input if it is kept.
        weight_grad_bytes: bytes kept from the input-gradient half until the weight-gradient half.
        output_bytes: bytes of the output, which is sent to the next worker if the layer ends a hop.
        gradient_bytes: bytes of the gradients of the parameters, which are always held and which gradient sync reduces.
        optimizer_bytes: bytes of the optimizer's state, including master copies of the parameters.
        working_bytes: most additional bytes while one of the layer's operations runs.
        sample_bytes: bytes of the samples that a worker holds for a layer that reads inputs or targets.
        unmoved_bytes: the share of `param_bytes` that does not move with the layer: buffers that every worker creates.
        selective_bytes: remainder of `activation_bytes` if the layer is recomputed selectively; None if it cannot be.
        selective_s: additional seconds of the backward in that case.

    With tensor parallelism all bytes are those of one rank of the worker.

    Raises:
        ConfigError: a time or a size is negative or not finite.
    """

    name: str
    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    param_bytes: int = 0
    activation_bytes: int = 0
    weight_grad_bytes: int = 0
    output_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    working_bytes: int = 0
    fused_backward_s: float | None = None
    sample_bytes: int = 0
    unmoved_bytes: int = 0
    selective_bytes: int | None = None
    selective_s: float = 0.0

    def __post_init__(self) -> None:
        for field, unit in _UNITS.items():
            if (value := getattr(self, field)) is not None:
                _check_amount(value, f"{field} of layer {self.name!r}", unit)

    @property
    def backward_s(self) -> float:
        """Seconds of the whole backward in one go."""
        return self.halves_s if self.fused_backward_s is None else self.fused_backward_s

    @property
    def halves_s(self) -> float:
        """Seconds of both halves of the backward, one after the other."""
        return self.input_grad_s + self.weight_grad_s

    @property
    def least_backward_s(self) -> float:
        """Seconds of the backward, in one go or in halves, whichever takes less; for lower bounds."""
        return min(self.backward_s, self.halves_s)

    def slowed(self, factor: float) -> LayerCost:
        """Return the cost with every operation `factor` times as long."""
        times = {field: getattr(self, field) for field, unit in _UNITS.items() if unit == "seconds"}
        slower = {field: seconds * factor for field, seconds in times.items() if seconds is not None}
        return dataclasses.replace(self, **slower)

    def recomputed(self, input_bytes: int) -> LayerCost:
        """Return the cost on a worker that keeps only the layer's input of `input_bytes`, and reruns its forward.

        The second forward takes as long as the first. Its results, the rest of the activations and once more the
        output, are needed only while the layer runs. Beside a forward, or an I that leaves the activations for W, that
        is an upper bound.
        """
        again_s, fused_s = self.forward_s, self.fused_backward_s
        return dataclasses.replace(
            self,
            input_grad_s=self.input_grad_s + again_s,
            fused_backward_s=None if fused_s is None else fused_s + again_s,
            activation_bytes=input_bytes,
            working_bytes=self.working_bytes + max(0, self.activation_bytes - input_bytes) + self.output_bytes,
            selective_bytes=None,
            selective_s=0.0,
        )


# Of each amount of a `LayerCost`.
_UNITS: Final = {
    field.name: "seconds" if field.name.endswith("_s") else "bytes"
    for field in dataclasses.fields(LayerCost)
    if field.name != "name"
}


@dataclass(frozen=True, slots=True)
class TiedParameters:
    """Parameters that several layers share; each of the layers holds a copy.

    Attributes:
        layers: the layers, ascending.
        gradient_bytes: of one copy; each layer's own `gradient_bytes` include it.

    Raises:
        ConfigError: fewer than two layers, or not in ascending order, or a negative size.
    """

    layers: tuple[int, ...]
    gradient_bytes: int

    def __post_init__(self) -> None:
        if len(self.layers) < 2 or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise ConfigError(f"tied parameters are of two layers or more, each once, ascending; got {self.layers}")
        _check_amount(self.gradient_bytes, f"gradient_bytes tied between layers {self.layers}", "bytes")


@dataclass(frozen=True, slots=True)
class Workload:
    """One optimizer step: `micro_batches` passes of `micro_batch_size` samples through `layers`.

    Attributes:
        layers: cost of each layer, in order.
        micro_batches: micro-batches in the global batch (M), over all pipelines.
        micro_batch_size: samples in one micro-batch.
        operation_overhead_s: fixed seconds of every operation on any worker.
        tied: parameters that layers share, each set of layers at most once.

    Raises:
        ConfigError: no layers, a count below one, a negative overhead, or tied layers that do not exist.
    """

    layers: tuple[LayerCost, ...]
    micro_batches: int
    micro_batch_size: int
    operation_overhead_s: float = 0.0
    tied: tuple[TiedParameters, ...] = ()

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("a workload needs at least one layer; got none")
        for field in ("micro_batches", "micro_batch_size"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field} must be at least 1; got {getattr(self, field)}")
        _check_amount(self.operation_overhead_s, "operation_overhead_s", "seconds")
        for each in self.tied:
            if each.layers[-1] >= len(self.layers):
                raise ConfigError(f"layers {each.layers} are tied, and there are only {len(self.layers)} layers")

    @property
    def tied_layers(self) -> tuple[tuple[int, ...], ...]:
        """The sets of layers that share parameters."""
        return tuple(each.layers for each in self.tied)

    @property
    def samples(self) -> int:
        """Samples in the global batch."""
        return self.micro_batches * self.micro_batch_size

    @property
    def selective_bytes(self) -> tuple[int, ...]:
        """Bytes that each layer keeps from its forward if it is recomputed selectively, or all if it cannot be."""
        return tuple(
            layer.activation_bytes
            if layer.selective_bytes is None or not is_recomputed(number, len(self.layers))
            else layer.selective_bytes
            for number, layer in enumerate(self.layers)
        )

    def recomputed(self) -> Workload:
        """Return the workload if every worker recomputes in full; see `is_recomputed`."""
        layers = [
            layer.recomputed(self.layers[number - 1].output_bytes) if is_recomputed(number, len(self.layers)) else layer
            for number, layer in enumerate(self.layers)
        ]
        return dataclasses.replace(self, layers=tuple(layers))


def is_recomputed(layer: int, num_layers: int) -> bool:
    """Return whether a worker that recomputes runs the forward of `layer` twice: for all but the first and last layer.

    The first layer looks up samples, which are kept anyway. The backward of the last layer follows its forward at once,
    so its activations exist at the moment of peak memory in any case, and recomputing it is expensive.
    """
    return 0 < layer < num_layers - 1


def _check_amount(value: float, what: str, unit: str) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{what} must be zero or a positive number of {unit}; got {value}")
