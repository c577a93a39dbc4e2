"""Presets: shapes of published models, rates of devices, precisions of state, and how a model is executed.

Sources, for the shapes and (in the tests) the numbers of parameters:

- Llama 2: Touvron et al., "Llama 2: Open Foundation and Fine-Tuned Chat Models", arXiv 2307.09288; sequences of 4,096.
- Llama 3: Dubey et al., "The Llama 3 Herd of Models", arXiv 2407.21783, table 3; sequences of 8,192.
- Qwen2.5: Qwen Team, "Qwen2.5 Technical Report", arXiv 2412.15115; sequences of 4,096 in the main phase of
  pre-training.

Widths that the reports leave out are those of the `config.json` that each model is published with
(meta-llama/Llama-2-*, meta-llama/Meta-Llama-3-*, meta-llama/Llama-3.1-405B, Qwen/Qwen2.5-*). The 405B has 8 key and
value heads, as in the report.

Peaks of devices are those of the manufacturers for dense matrices. The share of a peak that large matrix products reach
is an assumption, as the field says; a measured profile replaces it.

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
from enum import StrEnum
from typing import Final, TypeVar

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.cost.shapes import Bias, BlockShape, ModelShape
from chameleon_ft.errors import ConfigError
from chameleon_ft.plan.frozen_map import FrozenMap

Preset = TypeVar("Preset")


def named(presets: Mapping[str, Preset], name: str, kind: str) -> Preset:
    """Return the preset of this name, in any case, or the only one whose name continues it after a "-".

    Raises ConfigError if there is none.
    """
    asked = name.lower()
    if asked in presets:
        return presets[asked]
    begun = [known for known in presets if known.startswith(f"{asked}-")]
    if len(begun) == 1:
        return presets[begun[0]]
    raise ConfigError.unknown_name(kind, name, presets)


MODELS: Final[Mapping[str, ModelShape]] = FrozenMap(
    {
        name: ModelShape(
            name=name,
            blocks=(
                BlockShape(
                    hidden=hidden,
                    heads=heads,
                    kv_heads=kv_heads,
                    head_dim=hidden // heads,
                    ffn=ffn,
                    bias=Bias.QKV if name.startswith("qwen") else Bias.NONE,
                ),
            )
            * blocks,
            vocab=vocab,
            seq_len=seq_len,
        )
        for name, hidden, blocks, heads, kv_heads, ffn, vocab, seq_len in (
            ("llama2-7b", 4096, 32, 32, 32, 11_008, 32_000, 4096),
            ("llama2-13b", 5120, 40, 40, 40, 13_824, 32_000, 4096),
            ("llama2-70b", 8192, 80, 64, 8, 28_672, 32_000, 4096),
            ("llama3-8b", 4096, 32, 32, 8, 14_336, 128_256, 8192),
            ("llama3-70b", 8192, 80, 64, 8, 28_672, 128_256, 8192),
            ("llama3-405b", 16_384, 126, 128, 8, 53_248, 128_256, 8192),
            ("qwen2.5-7b", 3584, 28, 28, 4, 18_944, 152_064, 4096),
            ("qwen2.5-32b", 5120, 64, 40, 8, 27_648, 152_064, 4096),
            ("qwen2.5-72b", 8192, 80, 64, 8, 29_568, 152_064, 4096),
        )
    }
)
"""The shapes by name."""


def model_shape(name: str) -> ModelShape:
    """Return the published model of this name; `dataclasses.replace` changes its `seq_len`.

    Raises ConfigError if it is unknown.
    """
    return named(MODELS, name, "model")


class Attention(StrEnum):
    """The kernel of attention.

    Flash attention (Dao et al. 2022) keeps one number for each row of the scores and skips what a causal mask hides.
    Eager attention computes and keeps all scores.
    """

    FLASH = "flash"
    EAGER = "eager"


class Recompute(StrEnum):
    """Activations that are dropped after the forward and recomputed in the backward (Korthikanti et al. 2022).

    None; the core of attention (scores, softmax, dropout), which flash attention never keeps; or whole blocks, of which
    only the input is kept. This applies to all workers and all steps. A plan can also ask some of its workers to
    recompute whole blocks, or norms, activation functions and the core of attention: do not do both.
    """

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How the ranks of one worker execute a block.

    Attributes:
        attention: kernel of attention.
        recompute: what is computed twice to save memory.
        tp: ranks of a worker that share every block (tensor parallelism, Shoeybi et al. 2019).
        sequence_parallel: the ranks also share what tensor parallelism leaves whole: norms, dropout, and the inputs of
            the matrices. Without effect if `tp` is 1.

    Raises:
        ConfigError: `tp` below one.
    """

    attention: Attention = Attention.FLASH
    recompute: Recompute = Recompute.NONE
    tp: int = 1
    sequence_parallel: bool = True

    def __post_init__(self) -> None:
        if self.tp < 1:
            raise ConfigError(f"tp must be at least 1; got {self.tp}")

    def check(self, shape: ModelShape) -> None:
        """Raise ConfigError unless `tp` ranks can share the heads and the feed-forward of `shape` equally."""
        sizes = {("vocab", shape.vocab)}
        for block in shape.blocks:
            sizes |= {("heads", block.heads), ("kv_heads", block.kv_heads), ("ffn", block.ffn)}
            if block.experts is not None:
                sizes |= {("ffn of an expert", block.experts.ffn), ("ffn of shared experts", block.experts.shared_ffn)}
        for name, size in sorted(sizes):
            if size % self.tp:
                raise ConfigError(f"tp {self.tp} does not divide {name} {size} of {shape.name!r}; use a divisor")

    @property
    def shared(self) -> int:
        """The number of ranks that share the bytes of norms, dropout and inputs of matrices."""
        return self.tp if self.sequence_parallel else 1


