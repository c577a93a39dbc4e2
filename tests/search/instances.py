"""Small instances to search, from a seeded generator or from hypothesis."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.schedule import CostModel
from chameleon_ft.workload import LayerCost, TiedParameters, Workload


def instance(
    rng: random.Random, *, workers: int, layers: int, micro_batches: int, kinds: int, memory: bool
) -> CostModel:
    """Unequal layers, messages and, for more than one kind, unequal workers; memory that some plans do not fit."""
    choices: list[Callable[[], float]] = [
        lambda: 1.0,
        lambda: rng.choice([0.5, 1.0, 1.0, 2.0]),
        lambda: rng.uniform(0.2, 2.0),
    ]
    second = rng.choice(choices)
    costs = tuple(
        LayerCost(
            f"layer {number}",
            second(),
            second(),
            second(),
            param_bytes=rng.choice([4, 4, 8]),
            activation_bytes=rng.choice([1, 2, 6]),
            weight_grad_bytes=rng.choice([0, 1, 3]),
            output_bytes=rng.choice([0, 1, 2]),
            gradient_bytes=0,
            optimizer_bytes=rng.choice([0, 8]),
            working_bytes=rng.choice([0, 1]),
            fused_backward_s=rng.choice([None, None, 1.2]),
        )
        for number in range(layers)
    )
    costs = tuple(map(_some_recomputable, costs))
    link = Link(rng.choice([0.0, 0.1, 0.7]), rng.choice([math.inf, 10.0]))
    total = sum(cost.param_bytes + cost.optimizer_bytes + 2 * cost.activation_bytes for cost in costs)
    of_kind = [
        (1.0 if number == 0 else rng.choice([0.4, 0.6, 0.9, 1.7]) + 0.01 * number, int(total * rng.uniform(0.35, 1.3)))
        for number in range(kinds)
    ]
    own = [rng.randrange(kinds) for _ in range(workers)]
    cluster = Cluster(
        tuple(
            Worker(number, "host", of_kind[kind][0], of_kind[kind][1] if memory else None)
            for number, kind in enumerate(own)
        ),
        link,
        link,
    )
    return CostModel(Workload(costs, micro_batches, 1, rng.choice([0.0, 0.0, 0.05])), cluster)


def _some_recomputable(layer: LayerCost) -> LayerCost:
    """The layer, of which most can be recomputed selectively, some in less time for the bytes than in full."""
    rng = random.Random(repr(layer))
    selective_bytes = rng.choice([None, 1, 1, layer.activation_bytes // 2])
    return dataclasses.replace(
        layer,
        selective_bytes=selective_bytes,
        selective_weight_grad_bytes=rng.choice([None, layer.weight_grad_bytes + 1]),
        halves_working_bytes=rng.choice([None, layer.working_bytes + 2]),
        selective_working_bytes=rng.choice([None, layer.working_bytes + 1]),
        selective_s=layer.forward_s * rng.choice([0.0, 0.05, 0.5]),
    )


def with_gradients(costs: CostModel, rng: random.Random) -> CostModel:
    """Give the layers of `costs` random gradients; the first and the last layer may share parameters."""
    layers = tuple(
        dataclasses.replace(layer, gradient_bytes=rng.choice([0, 1, 10, 90])) for layer in costs.workload.layers
    )
    last = len(layers) - 1
    least = min(layers[0].gradient_bytes, layers[last].gradient_bytes)
    tied = (TiedParameters((0, last), rng.choice([least, least // 2])),) if last and rng.random() < 0.4 else ()
    return CostModel(dataclasses.replace(costs.workload, layers=layers, tied=tied), costs.cluster)
