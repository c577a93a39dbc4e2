"""The content of a profile, and its conditions of use."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.cost.derive import derive_workload
from chameleon_ft.cost.presets import STATE_POLICIES, Device, Execution, StatePolicy
from chameleon_ft.cost.shapes import ModelShape
from chameleon_ft.errors import ProfileError
from chameleon_ft.schedule import CostModel
from chameleon_ft.workload import LayerCost, TiedParameters, Workload

# A layer that takes no time still needs a place.
_MIN_S: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeated measurements of one time, in seconds."""

    median_s: float
    min_s: float
    largest_s: float
    count: int

    @classmethod
    def of(cls, times_s: Sequence[float]) -> Spread:
        """Summarise repeated measurements."""
        return cls(statistics.median(times_s), min(times_s), max(times_s), len(times_s))

    def __post_init__(self) -> None:
        times = (self.min_s, self.median_s, self.largest_s)
        if self.count < 1 or not all(map(math.isfinite, times)) or not 0 <= times[0] <= times[1] <= times[2]:
            raise ProfileError(
                f"a spread needs count >= 1 and 0 <= min_s <= median_s <= largest_s; got count {self.count} and "
                f"{times[0]}, {times[1]}, {times[2]}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """The measurements behind one layer's cost: F, B, I and W of one micro-batch.

    `selective` is the additional time of F and B if the layer is recomputed selectively; None if it cannot be.
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
    """The conditions that the figures of a profile hold for.

    Attributes:
        model: identifies the layers: a hash of their parameters and boundaries, or the name of a preset.
        micro_batch_size: samples in one micro-batch.
        dtype: element type of the first layer's output, or of the matrix products of a preset.
        device: the device's own name ("NVIDIA H100 80GB HBM3").
        threads: threads that a worker computes with on a CPU; 0 if that has no influence.
        versions: package -> version, of packages that influence the times.
        compile: how layers were compiled, and by which backend.
    """

    model: str
    micro_batch_size: int
    dtype: str
    device: str
    threads: int
    versions: Mapping[str, str]
    compile: str = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Costs of a model on a device.

    Attributes:
        name: the model in a few words.
        fingerprint: the conditions that the figures hold for.
        source: origin of the figures: measured, or derived from a shape and rates.
        provenance: how and when, in a sentence or two.
        layers: cost of each layer for one micro-batch, in order.
        times: the measurements behind them; empty if they are derived.
        operation_overhead_s: fixed seconds of an operation.
        tied: parameters that layers share; a run's job knows its own.
        intra_host: link between two workers of one host.
        inter_host: link between workers of two hosts; None if it was not measured.
        all_reduces: measured all-reduces, for a comparison with the ring formula.
        memory_bytes: capacity of a worker; None if it is not checked.

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
    tied: tuple[TiedParameters, ...] = ()
    intra_host: Link
    inter_host: Link | None = None
    all_reduces: tuple[AllReduceTime, ...] = ()
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise ProfileError("a profile needs the cost of at least one layer; it has none")
        if not any(layer.forward_s + layer.min_backward_s for layer in self.layers):
            raise ProfileError("a profile needs layers that take time; the forward and backward of all of them are 0 s")
        if self.times and len(self.times) != len(self.layers):
            raise ProfileError(f"a profile has times of {len(self.times)} layers and costs of {len(self.layers)}")

    @property
    def relative_costs(self) -> tuple[float, ...]:
        """Seconds of F and B of each layer, by which layers are divided into stages; never zero."""
        return tuple(max(layer.forward_s + layer.backward_s, _MIN_S) for layer in self.layers)

    def workload(self, micro_batches: int) -> Workload:
        """Return the workload of a step of so many micro-batches."""
        return Workload(
            self.layers,
            micro_batches,
            self.fingerprint.micro_batch_size,
            operation_overhead_s=self.operation_overhead_s,
            tied=self.tied,
        )

    def cluster(self, hosts: Mapping[int, str], *, speeds: Mapping[int, float] | None = None) -> Cluster:
        """Return the workers of `hosts`, worker -> host, with this profile's links and memory.

        Args:
            hosts: the host of each worker.
            speeds: the speed of each worker that does not have speed 1.

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
        """Return the cost model of a step on these workers; raises as `cluster` does."""
        return CostModel(self.workload(micro_batches), self.cluster(hosts))

    def slowed(self, factor: float, *, min_latency_s: float = 0.0) -> Profile:
        """Return the profile with every operation and message `factor` times as long, without its measurements.

        Args:
            factor: at least 1 for a slower device.
            min_latency_s: least latency of a link.
        """

        def slower(link: Link) -> Link:
            return Link(max(link.latency_s * factor, min_latency_s), link.bytes_per_s / factor)

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
        """Check that the profile may be used for something.

        Args:
            wanted: fields of the fingerprint, by name, with their required values. Of `versions` only the given
                packages are compared.

        Raises:
            ProfileError: the first field that differs, with both values.
        """
        own = dataclasses.asdict(self.fingerprint)
        pairs = [(field, own[field], value) for field, value in wanted.items() if field != "versions"]
        versions: Any = wanted.get("versions", {})
        pairs += [(f"version of {name}", own["versions"].get(name), value) for name, value in versions.items()]
        for field, made_for, used_for in pairs:
            if made_for != used_for:
                raise ProfileError(
                    f"the profile of {self.name} is of another {field}: it was made for {made_for!r}, and is to be "
                    f"used for {used_for!r}; make one for this with `chameleon profile`"
                )


def derived_profile(
    shape: ModelShape,
    device: Device,
    *,
    micro_batch_size: int,
    execution: Execution = Execution(),
    state: StatePolicy = STATE_POLICIES["bf16-master"],
) -> Profile:
    """Return the profile of a published model on a known device, by `derive_workload`, and with its errors."""
    workload = derive_workload(
        shape, device, micro_batch_size=micro_batch_size, micro_batches=1, execution=execution, state=state
    )
    return Profile(
        name=shape.name,
        fingerprint=Fingerprint(
            model=shape.name,
            micro_batch_size=micro_batch_size,
            dtype=str(state.parameters),
            device=device.name,
            threads=0,
            versions={},
        ),
        source="derived",
        provenance=(
            f"from the shape of {shape.name} and the rates of {device.name}, {execution.attention} attention, "
            f"recompute {execution.recompute}, state {state.name}; nothing was measured"
        ),
        layers=workload.layers,
        operation_overhead_s=workload.operation_overhead_s,
        tied=workload.tied,
        intra_host=device.intra_host,
        inter_host=device.inter_host,
        memory_bytes=device.memory_bytes,
    )
