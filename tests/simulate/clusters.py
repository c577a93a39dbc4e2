"""Small clusters and workloads, and random traces of them."""

from __future__ import annotations

import random

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.schedule import CostModel
from chameleon_ft.simulate.traces.trace import Fault, Trace
from chameleon_ft.workload import LayerCost, Workload

LINK = Link(latency_s=1e-5, bytes_per_s=50e9)


def workload(*, layers: int = 6, micro_batches: int = 24, state_bytes: int = 12 * 10**8) -> Workload:
    """Equal layers of 30 ms for a micro-batch."""
    layer = LayerCost(
        "layer",
        forward_s=0.01,
        input_grad_s=0.01,
        weight_grad_s=0.01,
        param_bytes=state_bytes // 6,
        activation_bytes=10**8,
        output_bytes=10**7,
        gradient_bytes=state_bytes // 6,
        optimizer_bytes=state_bytes - state_bytes // 6,
    )
    return Workload((layer,) * layers, micro_batches, 1)


def cluster(workers: int, *, per_host: int = 1, memory_bytes: int | None = 24 * 10**9) -> Cluster:
    """Return a cluster with equal links."""
    members = (Worker(number, f"host{number // per_host}", 1.0, memory_bytes) for number in range(workers))
    return Cluster(tuple(members), LINK, LINK)


def costs(workers: int, **of_workload: int) -> CostModel:
    """Both together."""
    return CostModel(workload(**of_workload), cluster(workers))


def random_trace(seed: int, *, workers: int, per_host: int = 1, faults: int = 8, slow: bool = False) -> Trace:
    """Losses of hosts, and workers that are slow for a while, in 10,000 seconds."""
    draw = random.Random(seed)
    found: list[Fault] = []
    for _ in range(faults):
        begin_s = draw.uniform(0.0, 9_000.0)
        host = draw.randrange(workers // per_host)
        members = tuple(range(host * per_host, (host + 1) * per_host))
        speed = draw.choice((0.0, 0.0, 0.5, 0.8)) if slow else 0.0
        found.append(Fault(members, begin_s, begin_s + draw.uniform(1.0, 3_000.0), speed))
    return Trace.from_faults(found, workers=workers, duration_s=10_000.0, workers_per_host=per_host)
