"""Gradient sync of pipelines side by side, from one replay of each class of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from chameleon_ft.cluster import Cluster
from chameleon_ft.plan import Placement
from chameleon_ft.schedule import CostModel
from chameleon_ft.search._conditions import SyncCost
from chameleon_ft.search._timed import TimedPipeline, hops_of
from chameleon_ft.sync import Segment, gradient_rounds


@dataclass(frozen=True, slots=True)
class PlacedPipeline:
    """A pipeline and the workers that it runs on."""

    timed: TimedPipeline
    workers: tuple[int, ...]


def largest_host(cluster: Cluster) -> int:
    """Workers of the host that has most."""
    return max(Counter(worker.host for worker in cluster.workers).values())


def assumed_sync(costs: CostModel, pipelines: int, *, across_hosts: bool) -> SyncCost:
    """What `pipelines` replicas of every layer make of it, if every stage is reduced in one go."""
    if pipelines < 2 or not any(layer.gradient_bytes for layer in costs.workload.layers):
        return SyncCost()
    link = costs.cluster.inter_host if across_hosts else costs.cluster.intra_host
    return _ring(link.latency_s, link.bytes_per_s, pipelines)


def least_sync(costs: CostModel) -> SyncCost:
    """What two or more replicas of every layer make of it at the least: the faster link of both, two replicas."""
    if not any(layer.gradient_bytes for layer in costs.workload.layers):
        return SyncCost()
    links = (costs.cluster.intra_host, costs.cluster.inter_host)
    return _ring(min(link.latency_s for link in links), max(link.bytes_per_s for link in links), 2)


def synced_s(pipelines: Sequence[PlacedPipeline], costs: CostModel) -> float:
    """Seconds until all operations have ended and all gradients are reduced, as `estimate_sync` has it.

    Workers with equal stages of equal programs do everything at the same time, so a few stand for all.
    """
    program_s = max(each.timed.program_s for each in pipelines)
    if len(pipelines) < 2 or not any(layer.gradient_bytes for layer in costs.workload.layers):
        return program_s
    classes: dict[int, list[PlacedPipeline]] = {}
    for each in pipelines:
        classes.setdefault(id(each.timed), []).append(each)
    few = [each for members in classes.values() for each in members[:2]]
    placement = Placement(
        len(costs.workload.layers),
        {hop.worker: (hop.layers,) for each in few for hop in hops_of(each.workers, each.timed.stops)},
    )
    free_s = {worker: end_s for each in few for worker, end_s in zip(each.workers, each.timed.ends_s, strict=True)}
    end_s = program_s
    for segments in gradient_rounds(placement).rounds:
        for segment in segments:
            start_s = max(free_s[worker] for worker in segment.holders)
            done_s = start_s + _reduction_s(segment, pipelines, costs)
            free_s.update(dict.fromkeys(segment.holders, done_s))
            end_s = max(end_s, done_s)
    return end_s


def _reduction_s(segment: Segment, pipelines: Sequence[PlacedPipeline], costs: CostModel) -> float:
    """A ring over the holder that every pipeline has of the segment; the slowest link that is in it sets the pace."""
    cluster = costs.cluster
    holders = [_holder(each, segment) for each in pipelines]
    hosts = _hosts(holders, cluster)
    layers = costs.workload.layers[segment.layers.start : segment.layers.stop]
    num_bytes = sum(layer.gradient_bytes for layer in layers)
    links = ([cluster.inter_host] if hosts > 1 else []) + ([cluster.intra_host] if hosts < len(holders) else [])
    return max(link.ring_all_reduce_s(num_bytes, len(holders)) for link in links)


def _holder(pipeline: PlacedPipeline, segment: Segment) -> int:
    position = next(number for number, stop in enumerate(pipeline.timed.stops) if segment.layers.start < stop)
    return pipeline.workers[position]


def _hosts(workers: Sequence[int], cluster: Cluster) -> int:
    return len({cluster.worker(worker).host for worker in workers})


def _ring(latency_s: float, bytes_per_s: float, count: int) -> SyncCost:
    return SyncCost(2 * (count - 1) * latency_s, 2 * (count - 1) / count / bytes_per_s)
