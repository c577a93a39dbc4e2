"""Rates of devices.

Peaks are those of the manufacturers for dense matrices. The share of a peak that large matrix products reach is an
assumption, as the field says; a measured profile replaces it.

- A100-80G: NVIDIA, "A100 Tensor Core GPU" data sheet, SXM, 2021: 312 TFLOP/s bf16 and fp16, 19.5 fp32, 80 GB at
  2,039 GB/s, NVLink 600 GB/s (300 each way). DGX A100: one 200 Gb/s adapter to a GPU.
- H100-80G: NVIDIA, "H100 Tensor Core GPU" data sheet, SXM, 2022: 1,979 TFLOP/s bf16 and fp16 with sparsity, half of it
  dense, 67 fp32, 80 GB at 3.35 TB/s, NVLink 900 GB/s (450 each way). DGX H100: one 400 Gb/s adapter to a GPU.
- Ascend-910B-64G: Huawei publishes no data sheet. Zuo et al., "Serving Large Language Models on Huawei CloudMatrix384",
  arXiv 2506.12708, give 376 TFLOP/s bf16 and fp16, 64 GB and 1.6 TB/s for each of the two dies of a 910C, which is the
  die of the faster 910B; users have measured 315 TFLOP/s on a 910B2. Eight to a server, each joined to each of the
  seven others at 56 GB/s (28 each way, 392 GB/s in all), and one 200 Gb/s port to an NPU: reported, not published.
  Slower bins (910B3, 910B4) need devices of their own.
- Latencies are assumptions of the order that all-reduce tests of NCCL show on such machines: about 3 us for a step
  inside a host, and about 10 us between hosts; a message with its launch is taken for twice that inside a host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.errors import ConfigError
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.presets._lookup import named
from chameleon_ft.presets.execution import DType


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The rates of one accelerator.

    Attributes:
        name: name of the device.
        peak_flops: highest floating-point operations a second of dense matrix products, by element type.
        achievable: the share of it that the products of a large transformer reach; an assumption.
        memory_bytes: capacity.
        memory_bytes_per_s: highest bandwidth of its memory.
        achievable_bandwidth: the share of it that element-wise operations reach; an assumption.
        intra_host: link to another device of the host, one way.
        inter_host: link to a device of another host, one way.

    Raises:
        ConfigError: no rates, or a rate, share or size that is not positive, or a share above 1.
    """

    name: str
    peak_flops: Mapping[DType, float]
    memory_bytes: int
    memory_bytes_per_s: float
    intra_host: Link
    inter_host: Link
    achievable: float = 0.6
    achievable_bandwidth: float = 0.8

    def __post_init__(self) -> None:
        if not self.peak_flops:
            raise ConfigError(f"device {self.name!r} needs a peak rate for at least one element type; got none")
        rates = {f"peak_flops[{dtype}]": rate for dtype, rate in self.peak_flops.items()}
        rates |= {"memory_bytes": self.memory_bytes, "memory_bytes_per_s": self.memory_bytes_per_s}
        for field, rate in rates.items():
            if not (math.isfinite(rate) and rate > 0):
                raise ConfigError(f"{field} of device {self.name!r} must be positive; got {rate}")
        for field in ("achievable", "achievable_bandwidth"):
            if not 0 < getattr(self, field) <= 1:
                raise ConfigError(f"{field} of device {self.name!r} must be in (0, 1]; got {getattr(self, field)}")
        object.__setattr__(self, "peak_flops", FrozenMap(self.peak_flops))

    def flops_per_s(self, dtype: DType) -> float:
        """Return operations a second of matrix products of this type. Raises ConfigError if the type has no rate."""
        if dtype not in self.peak_flops:
            known = ", ".join(self.peak_flops)
            raise ConfigError(f"device {self.name!r} has no rate for {dtype}; it has one for: {known}")
        return self.peak_flops[dtype] * self.achievable

    @property
    def bytes_per_s(self) -> float:
        """The bytes that element-wise operations read and write in a second."""
        return self.memory_bytes_per_s * self.achievable_bandwidth

    def cluster(self, workers: int, *, workers_per_host: int = 8) -> Cluster:
        """Return `workers` workers on hosts of `workers_per_host`, with this device's memory and links.

        With tensor parallelism a worker has several devices; its memory is that of one, like the bytes of a workload.

        Raises:
            ConfigError: a count below one.
        """
        if workers < 1 or workers_per_host < 1:
            raise ConfigError(f"workers and workers_per_host must be at least 1; got {workers} and {workers_per_host}")
        return Cluster(
            tuple(
                Worker(worker, f"host{worker // workers_per_host}", memory_bytes=self.memory_bytes)
                for worker in range(workers)
            ),
            self.intra_host,
            self.inter_host,
        )


DEVICES: Final[Mapping[str, Device]] = FrozenMap(
    {
        name: Device(
            name=name,
            peak_flops={dtype: tera_flops * 1e12 for dtype, tera_flops in rates.items()},
            memory_bytes=memory_gb * 10**9,
            memory_bytes_per_s=bytes_per_s,
            intra_host=Link(6e-6, intra_host_bytes_per_s),
            inter_host=Link(10e-6, inter_host_bytes_per_s),
        )
        for name, rates, memory_gb, bytes_per_s, intra_host_bytes_per_s, inter_host_bytes_per_s in (
            ("a100-80g", {DType.BF16: 312, DType.FP16: 312, DType.FP32: 19.5}, 80, 2.039e12, 300e9, 25e9),
            ("h100-80g", {DType.BF16: 989.4, DType.FP16: 989.4, DType.FP32: 66.9}, 80, 3.35e12, 450e9, 50e9),
            ("h200-141g", {DType.BF16: 989.4, DType.FP16: 989.4, DType.FP32: 66.9}, 141, 4.8e12, 450e9, 50e9),
            ("ascend-910b-64g", {DType.BF16: 376, DType.FP16: 376}, 64, 1.6e12, 28e9, 25e9),
        )
    }
)
"""The devices by name."""


def device(name: str) -> Device:
    """Return the device of this name. Raises ConfigError if it is unknown; build a `Device` for another one."""
    return named(DEVICES, name, "device")
