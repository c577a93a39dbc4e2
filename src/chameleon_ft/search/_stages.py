"""How long stages take, all stages at once: matrices by the layers where they start and stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from chameleon_ft.cluster import Cluster, Link
from chameleon_ft.schedule import CostModel
from chameleon_ft.search._kinds import Kind
from chameleon_ft.workload import LayerCost, Workload

# By start (0 to L) and stop (0 to L); infinite where a stage would have no layers.
Seconds: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Of stages on workers of one kind.

    Attributes:
        forward_s, backward_s, weight_s: of F, of B or I, and of W (zero with fused backward).
        work_s: of all three.
        message_s: by the layer where a stage stops, one way to the next stage; zero after the last layer.
        through_s: of F and of B or I, with both messages to the next stage: what comes before and after all that a
            micro-batch does there.
        down_s: of F and the message after it.
    """

    forward_s: Seconds
    backward_s: Seconds
    weight_s: Seconds
    work_s: Seconds
    message_s: Seconds
    through_s: Seconds
    down_s: Seconds


def stage_times(costs: CostModel, kind: Kind, *, split_backward: bool) -> StageTimes:
    """Messages take the fastest of the links that there are."""
    layers = costs.workload.layers
    overhead_s = costs.workload.operation_overhead_s
    links = links_between(costs.cluster)

    def spent(seconds: Callable[[LayerCost], float]) -> Seconds:
        sums = np.concatenate([[0.0], np.cumsum([seconds(layer) for layer in layers])])
        found: Seconds = np.where(_empty(len(layers)), np.inf, sums[np.newaxis, :] - sums[:, np.newaxis])
        return found / kind.speed + overhead_s

    forward_s = spent(lambda layer: layer.forward_s)
    backward_s = spent(lambda layer: layer.backward_s)
    weight_s: Seconds = np.zeros_like(forward_s)
    if split_backward:
        weight_s = spent(lambda layer: layer.weight_grad_s)
        # The I of a first hop computes nothing, and its W is the whole backward.
        weight_s[0] = backward_s[0]
        backward_s = spent(lambda layer: layer.input_grad_s)
        backward_s[0, 1:] = overhead_s
    sent = [0.0, *(min(link.message_s(layer.output_bytes) for link in links) for layer in layers[:-1]), 0.0]
    message_s = np.array(sent)
    return StageTimes(
        forward_s=forward_s,
        backward_s=backward_s,
        weight_s=weight_s,
        work_s=forward_s + backward_s + weight_s,
        message_s=message_s,
        through_s=forward_s + backward_s + 2 * message_s,
        down_s=forward_s + message_s,
    )


def gradient_bytes(workload: Workload) -> Seconds:
    """Bytes of the gradients of each stage; those of tied parameters once."""
    sums = np.concatenate([[0.0], np.cumsum([float(layer.gradient_bytes) for layer in workload.layers])])
    found: Seconds = sums[np.newaxis, :] - sums[:, np.newaxis]
    for tied in workload.tied:
        before = np.searchsorted(np.array(tied.layers), np.arange(len(sums)))
        copies = np.maximum(before[np.newaxis, :] - before[:, np.newaxis], 1)
        found -= (copies - 1) * float(tied.gradient_bytes)
    return found


def timeless_bytes(workload: Workload) -> Seconds:
    """Bytes of the gradients of those layers of each stage that take no time."""
    own = [0.0 if layer.forward_s + layer.least_backward_s else layer.gradient_bytes for layer in workload.layers]
    sums = np.concatenate([[0.0], np.cumsum(own)])
    found: Seconds = sums[np.newaxis, :] - sums[:, np.newaxis]
    return found


def links_between(cluster: Cluster) -> list[Link]:
    """The kinds of link that join two of the workers; that inside a host if there is but one worker."""
    hosts = len(cluster.host_sizes)
    links = [cluster.intra_host] if hosts < len(cluster.workers) or hosts < 2 else []
    return links if hosts < 2 else [*links, cluster.inter_host]


def _empty(layers: int) -> NDArray[np.bool_]:
    return np.tri(layers + 1, dtype=np.bool_)
