"""The work of a training step: the costs of the layers, and the micro-batches that pass through them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Final

from chameleon_ft.errors import ConfigError

MAX_MICRO_BATCHES: Final = 1_000_000
"""Of a step: a plan has a route for each of them."""


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Cost of one layer for one micro-batch on a worker of speed 1.

    Attributes:
        name: name for display ("embedding", "block 3").
        forward_s: seconds of the forward.
        input_grad_s: seconds of the backward half that computes the gradient of the layer's input (I).
        weight_grad_s: seconds of the backward half that computes the gradients of the layer's parameters (W).
        fused_backward_s: seconds of the backward as one operation; None if it equals the sum of both halves. The halves
            together often take longer, because they repeat some work.
        param_bytes: bytes of the layer's parameters.
        activation_bytes: bytes kept from the forward until the backward, including the layer's input if it is kept.
        weight_grad_bytes: bytes kept from the input-gradient half until the weight-gradient half.
        output_bytes: bytes of the output, which is sent to the next worker if the layer ends a hop.
        gradient_bytes: bytes of the parameter gradients, which stay allocated and are reduced by gradient sync.
        optimizer_bytes: bytes of optimizer state, including master copies of the parameters.
        master_bytes: the part of `optimizer_bytes` that are master copies.
        working_bytes: peak of the additional bytes while the forward or the whole backward of the layer runs.
        halves_working_bytes: that while I or W runs; None: as `working_bytes`.
        sample_bytes: bytes of the samples that a worker holds for a layer that reads inputs or targets.
        unmoved_bytes: the part of `param_bytes` that does not move with the layer: buffers that every worker creates,
            and parameters that it rounds from their masters.
        reread_bytes: the part of `param_bytes` that snapshots and checkpoints leave out, because it is not trained, and
            read from the job's files again.
        selective_bytes: the part of `activation_bytes` that selective recomputation keeps; None if it is not possible.
        selective_weight_grad_bytes: `weight_grad_bytes` with selective recomputation; None: as without it.
        selective_working_bytes: `working_bytes` with selective recomputation; None: those without it, and all that is
            made again.
        selective_s: additional seconds of the backward with selective recomputation.

    With tensor parallelism, all bytes are per rank of the worker.

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
    master_bytes: int = 0
    working_bytes: int = 0
    halves_working_bytes: int | None = None
    fused_backward_s: float | None = None
    sample_bytes: int = 0
    unmoved_bytes: int = 0
    reread_bytes: int = 0
    selective_bytes: int | None = None
    selective_weight_grad_bytes: int | None = None
    selective_working_bytes: int | None = None
    selective_s: float = 0.0

    def __post_init__(self) -> None:
        for field, unit in _UNITS.items():
            if (value := getattr(self, field)) is not None:
                _check_amount(value, f"{field} of layer {self.name!r}", unit)

    @property
    def held_bytes(self) -> int:
        """Bytes that a holder keeps throughout a step: parameters, gradients and optimizer state."""
        return self.param_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def working_in_halves(self) -> int:
        """Peak of the additional bytes while I or W of the layer runs."""
        return self.working_bytes if self.halves_working_bytes is None else self.halves_working_bytes

    @property
    def backward_s(self) -> float:
        """Seconds of the whole backward as one operation."""
        return self.halves_s if self.fused_backward_s is None else self.fused_backward_s

    @property
    def total_s(self) -> float:
        """Seconds of the forward and the whole backward."""
        return self.forward_s + self.backward_s

    @property
    def halves_s(self) -> float:
        """Seconds of both halves of the backward, one after the other."""
        return self.input_grad_s + self.weight_grad_s

    @property
    def min_backward_s(self) -> float:
        """Seconds of the backward, fused or split, whichever is faster; for lower bounds."""
        return min(self.backward_s, self.halves_s)

    def slowed(self, factor: float) -> LayerCost:
        """Return the cost with every operation taking `factor` times as long."""
        times = {field: getattr(self, field) for field, unit in _UNITS.items() if unit == "seconds"}
        slower = {field: seconds * factor for field, seconds in times.items() if seconds is not None}
        return dataclasses.replace(self, **slower)

    def recomputed(self, input_bytes: int) -> LayerCost:
        """Return the cost on a worker that keeps only the layer's input (`input_bytes`) and reruns its forward.

        The second forward takes as long as the first. Its results, which are the rest of the activations and
        another copy of the output, exist only while the layer runs, so they count as working memory. That count is an
        upper bound for a forward, and for an I that leaves the activations for W.
        """
        rerun_s, fused_s = self.forward_s, self.fused_backward_s
        made_again = max(0, self.activation_bytes - input_bytes) + self.output_bytes
        return dataclasses.replace(
            self,
            input_grad_s=self.input_grad_s + rerun_s,
            fused_backward_s=None if fused_s is None else fused_s + rerun_s,
            activation_bytes=input_bytes,
            working_bytes=self.working_bytes + made_again,
            halves_working_bytes=self.working_in_halves + made_again,
            selective_bytes=None,
            selective_weight_grad_bytes=None,
            selective_working_bytes=None,
            selective_s=0.0,
        )

    def recomputed_selectively(self) -> LayerCost:
        """Return the cost on a worker that recomputes the layer selectively; the cost itself if that is impossible."""
        if self.selective_bytes is None:
            return self
        left, working = self.selective_weight_grad_bytes, self.selective_working_bytes
        again = max(0, self.activation_bytes - self.selective_bytes)
        fused_s = self.fused_backward_s
        return dataclasses.replace(
            self,
            input_grad_s=self.input_grad_s + self.selective_s,
            fused_backward_s=None if fused_s is None else fused_s + self.selective_s,
            activation_bytes=self.selective_bytes,
            weight_grad_bytes=self.weight_grad_bytes if left is None else left,
            working_bytes=self.working_bytes + again if working is None else working,
            halves_working_bytes=self.working_in_halves,
            selective_bytes=None,
            selective_weight_grad_bytes=None,
            selective_working_bytes=None,
            selective_s=0.0,
        )


# Unit of each numeric field of `LayerCost`.
_UNITS: Final = {
    field.name: "seconds" if field.name.endswith("_s") else "bytes"
    for field in dataclasses.fields(LayerCost)
    if field.name != "name"
}


@dataclass(frozen=True, slots=True)
class TiedParameters:
    """Parameters that several layers share; each of the layers holds a copy.

    Attributes:
        layers: numbers of the layers, in ascending order.
        gradient_bytes: bytes of one copy's gradients; the `gradient_bytes` of each layer include them.

    Raises:
        ConfigError: there are fewer than two layers, they are not in ascending order, or the size is negative.
    """

    layers: tuple[int, ...]
    gradient_bytes: int

    def __post_init__(self) -> None:
        if len(self.layers) < 2 or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise ConfigError(
                f"tied parameters need two or more different layers in ascending order; got {self.layers}"
            )
        _check_amount(self.gradient_bytes, f"gradient_bytes tied between layers {self.layers}", "bytes")


@dataclass(frozen=True, slots=True)
class Workload:
    """One optimizer step: `micro_batches` passes of `micro_batch_size` samples through `layers`.

    Attributes:
        layers: cost of each layer, in order.
        micro_batches: micro-batches in the global batch (M), over all pipelines.
        micro_batch_size: samples in one micro-batch.
        operation_overhead_s: fixed seconds added to every operation, on any worker.
        tied: parameters that several layers share; no two entries have the same layers.
        owners: holders of a layer that keep the same part of its optimizer state; None: each holder keeps all of it.

    Raises:
        ConfigError: no layers, a count below one, a negative overhead, or tied layers that do not exist.
    """

    layers: tuple[LayerCost, ...]
    micro_batches: int
    micro_batch_size: int
    operation_overhead_s: float = 0.0
    tied: tuple[TiedParameters, ...] = ()
    owners: int | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("a workload needs at least one layer; got none")
        for field in ("micro_batches", "micro_batch_size", "owners"):
            if (value := getattr(self, field)) is not None and value < 1:
                raise ConfigError(f"{field} must be at least 1; got {getattr(self, field)}")
        if self.micro_batches > MAX_MICRO_BATCHES:
            raise ConfigError(f"micro_batches must be at most {MAX_MICRO_BATCHES}; got {self.micro_batches}")
        _check_amount(self.operation_overhead_s, "operation_overhead_s", "seconds")
        for each in self.tied:
            if each.layers[-1] >= len(self.layers):
                raise ConfigError(f"layers {each.layers} are tied, but there are only {len(self.layers)} layers")

    @property
    def first_trained(self) -> int:
        """The first layer with a backward: those before it are not trained, and get no gradients."""
        has_one = (number for number, layer in enumerate(self.layers) if layer.gradient_bytes or layer.min_backward_s)
        return next(has_one, 0)

    @property
    def layer_times_s(self) -> tuple[float, ...]:
        """Seconds of the forward and the whole backward of each layer, for one micro-batch."""
        return tuple(layer.total_s for layer in self.layers)

    @property
    def tied_layers(self) -> tuple[tuple[int, ...], ...]:
        """The sets of layers that share parameters."""
        return tuple(each.layers for each in self.tied)

    @property
    def replicated_bytes(self) -> tuple[int, ...]:
        """Bytes of the optimizer state that every holder of a layer keeps, although others own slices.

        That is the state of tied parameters.
        """
        found = []
        for number, layer in enumerate(self.layers):
            tied = sum(each.gradient_bytes for each in self.tied if number in each.layers)
            found.append(layer.optimizer_bytes * tied // layer.gradient_bytes if layer.gradient_bytes else 0)
        return tuple(found)

    @property
    def divided_bytes(self) -> tuple[int, ...]:
        """Bytes of the optimizer state of each layer that moves in slices, apart from the layer."""
        if self.owners is None:
            return (0,) * len(self.layers)
        pairs = zip(self.layers, self.replicated_bytes, strict=True)
        return tuple(layer.optimizer_bytes - replicated for layer, replicated in pairs)

    @property
    def moving_layers(self) -> tuple[LayerCost, ...]:
        """The layers with what moves with them: without `divided_bytes`, but with parameters rounded by the owners."""
        return tuple(
            dataclasses.replace(
                layer,
                optimizer_bytes=layer.optimizer_bytes - divided,
                unmoved_bytes=max(0, layer.unmoved_bytes - layer.master_bytes // 2) if divided else layer.unmoved_bytes,
            )
            for layer, divided in zip(self.layers, self.divided_bytes, strict=True)
        )

    def is_recomputed(self, layer: int) -> bool:
        """Return whether a backward runs a layer again that may be recomputed: not one without a backward."""
        return is_recomputed(layer, len(self.layers)) and layer >= self.first_trained

    @property
    def samples(self) -> int:
        """Samples in the global batch."""
        return self.micro_batches * self.micro_batch_size

    def recomputed(self) -> Workload:
        """Return the workload with full recomputation on every worker; see `is_recomputed`."""
        layers = [
            layer.recomputed(self.layers[number - 1].output_bytes) if self.is_recomputed(number) else layer
            for number, layer in enumerate(self.layers)
        ]
        return dataclasses.replace(self, layers=tuple(layers))

    def recomputed_selectively(self) -> Workload:
        """Return the workload with selective recomputation on every worker, of the layers that allow it."""
        layers = [
            layer.recomputed_selectively() if self.is_recomputed(number) else layer
            for number, layer in enumerate(self.layers)
        ]
        return dataclasses.replace(self, layers=tuple(layers))


def is_recomputed(layer: int, num_layers: int) -> bool:
    """Return whether recomputation reruns the forward of `layer`: true for all layers but the first and the last.

    The first layer looks up samples, which are kept anyway. The backward of the last layer follows directly after
    its forward, so its activations exist at peak memory anyway, and recomputing them is expensive.
    """
    return 0 < layer < num_layers - 1


def _check_amount(value: float, what: str, unit: str) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{what} must be zero or a positive number of {unit}; got {value}")