class DType(StrEnum):
    """The type of an element of a tensor."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"

    @property
    def num_bytes(self) -> int:
        """Bytes of one element."""
        return 4 if self is DType.FP32 else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePolicy:
    """The types of parameters, gradients and optimizer state.

    Attributes:
        name: name of the policy.
        parameters: type of the parameters, and of everything computed with them.
        gradients: type in which gradients are summed over micro-batches and workers.
        optimizer_bytes: bytes of the optimizer for each parameter: its moments, and a master copy if it keeps one.
        are_rounded: a worker rounds the parameters of a layer from their masters instead of receiving them.

    Raises:
        ConfigError: negative optimizer bytes.
    """

    name: str
    parameters: DType
    gradients: DType
    optimizer_bytes: int
    are_rounded: bool = False

    def __post_init__(self) -> None:
        if self.optimizer_bytes < 0:
            raise ConfigError(f"optimizer_bytes of {self.name!r} must not be negative; got {self.optimizer_bytes}")

    @property
    def master_bytes(self) -> int:
        """The bytes of a master copy for each parameter: parameters of 16 bits with more than two float32 moments."""
        return 4 if self.parameters.num_bytes == 2 and self.optimizer_bytes > 8 else 0


_BF16: Final = "bf16-master-fp32-gradients"

STATE_POLICIES: Final[Mapping[str, StatePolicy]] = FrozenMap(
    {
        name: StatePolicy(
            name=name,
            parameters=parameters,
            gradients=gradients,
            optimizer_bytes=optimizer_bytes,
            are_rounded=name == _BF16,
        )
        for name, parameters, gradients, optimizer_bytes in (
            # 2 + 2 + (4 master + 4 + 4 moments) = 16 bytes: Rajbhandari et al., "ZeRO", 2020, section 3.1.
            ("bf16-master", DType.BF16, DType.BF16, 12),
            # As above with gradients summed in fp32: 18 bytes, as a run in bf16 has them.
            (_BF16, DType.BF16, DType.FP32, 12),
            # PyTorch's AdamW for parameters in bf16: both moments in their type, no master copy.
            ("bf16", DType.BF16, DType.BF16, 4),
            ("fp32", DType.FP32, DType.FP32, 8),
        )
    }
)
"""Policies for Adam by name."""

PRECISIONS: Final[Mapping[str, str]] = FrozenMap({"fp32": "fp32", "bf16": _BF16})
"""The policy of a run by its precision."""


def state_policy(name: str) -> StatePolicy:
    """Return the policy of this name. Raises ConfigError if there is none."""
    return named(STATE_POLICIES, name, "state policy")


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
