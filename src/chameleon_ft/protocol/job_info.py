"""A job in numbers, for the coordinator, which loads neither the job nor torch."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.config import RunConfig
from chameleon_ft.cost.profile import Fingerprint
from chameleon_ft.job_record import JobRecord
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.protocol.parts import InspectedLayers
from chameleon_ft.schedule import CostModel
from chameleon_ft.workload import LayerCost, TiedParameters, Workload

# Until links are measured; only the order of operations depends on it.
LOOPBACK = Link(latency_s=1e-4, bytes_per_s=1e9)


@dataclass(frozen=True, slots=True)
class OperationRate:
    """Seconds of a forward and of a backward of one micro-batch through the whole model.

    The defaults apply before any measurement: only their ratio matters then, and two is usual.
    """

    forward_s: float = 1e-3
    backward_s: float = 2e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInfo:
    """A job's layers in numbers."""

    model: str  # a short description
    data: str  # likewise
    relative_costs: tuple[float, ...]  # cost of each layer, in units that only compare layers
    layers: InspectedLayers
    boundary_bytes: tuple[int, ...]  # size of each layer's output for one micro-batch
    param_bytes: tuple[int, ...]  # bytes of each layer's parameters
    gradient_bytes: tuple[int, ...]  # bytes of their gradients
    state_bytes: tuple[
        int, ...
    ]  # bytes that move with each layer: updated tensors, persistent buffers, optimizer state
    frozen_bytes: tuple[int, ...] = ()  # of the parameters that checkpoints leave out; see `frozen_in`
    tied: tuple[TiedParameters, ...] = ()  # parameters that layers share
    undivided: str = ""  # name of the optimizer, if holders can share its state by whole parameters only
    hints: tuple[str, ...] = ()  # what seems wrong with the job, and does not prevent a run
    has_evaluation: bool = False  # whether it has samples to evaluate
    device: str = ""  # name of the device, as it reports it; empty if this host has no such device
    record: JobRecord = field(default_factory=JobRecord)  # kept with checkpoints
    arguments: Mapping[str, bool | int | float | str] = FrozenMap({})  # those of `job_arguments`, by their types
    versions: Mapping[str, str] = FrozenMap({})  # package -> version, of those that influence durations

    @property
    def num_layers(self) -> int:
        return len(self.relative_costs)

    @property
    def fingerprint(self) -> str:
        """Equal for jobs whose layers have parameters and boundaries of the same sizes; kept with checkpoints."""
        return self.fingerprint_with(1, instead_of=1)

    def fingerprint_with(self, micro_batch_size: int, *, instead_of: int) -> str:
        """Return the fingerprint of this job with another size of a micro-batch, the first dimension of boundaries."""
        shapes: list[list[object]] = [
            [[*(size * micro_batch_size // instead_of for size in leaf.shape[:1]), *leaf.shape[1:]], leaf.dtype]
            for boundary in self.layers.boundaries
            for leaf in boundary.leaves
        ]
        shapes += [[number, b.structure] for number, b in enumerate(self.layers.boundaries) if b.structure]
        tied = [[[each.layers, each.gradient_bytes] for each in self.tied]] if self.tied else []
        sizes = json.dumps([self.param_bytes, shapes, *tied])
        return blake2b(sizes.encode(), digest_size=16).hexdigest()

    def profiled_as(self, config: RunConfig) -> Fingerprint:
        """Return the fingerprint of a profile of this job, with `config`, on this host."""
        return Fingerprint(
            model=self.fingerprint,
            micro_batch_size=config.batch.micro_batch_size,
            dtype=self.layers.boundaries[0].leaves[0].dtype,
            device=self.device,
            threads=config.threads if config.device == "cpu" else 0,
            versions=dict(self.versions),
            compile=config.compiled,
        )

    def settled(self, config: RunConfig) -> RunConfig:
        """Return the configuration with the redundancy of the optimizer's state that a run of this job has."""
        if not self.undivided or config.parallel.optimizer_redundancy != "auto" or config.parallel.owners is None:
            return config
        parallel = config.parallel.model_copy(update={"optimizer_redundancy": "all"})
        return config.model_copy(update={"parallel": parallel})

    def costs(self, config: RunConfig, hosts: Mapping[int, str], rate: OperationRate) -> CostModel:
        """Return the cost model of this job on the workers of `hosts`, worker -> host."""
        total = math.fsum(self.relative_costs)
        # The I of a compiled layer is its whole backward.
        share = 0.5 if config.compile == "off" else 1.0
        first_trained = next((index for index, size in enumerate(self.gradient_bytes) if size), 0)
        layers = tuple(
            _with_state(
                LayerCost(
                    name=f"layer {index}",
                    forward_s=rate.forward_s * cost / total,
                    # A backward ends at the first layer that is trained, and frozen layers have no W.
                    input_grad_s=rate.backward_s * share * cost / total if index >= first_trained else 0.0,
                    weight_grad_s=rate.backward_s * (1 - share) * cost / total if self.gradient_bytes[index] else 0.0,
                    param_bytes=self.param_bytes[index],
                    gradient_bytes=self.gradient_bytes[index],
                    # Parameters of 16 bits have gradients, and masters, of 32 bits.
                    master_bytes=2 * max(0, self.gradient_bytes[index] - self.param_bytes[index]),
                    output_bytes=self.boundary_bytes[index],
                ),
                *self._moved(index),
            )
            for index, cost in enumerate(self.relative_costs)
        )
        workers = tuple(Worker(worker, host) for worker, host in sorted(hosts.items()))
        return CostModel(
            Workload(
                layers,
                config.batch.micro_batches,
                config.batch.micro_batch_size,
                tied=self.tied,
                owners=config.parallel.owners,
            ),
            Cluster(workers, LOOPBACK, LOOPBACK),
        )

    def completed(self, costs: CostModel) -> CostModel:
        """Return a profile's cost model with this job's tied parameters and bytes that move.

        A profile has the memory of each layer, including buffers that do not move.
        """
        layers = tuple(_with_state(each, *self._moved(index)) for index, each in enumerate(costs.workload.layers))
        return CostModel(dataclasses.replace(costs.workload, layers=layers, tied=self.tied), costs.cluster)

    def _moved(self, layer: int) -> tuple[int, int]:
        """Return the bytes that move with a layer, and those of them that are read again and not kept."""
        return self.state_bytes[layer], self.frozen_bytes[layer] if self.frozen_bytes else 0


def _with_state(layer: LayerCost, state_bytes: int, reread_bytes: int) -> LayerCost:
    """Return the layer with so many bytes that move, of which some are read again and not kept."""
    more = state_bytes - layer.param_bytes - layer.optimizer_bytes
    return dataclasses.replace(
        layer,
        optimizer_bytes=layer.optimizer_bytes + max(0, more),
        unmoved_bytes=max(0, -more),
        reread_bytes=reread_bytes,
    )
