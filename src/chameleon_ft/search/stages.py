"""Seconds and bytes of every possible stage of a model, on every class of worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import combinations, pairwise

import numpy as np

from chameleon_ft.cluster import Cluster, Link
from chameleon_ft.cost.memory import needed_bytes, workload_memory
from chameleon_ft.plan import RecomputedLayers
from chameleon_ft.schedule import CostModel
from chameleon_ft.schedule.records import Booleans, Floats, Integers, Records
from chameleon_ft.search._kernels.records import Tables
from chameleon_ft.search.worker_classes import Shape, WorkerClass
from chameleon_ft.workload import LayerCost


class Stages:
    """Every stage of `costs.workload` on workers of `classes`, with fused or with split backward.

    Attributes:
        num_layers: layers of the model (L).
        capacities: bytes of a worker of each class; -1 where it is not known.
        limited: the memory of some class is known.
    """

    def __init__(self, costs: CostModel, classes: Sequence[WorkerClass], *, split_backward: bool) -> None:
        self.costs = costs
        self.classes = tuple(classes)
        self.split_backward = split_backward
        self.num_layers = len(costs.workload.layers)
        self.limited = any(own.memory_bytes is not None for own in self.classes)
        self.speeds = np.array([own.speed for own in self.classes], np.float64)
        self.capacities = [-1 if own.memory_bytes is None else own.memory_bytes for own in self.classes]
        self._memory = workload_memory(costs.workload)

    @cached_property
    def tables(self) -> Tables:
        """The stages as arrays for the kernels of bounds."""
        first, options = self._options()
        seconds = self._seconds()
        forward_s, backward_s, _ = (own[:, -2, -1].min() for own in seconds)
        layers, fastest = self.costs.workload.layers, self.speeds.max()
        # The first hop, whose I computes nothing, ends with the whole backward.
        backward_before_s = [
            min(layer.backward_s, layer.input_grad_s) if self.split_backward else layer.backward_s for layer in layers
        ]
        links = links_between(self.costs.cluster)
        messages_s = [min(link.message_s(layer.output_bytes) for link in links) for layer in layers[:-1]]
        return Tables(
            *seconds,
            message_s=np.array([0.0, *messages_s, 0.0]),
            forward_before_s=np.cumsum([0.0, *(layer.forward_s for layer in layers)]) / fastest,
            backward_before_s=np.cumsum([0.0, *backward_before_s]) / fastest,
            first=first,
            options=options,
            gradient_interval_s=float(forward_s + backward_s),
            split=self.split_backward,
            in_flight_share=0.0,
        )

    def has_fewer_hops(self, most: float) -> bool:
        """Return whether all pipelines together have at most so many hops.

        Counted are every cut, order of classes and choice of options, each with all micro-batches."""
        choices = np.diff(self.tables.first, axis=2).sum(axis=0).astype(np.float64)
        pipelines, hops = np.eye(1, self.num_layers + 1), 0.0
        for depth in range(1, min(len(self.costs.cluster.workers), self.num_layers) + 1):
            pipelines = pipelines @ choices
            hops += float(pipelines[0, -1]) * depth * self.costs.workload.micro_batches
            if hops > most:
                return False
        return True

    def options(self, kind: int, start: int, stop: int) -> range:
        """Return the options of one stage, as rows of `tables.options`, the least recomputation first."""
        first = self.tables.first
        return range(int(first[kind, start, stop]), int(first[kind, start, stop + 1]))

    def options_of(self, shape: Shape, cut_points: Sequence[int]) -> list[range]:
        """Return the options of each stage of a cut."""
        return [self.options(kind, *own) for kind, own in zip(shape, pairwise((0, *cut_points)), strict=True)]

    def recomputed_layers(
        self, cut_points: Sequence[int], options: Sequence[int]
    ) -> tuple[RecomputedLayers | None, ...]:
        """Return the layers that each stage recomputes under these options: some from its first one on, or none."""
        counts = self.tables.options[["full", "selective"]][list(options)].tolist()
        return tuple(
            RecomputedLayers(start, start + full + selective, selective) if full + selective else None
            for start, (full, selective) in zip((0, *cut_points[:-1]), counts, strict=True)
        )

    def limits(
        self, shape: Shape, cut_points: Sequence[int], options: Sequence[int], micro_batches: int
    ) -> Integers | None:
        """Return the limits of each stage by its memory, see `WorkloadMemory.stage_limits`."""
        return self._memory.stage_limits(
            self.tables.options[list(options)],
            cut_points,
            [self.capacities[kind] for kind in shape],
            micro_batches=micro_batches,
            split_backward=self.split_backward,
        )

    @cached_property
    def fits(self) -> Booleans:
        """Return which stages a worker of each class can hold, one micro-batch at a time; bool [C, L + 1, L + 1]."""
        needed = np.stack([self.min_bytes(kind) for kind in range(len(self.classes))])
        most = np.array([np.iinfo(np.int64).max if own < 0 else own for own in self.capacities])
        found: Booleans = (needed >= 0) & (needed <= most[:, np.newaxis, np.newaxis])
        return found

    def smallest_option(self, kind: int, start: int, stop: int) -> int:
        """Return the option of a stage that needs the least memory with one micro-batch at a time."""
        return min(self.options(kind, start, stop), key=self._needed_bytes.__getitem__)

    @cached_property
    def _needed_bytes(self) -> list[int]:
        """The bytes that each option needs with one micro-batch at a time, without messages."""
        found: list[int] = needed_bytes(self.tables.options).tolist()
        return found

    def min_bytes(self, kind: int) -> Integers:
        """Return the least bytes that a worker of this class needs for a stage, including message buffers.

        Returns:
            int64 [L + 1, L + 1]; -1 where there is no stage, or not even the lower bound of the bytes fits.
        """
        starts, stops = np.indices((self.num_layers + 1, self.num_layers + 1))
        messages = self._memory.max_message_bytes(starts, stops, self.costs.workload.micro_batches)
        found = np.full(messages.shape, -1)
        for start, stop in combinations(range(self.num_layers + 1), 2):
            if self.options(kind, start, stop):
                found[start, stop] = self._needed_bytes[self.smallest_option(kind, start, stop)] + messages[start, stop]
        return found

    def _seconds(self) -> tuple[Floats, Floats, Floats]:
        """Return the seconds of F, of B or I, and of W, by class, start and stop; infinite where there is no stage."""
        workload = self.costs.workload
        empty = np.tri(self.num_layers + 1, dtype=np.bool_)

        def spent(seconds: Callable[[LayerCost], float]) -> Floats:
            sums: Floats = np.where(empty, np.inf, sums_by_stage([seconds(layer) for layer in workload.layers]))
            return sums / self.speeds[:, np.newaxis, np.newaxis] + workload.operation_overhead_s

        forward_s, backward_s = spent(lambda layer: layer.forward_s), spent(lambda layer: layer.backward_s)
        if not self.split_backward:
            return forward_s, backward_s, np.zeros_like(forward_s)
        weight_s, input_grad_s = spent(lambda layer: layer.weight_grad_s), spent(lambda layer: layer.input_grad_s)
        # The I of a first hop computes nothing, and its W is the whole backward.
        weight_s[:, 0] = backward_s[:, 0]
        input_grad_s[:, 0, 1:] = workload.operation_overhead_s
        return forward_s, input_grad_s, weight_s

    def _options(self) -> tuple[Integers, Records]:
        """Return `first` and `options` of `Tables`."""
        firsts: list[Integers] = []
        every: list[Records] = []
        for own in self.classes:
            first, options = self._memory.stage_options(
                own.memory_bytes,
                split_backward=self.split_backward,
                micro_batches=self.costs.workload.micro_batches,
            )
            options["recompute_s"] /= own.speed
            firsts.append(first + sum(map(len, every)))
            every.append(options)
        return np.stack(firsts), np.concatenate(every)


def links_between(cluster: Cluster) -> list[Link]:
    """Return the kinds of link between workers; the one inside a host if there is only one worker."""
    hosts = len(cluster.host_sizes)
    links = [cluster.intra_host] if hosts < len(cluster.workers) or hosts < 2 else []
    return links if hosts < 2 else [*links, cluster.inter_host]


def sums_by_stage(values: Sequence[float]) -> Floats:
    """Return the sums of a value of each layer over the layers of every stage; float64 [L + 1, L + 1]."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    found: Floats = sums[np.newaxis, :] - sums[:, np.newaxis]
    return found
