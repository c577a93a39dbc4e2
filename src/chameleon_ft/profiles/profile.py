"""What a profile holds, and what it may be used for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.errors import ProfileError
from chameleon_ft.schedule import CostModel
from chameleon_ft.workload import LayerCost, Workload

__all__ = ["AllReduceTime", "Fingerprint", "LayerTimes", "Profile", "Spread"]

_LEAST_S: Final = 1e-9  # a layer that takes no time still has to be somewhere


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeated measurements of one time, in seconds."""

    median_s: float
    least_s: float
    largest_s: float
    count: int

    def __post_init__(self) -> None:
        times = (self.least_s, self.median_s, self.largest_s)
        if self.count < 1 or not all(map(math.isfinite, times)) or not 0 <= times[0] <= times[1] <= times[2]:
            raise ProfileError(
                f"a spread needs count >= 1 and 0 <= least_s <= median_s <= largest_s; got count {self.count} and "
                f"{times[0]}, {times[1]}, {times[2]}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """The measurements behind one layer's cost: F, B, I and W of one micro-batch.

    `selective` is by how much F and B are longer if the layer is recomputed selectively; None if it cannot be.
    """

    forward: Spread
    backward: Spread
    input_grad: Spread
    weight_grad: Spread
    selective: Spread | None = None


@dataclass(frozen=True, slots=True)
class AllReduceTime:
    """One measured all-reduce of `num_bytes` over `workers` workers of one host."""

    workers: int
    num_bytes: int
    time: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What the figures of a profile are true of.

    Attributes:
        model: what identifies the layers: their parameters and boundaries, or the name of a preset.
        micro_batch_size: samples in one micro-batch.
        dtype: element type of the first layer's output, or of the matrix products of a preset.
        device: what computed, as it calls itself ("NVIDIA H100 80GB HBM3").
        threads: threads that a worker computes with on a CPU; 0 where that has no influence.
        versions: package -> version, of what has an influence on the times.
    """

    model: str
    micro_batch_size: int
    dtype: str
    device: str
    threads: int
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What a model costs on a device.

    Attributes:
        name: the model in a few words.
        fingerprint: what the figures are true of.
        source: whether they were measured, or derived from a shape and rates.
        provenance: how and when, in a sentence or two.
        layers: cost of each layer for one micro-batch, in order.
        times: the measurements behind them; empty where they are derived.
        operation_overhead_s: fixed seconds of an operation.
        intra_host: link between two workers of one host.
        inter_host: link between workers of two hosts; None where it was not measured.
        all_reduces: measured all-reduces, to be held against the ring formula.
        memory_bytes: capacity of a worker; None where it is not to be checked.

    Raises:
        ProfileError: no layers, none that takes any time, or times of another number of layers.
    """

    name: str
    fingerprint: Fingerprint
    source: Literal["measured", "derived"]
    provenance: str
    layers: tuple[LayerCost, ...]
    times: tuple[LayerTimes, ...] = ()
    operation_overhead_s: float = 0.0
    intra_host: Link
    inter_host: Link | None = None
    all_reduces: tuple[AllReduceTime, ...] = ()
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise ProfileError("a profile needs the cost of at least one layer; it has none")
        if not any(layer.forward_s + layer.least_backward_s for layer in self.layers):
            raise ProfileError("a profile needs layers that take time; the forward and backward of all of them are 0 s")
        if self.times and len(self.times) != len(self.layers):
            raise ProfileError(f"a profile has times of {len(self.times)} layers and costs of {len(self.layers)}")

    @property
    def relative_costs(self) -> tuple[float, ...]:
        """By which layers are shared out: seconds of F and B, and for one that takes none next to nothing."""
        return tuple(max(layer.forward_s + layer.backward_s, _LEAST_S) for layer in self.layers)

    def workload(self, micro_batches: int) -> Workload:
        """One step of so many micro-batches."""
        return Workload(
            self.layers,
            micro_batches,
            self.fingerprint.micro_batch_size,
            operation_overhead_s=self.operation_overhead_s,
        )

    def cluster(self, hosts: Mapping[int, str], *, speeds: Mapping[int, float] | None = None) -> Cluster:
        """The workers of `hosts`, worker -> host, with this profile's links and memory.

        Args:
            speeds: of the workers that are not of speed 1.

        Raises:
            ProfileError: there are several hosts, and the link between hosts was not measured.
        """
        if self.inter_host is None and len(set(hosts.values())) > 1:
            raise ProfileError(
                f"the profile of {self.name} has no link between hosts, and the workers are on "
                f"{len(set(hosts.values()))}; measure it too (see `chameleon profile --help`)"
            )
        given = {} if speeds is None else speeds
        return Cluster(
            tuple(
                Worker(worker, host, speed=given.get(worker, 1.0), memory_bytes=self.memory_bytes)
                for worker, host in sorted(hosts.items())
            ),
            self.intra_host,
            self.intra_host if self.inter_host is None else self.inter_host,
        )

    def costs(self, micro_batches: int, hosts: Mapping[int, str]) -> CostModel:
        """The cost model of a step on these workers; raises as `cluster` does."""
        return CostModel(self.workload(micro_batches), self.cluster(hosts))

    def slowed(self, factor: float, *, least_latency_s: float = 0.0) -> Profile:
        """The same with every operation and message `factor` times as long; what was measured is left out.

        Args:
            least_latency_s: latency of a link whose own would be shorter.
        """

        def slower(link: Link) -> Link:
            return Link(max(link.latency_s * factor, least_latency_s), link.bytes_per_s / factor)

        return dataclasses.replace(
            self,
            layers=tuple(layer.slowed(factor) for layer in self.layers),
            times=(),
            operation_overhead_s=self.operation_overhead_s * factor,
            intra_host=slower(self.intra_host),
            inter_host=None if self.inter_host is None else slower(self.inter_host),
            all_reduces=(),
        )

    def require(self, wanted: Mapping[str, object]) -> None:
        """See that the profile is of what it is to be used for.

        Args:
            wanted: fields of the fingerprint, by name, with what they have to be. Of `versions` those that are given.

        Raises:
            ProfileError: the first field that differs, with both values.
        """
        own = dataclasses.asdict(self.fingerprint)
        for field, value in wanted.items():
            if field == "versions":
                assert isinstance(value, Mapping)
                for package, version in value.items():
                    self._same(f"version of {package}", own["versions"].get(package), version)
            else:
                self._same(field, own[field], value)

    def _same(self, field: str, own: object, wanted: object) -> None:
        if own != wanted:
            raise ProfileError(
                f"the profile of {self.name} is of another {field}: it was made for {own!r}, and is to be used for "
                f"{wanted!r}; make one for this with `chameleon profile`"
            )
