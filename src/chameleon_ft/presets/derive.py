"""Workloads from the shape of a model and the rates of a device, without running anything."""

from __future__ import annotations

from typing import Final

from chameleon_ft.errors import ConfigError
from chameleon_ft.presets.activations import (
    block_activation_bytes,
    block_selective_bytes,
    block_weight_grad_bytes,
    block_working_bytes,
    head_activation_bytes,
    head_weight_grad_bytes,
    head_working_bytes,
)
from chameleon_ft.presets.devices import Device
from chameleon_ft.presets.dtypes import STATE_POLICIES, StatePolicy
from chameleon_ft.presets.execution import Execution, Recompute
from chameleon_ft.presets.flops import TokenWork, layer_work
from chameleon_ft.presets.shape import ModelShape
from chameleon_ft.workload import LayerCost, TiedParameters, Workload

__all__ = ["derive_workload"]

_TOKEN_ID_BYTES: Final = 8
# All-reduces (or all-gather and reduce-scatter, which move as much) of a block's forward, and again of its backward.
_TP_REDUCTIONS: Final = 2


def derive_workload(
    shape: ModelShape,
    device: Device,
    *,
    micro_batch_size: int,
    micro_batches: int,
    execution: Execution = Execution(),  # noqa: B008 - frozen
    state: StatePolicy = STATE_POLICIES["bf16-master"],
) -> Workload:
    """What a step of training `shape` costs on workers of `execution.tp` devices.

    Seconds: matrix products at the device's achievable rate, element-wise operations at its achievable bandwidth, and
    with tensor parallelism two all-reduces of the block's output inside the host, in the forward and again in I.
    Nothing overlaps. Bytes are those of one rank; see `chameleon_ft.presets.activations` for their sources. Full
    recomputation is that of a plan whose workers all recompute, of the same workload without it.

    Raises:
        ConfigError: the device has no rate for the type of the parameters, `tp` does not divide the model, or a count
            is below one.
    """
    if micro_batch_size < 1:
        raise ConfigError(f"micro_batch_size must be at least 1; got {micro_batch_size}")
    execution.check(shape)
    deriving = _Deriving(shape, device, execution, state, tokens=micro_batch_size * shape.seq_len)
    workload = Workload(deriving.layers(), micro_batches, micro_batch_size, tied=deriving.tied())
    return workload.recomputed() if execution.recompute is Recompute.FULL else workload


class _Deriving:
    def __init__(
        self, shape: ModelShape, device: Device, execution: Execution, state: StatePolicy, *, tokens: int
    ) -> None:
        self._shape = shape
        self._device = device
        self._execution = execution
        self._state = state
        self._tokens = tokens
        self._element_bytes = state.parameters.num_bytes
        self._flops_per_s = device.flops_per_s(state.parameters) * execution.tp
        self._bytes_per_s = device.bytes_per_s * execution.tp

    def layers(self) -> tuple[LayerCost, ...]:
        shape, execution, tokens, element_bytes = self._shape, self._execution, self._tokens, self._element_bytes
        embedding_work, block_work, *_, head_work = layer_work(shape, execution, element_bytes)
        # The embedding keeps the ids for its gradient, which the backward turns into one row for each token.
        embedding = self._layer(
            "embedding",
            embedding_work,
            params=shape.embedding_params,
            activation_bytes=tokens * _TOKEN_ID_BYTES,
            weight_grad_bytes=tokens * (_TOKEN_ID_BYTES + -(-shape.hidden * element_bytes // execution.shared)),
        )
        blocks = tuple(
            self._layer(
                f"block {number}",
                block_work,
                params=shape.block_params,
                reductions=_TP_REDUCTIONS,
                activation_bytes=tokens * block_activation_bytes(shape, execution, element_bytes),
                selective_bytes=tokens * block_selective_bytes(shape, execution, element_bytes),
                weight_grad_bytes=tokens * block_weight_grad_bytes(shape, execution, element_bytes),
                working_bytes=block_working_bytes(shape, execution, tokens=tokens, element_bytes=element_bytes),
            )
            for number in range(1, shape.blocks + 1)
        )
        head = self._layer(
            "head",
            head_work,
            params=shape.head_params,
            activation_bytes=tokens * head_activation_bytes(shape, execution, element_bytes),
            weight_grad_bytes=tokens * head_weight_grad_bytes(shape, execution, element_bytes),
            working_bytes=head_working_bytes(shape, execution, tokens=tokens, element_bytes=element_bytes),
            crosses=False,
        )
        return (embedding, *blocks, head)

    def tied(self) -> tuple[TiedParameters, ...]:
        shape = self._shape
        if not shape.tied_embeddings:
            return ()
        own_params = -(-shape.vocab * shape.hidden // self._execution.tp)
        return (TiedParameters((0, shape.blocks + 1), own_params * self._state.gradients.num_bytes),)

    def _layer(
        self,
        name: str,
        work: TokenWork,
        *,
        params: int,
        activation_bytes: int,
        weight_grad_bytes: int,
        selective_bytes: int | None = None,
        working_bytes: int = 0,
        reductions: int = 0,
        crosses: bool = True,
    ) -> LayerCost:
        own_params = -(-params // self._execution.tp)
        reduction_s = reductions * self._reduction_s()
        return LayerCost(
            name=name,
            forward_s=self._seconds(work.forward_flops, work.forward_traffic) + reduction_s,
            input_grad_s=self._seconds(work.input_grad_flops, work.input_grad_traffic) + reduction_s,
            weight_grad_s=self._seconds(work.weight_grad_flops, work.weight_grad_traffic),
            param_bytes=own_params * self._state.parameters.num_bytes,
            activation_bytes=activation_bytes,
            weight_grad_bytes=weight_grad_bytes,
            output_bytes=self._boundary_bytes() if crosses else 0,
            gradient_bytes=own_params * self._state.gradients.num_bytes,
            optimizer_bytes=own_params * self._state.optimizer_bytes,
            working_bytes=working_bytes,
            selective_bytes=selective_bytes,
            selective_s=self._seconds(work.selective_flops, work.selective_traffic),
        )

    def _seconds(self, flops: float, traffic_bytes: float) -> float:
        return self._tokens * (flops / self._flops_per_s + traffic_bytes / self._bytes_per_s)

    def _boundary_bytes(self) -> int:
        """What a rank sends to its counterpart in the next stage."""
        return self._tokens * -(-self._shape.hidden * self._element_bytes // self._execution.shared)

    def _reduction_s(self) -> float:
        """An all-reduce of a block's output over the ranks of the worker."""
        whole = self._tokens * self._shape.hidden * self._element_bytes
        return self._device.intra_host.ring_all_reduce_s(whole, self._execution.tp)
