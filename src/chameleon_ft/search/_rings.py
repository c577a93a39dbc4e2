"""When pipelines have reduced their gradients, where no parameters are tied: what `_reductions` says, found sooner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from chameleon_ft.cluster import Cluster
from chameleon_ft.search._timed import TimedPipeline, Timer

if TYPE_CHECKING:
    from chameleon_ft.search._rings_kernel import Links


def reduced_s(classes: Sequence[tuple[TimedPipeline, Sequence[tuple[int, ...]]]], timer: Timer) -> float:
    """Seconds until the last gradients are reduced, of at least two pipelines.

    Args:
        classes: equal programs, and the workers of each pipeline that runs it.
        timer: such programs come from it.
    """
    # Here, because to import a kernel loads numba, and most who import this run none.
    from chameleon_ft.search._rings_kernel import Classes, Room, last_reduced_s

    layers, hosts = len(timer.costs.workload.layers), timer.host_numbers
    return last_reduced_s(
        Classes(
            depths=np.array([len(timed.stops) for timed, _ in classes]),
            members=np.array([len(members) for _, members in classes]),
            stops=np.array([stop for timed, _ in classes for stop in timed.stops]),
            ends_s=np.array([end_s for timed, _ in classes for end_s in timed.ends_s]),
            hosts=np.array(
                [hosts[own] for _, members in classes for stage in zip(*members, strict=True) for own in stage]
            ),
        ),
        timer.pipelines.bytes_until,
        _links(timer.costs.cluster),
        Room(
            place=np.empty(len(classes), np.int64),
            seen=np.zeros(len(timer.costs.cluster.host_sizes), np.int64),
            last=np.empty(layers, np.int64),
            rounds=np.empty(layers, np.int64),
            taken=np.zeros(layers, np.int64),
        ),
    )


def _links(cluster: Cluster) -> Links:
    from chameleon_ft.search._rings_kernel import Links

    near, far = cluster.intra_host, cluster.inter_host
    return Links(near.latency_s, 1 / near.bytes_per_s, far.latency_s, 1 / far.bytes_per_s)
