"""The lines of the bound on a pipeline's time, as sums over layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from chameleon_ft.schedule import CostModel
from chameleon_ft.workload import LayerCost


@dataclass(frozen=True, slots=True)
class SyncCost:
    """Seconds of gradient sync that follow the last operation of any stage: fixed, and for each byte of gradients."""

    fixed_s: float = 0.0
    per_byte_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One line of the bound: head(start) + boundaries + m * (overhead + work of the stage) <= time.

    `first_work` is the work where the stage is the first of its pipeline. Prefix sums over layers, at speed 1.
    """

    head: list[float]
    boundary_s: float
    overhead_s: float
    first_work: list[float]
    work: list[float]
    ends_stage: bool


def conditions(costs: CostModel, *, split_backward: bool) -> list[Condition]:
    """Of pipelines with fused, or with split backward; messages over the fastest link."""
    workload = costs.workload
    overhead_s = workload.operation_overhead_s
    least_bytes = min((layer.output_bytes for layer in workload.layers[:-1]), default=0)
    message_s = min(link.message_s(least_bytes) for link in (costs.cluster.intra_host, costs.cluster.inter_host))

    def summed(seconds: Callable[[LayerCost], float]) -> list[float]:
        return list(accumulate(map(seconds, workload.layers), initial=0.0))

    if not split_backward:
        work = summed(lambda layer: layer.forward_s + layer.backward_s)
        return [
            Condition(
                head=work,
                boundary_s=2 * (message_s + overhead_s),
                overhead_s=2 * overhead_s,
                first_work=work,
                work=work,
                ends_stage=True,
            )
        ]
    # Of a first stage, only the F of each micro-batch is sure to come before its last I, which costs nothing.
    forward = summed(lambda layer: layer.forward_s)
    return [
        Condition(
            head=forward,
            boundary_s=message_s + overhead_s,
            overhead_s=3 * overhead_s,
            first_work=summed(lambda layer: layer.forward_s + layer.backward_s),
            work=summed(lambda layer: layer.forward_s + layer.halves_s),
            ends_stage=True,
        ),
        Condition(
            head=summed(lambda layer: layer.forward_s + min(layer.input_grad_s, layer.backward_s)),
            boundary_s=2 * (message_s + overhead_s),
            overhead_s=2 * overhead_s,
            first_work=forward,
            work=summed(lambda layer: layer.forward_s + layer.input_grad_s),
            ends_stage=False,
        ),
    ]
