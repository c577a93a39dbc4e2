"""Sizes and results of the parts of `benchmarks.gpu`, and the parts that start no run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from benchmarks._common import Bar
from benchmarks._neighbours import progress
from benchmarks.memory import count, measured_model
from chameleon_ft.config import BackendName, Batch, DeviceName, LlamaConfig, Parallel, TrainConfig
from chameleon_ft.cost.presets import DEVICES, MODELS, device, state_policy
from chameleon_ft.cost.profile import Profile, derived_profile
from chameleon_ft.models.llama import layer_flops
from chameleon_ft.optim import adamw
from chameleon_ft.plan import Plan, RecomputedLayers
from chameleon_ft.session.configuration import prepare_data_of
from chameleon_ft.storage.profiles import write_profile
from chameleon_ft.worker.device import claim_device, wait_for_stream
from chameleon_ft.worker.inspection import inspect_job
from chameleon_ft.worker.profiling.profile import measure_profile
from chameleon_ft.worker.state_transfer.layer_messages import checksum_of_sums, layer_checksums
from chameleon_ft.workload import LayerCost

_MODELS: Final = ("llama2-7b", "llama2-13b", "llama3-8b")
_MEMORY_ERROR, _MEMORY_UNDERESTIMATE = 0.02, 0.01
_UPDATE_DEVIATION: Final = 1e-5
_KINDS: Final = (0, 1, -1)
"""Layers that stand for all: embedding, block, head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large everything is that a part computes."""

    models: Mapping[str, LlamaConfig]
    repeats: int
    memory_model: LlamaConfig
    run_model: LlamaConfig
    fault_model: LlamaConfig
    steps: int
    checksum_bytes: int
    optimizer_elements: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The device that is measured, at which size, and where the raw data go."""

    device: DeviceName
    size: Size
    folder: Path
    command: str
    timeout_s: float
    backend: BackendName = "gloo"
    library: BackendName = "nccl"
    """The backend of the device's own library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The results of a part: a table, bars, remarks, and the raw data as JSON values."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    bars: tuple[Bar, ...] = ()
    remarks: tuple[str, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)


def _published(name: str, *, smaller: int = 1, seq_len: int) -> LlamaConfig:
    """Return the shape of a published model, or one with every width `smaller` times smaller."""
    shape = MODELS[name]
    block = shape.blocks[0]
    return LlamaConfig(
        vocab_size=shape.vocab // smaller,
        dim=shape.hidden // smaller,
        num_layers=len(shape.blocks),
        num_heads=max(1, block.heads // smaller),
        num_kv_heads=max(1, block.kv_heads // smaller),
        ffn_dim=block.ffn // smaller,
        seq_len=seq_len,
    )


FULL: Final = Size(
    models={name: _published(name, seq_len=4096) for name in _MODELS},
    repeats=20,
    memory_model=LlamaConfig(dim=2048, num_layers=6, num_heads=16, num_kv_heads=16, ffn_dim=5504, seq_len=2048),
    run_model=LlamaConfig(dim=1024, num_layers=8, num_heads=16, num_kv_heads=16, ffn_dim=2752, seq_len=1024),
    fault_model=LlamaConfig(dim=512, num_layers=6, num_heads=8, num_kv_heads=8, ffn_dim=1376, seq_len=256),
    steps=20,
    checksum_bytes=600_000_000,
    optimizer_elements=200_000_000,
    threads=8,
)
SMALL: Final = Size(
    models={name: _published(name, smaller=16, seq_len=32) for name in _MODELS},
    repeats=10,
    memory_model=LlamaConfig(dim=64, num_layers=4, num_heads=2, num_kv_heads=2, ffn_dim=176, seq_len=64),
    run_model=LlamaConfig(dim=64, num_layers=4, num_heads=2, num_kv_heads=2, ffn_dim=176, seq_len=64),
    fault_model=LlamaConfig(dim=64, num_layers=4, num_heads=2, num_kv_heads=2, ffn_dim=176, seq_len=64),
    steps=20,
    checksum_bytes=20_000_000,
    optimizer_elements=1_000_000,
    threads=1,
)


def config_of(subject: Subject, model: LlamaConfig, *, in_bf16: bool = False, **changes: Any) -> TrainConfig:
    """Return the configuration of a Llama on the device."""
    is_shared = {} if subject.device == "cpu" else {"share_devices": True}
    precision = {"precision": "bf16"} if in_bf16 else {}
    single = {"workers": 1, "parallel": Parallel(dp=1, pp=1)}
    fields = {"batch": Batch(micro_batches=1, micro_batch_size=1), **single, **is_shared, **precision, **changes}
    fields["backend"] = subject.backend
    return TrainConfig(device=subject.device, model=model, threads=subject.size.threads, **fields)


def _prepared(config: TrainConfig, folder: Path) -> TrainConfig:
    folder.mkdir(parents=True, exist_ok=True)
    config = config.model_copy(update={"output_dir": folder})
    prepare_data_of(config)
    return config


# --- profiles of published models ------------------------------------------------------------------------------------


def profiles(subject: Subject) -> Result:
    """Measure an embedding, a block and a head of each model, and write the profile of the whole model."""
    rows: list[tuple[str, ...]] = []
    data: dict[str, dict[str, Any]] = {}
    for name, shape in subject.size.models.items():
        progress(f"profile of {name}")
        profile, one_block = _profile(subject, name, shape)
        write_profile(profile, subject.folder / f"{name}.json")
        derived = _derived(name, profile.fingerprint.device, shape)
        for index, layer in zip(_KINDS, one_block.layers, strict=True):
            flops = layer_flops(shape)[index] * shape.seq_len if index else None  # the embedding only copies
            rows.append((name, *_row(layer, flops, None if derived is None else derived.layers[index])))
        data[name] = {
            "operation_overhead_s": profile.operation_overhead_s,
            "dtype": profile.fingerprint.dtype,
            "layers": [_json(layer) for layer in one_block.layers],
            "derived": None if derived is None else [_json(derived.layers[index]) for index in _KINDS],
        }
    element_types = {each["dtype"] for each in data.values()}
    return Result(
        columns=("model", "layer", "F, ms", "B, ms", "I, ms", "W, ms", "TFLOP/s", "F + B by preset, ms"),
        rows=tuple(rows),
        remarks=(f"one sample per micro-batch; activations are {', '.join(sorted(element_types))}",),
        data=data,
    )


def _profile(subject: Subject, name: str, shape: LlamaConfig) -> tuple[Profile, Profile]:
    """Return the profile of the whole model, and that of the model with one block, from which it is made."""
    config = _prepared(config_of(subject, shape, in_bf16=True), subject.folder / "data" / name)
    single = config.model_copy(update={"model": shape.model_copy(update={"num_layers": 1})})
    one = measure_profile(
        single, repeats=subject.size.repeats, peer=None, token="", command=subject.command, progress=progress
    )
    whole = replace(
        one,
        name=inspect_job(config).model,
        fingerprint=inspect_job(config).profiled_as(config),
        provenance=f"{one.provenance}; a single block was measured and stands for all {shape.num_layers}",
        layers=tuple(_repeated(one.layers, shape.num_layers, rename=True)),
        times=tuple(_repeated(one.times, shape.num_layers)),
    )
    return whole, one


def _repeated(layers: Sequence[Any], blocks: int, *, rename: bool = False) -> Iterator[Any]:
    first, block, last = layers
    for index, layer in enumerate((first, *[block] * blocks, last)):
        yield replace(layer, name=f"{layer.name.split()[0]} {index}") if rename else layer


def _derived(name: str, found: str, shape: LlamaConfig) -> Profile | None:
    """Return the profile derived for a known device of the name that the driver gives, if there is one."""
    known = next((key for key in DEVICES if key.split("-")[0] in found.lower()), None)
    if known is None or shape.dim != MODELS[name].hidden:
        return None
    model = replace(MODELS[name], seq_len=shape.seq_len)
    return derived_profile(model, device(known), micro_batch_size=1, state=state_policy("bf16-master"))


def _row(layer: LayerCost, flops: float | None, derived: LayerCost | None) -> tuple[str, ...]:
    times = (layer.forward_s, layer.backward_s, layer.input_grad_s, layer.weight_grad_s)
    both_s = layer.forward_s + layer.backward_s
    rate = f"{3 * flops / both_s / 1e12:.3g}" if flops and both_s else "-"
    by_preset = "-" if derived is None else f"{1e3 * (derived.forward_s + derived.backward_s):.3f}"
    return (layer.name.split()[0], *(f"{1e3 * each:.3f}" for each in times), rate, by_preset)


def _json(layer: LayerCost) -> dict[str, float | int]:
    names = ("forward_s", "backward_s", "input_grad_s", "weight_grad_s", "param_bytes", "activation_bytes")
    return {name: getattr(layer, name) for name in names}


# --- memory ----------------------------------------------------------------------------------------------------------


def memory(subject: Subject) -> Result:
    """Compare the predicted peaks of the workers of some plans with those of the device's allocator."""
    config = _prepared(config_of(subject, subject.size.memory_model, in_bf16=True), subject.folder / "data" / "memory")
    model = measured_model("Llama", config, claim_device(config))
    counted = [each for name, plan in _memory_plans(model) for each in count(model, name, plan)]
    shared = replace(model, owners=1, snapshots=1)
    counted += count(shared, "2 x 2, shared optimizer, snapshots", model.pipelines(2, 2, 8))
    errors = [each.error for each in counted for _ in each.workers]
    kept = [predicted / found - 1 for each in counted for predicted, found in each.snapshots]
    return Result(
        columns=("plan", "worker", "predicted, MB", "allocator's peak, MB", "error"),
        rows=tuple(
            (
                each.plan,
                str(each.workers[0]),
                f"{each.predicted / 1e6:.2f}",
                f"{each.counted / 1e6:.2f}",
                f"{each.error:+.2%}",
            )
            for each in counted
        ),
        bars=(
            Bar(name="mean error of the peak", value=statistics.fmean(map(abs, errors)), limit=_MEMORY_ERROR),
            Bar(name="largest underestimate", value=max(0.0, -min(errors)), limit=_MEMORY_UNDERESTIMATE),
            Bar(name="largest error of snapshots in host memory", value=max(map(abs, kept)), limit=_MEMORY_ERROR),
        ),
        data={"counted": [each.to_json() for each in counted]},
    )


def _memory_plans(model: Any) -> Iterator[tuple[str, Plan]]:
    for name, plan in (("2 x 2", model.pipelines(2, 2, 8)), ("1 x 3", model.pipelines(1, 3, 6))):
        yield f"{name}, fused", plan
        yield f"{name}, split", Plan(plan.placement, plan.routes, split_backward=True)
        recomputed = {}
        for worker in plan.workers:
            held = plan.placement.layers_of(worker)
            recomputed[worker] = RecomputedLayers(held[0], held[-1] + 1)
        yield f"{name}, recomputed", Plan(plan.placement, plan.routes, recompute=recomputed)


# --- checksums -------------------------------------------------------------------------------------------------------


def checksums(subject: Subject) -> Result:
    """Compare checksums of equal bytes on the device and on the CPU, and time those of a large state."""
    place = claim_device(config_of(subject, subject.size.run_model))
    generator = torch.Generator().manual_seed(0)
    differing, compared = 0, 0
    for elements in (0, 1, 7, 4095, 32_768, 32_769, 1_000_003, 4 << 20):
        data = torch.randint(0, 256, (elements,), dtype=torch.uint8, generator=generator)
        for start in (0, 1, 8):
            differing += checksum_of_sums(data[start:]) != checksum_of_sums(data.to(place)[start:])
            compared += 1
    size = subject.size.checksum_bytes
    state = {"module/weight": torch.randint(0, 1 << 30, (size // 4,), dtype=torch.int32, generator=generator)}
    moved = {key: value.to(place) for key, value in state.items()}
    host_s = _median_s(lambda: layer_checksums(state, torch.device("cpu")), torch.device("cpu"))
    device_s = _median_s(lambda: layer_checksums(moved, place), place)
    return Result(
        columns=("checksum", "bytes", "ms", "GB/s"),
        rows=tuple(
            (name, f"{size:,}", f"{1e3 * seconds:.2f}", f"{size / seconds / 1e9:.1f}")
            for name, seconds in (("XXH3 on the CPU", host_s), (f"on {place}, as for moved layers", device_s))
        ),
        bars=(Bar(name=f"checksums that differ, of {compared}", value=float(differing), limit=0.0),),
        data={"cpu_s": host_s, "device_s": device_s, "bytes": size, "compared": compared, "differing": differing},
    )


# --- optimizer -------------------------------------------------------------------------------------------------------


def optimizer(subject: Subject) -> Result:
    """Compare updates of this project's AdamW, which is fused, with torch's plain one on the same device."""
    place = claim_device(config_of(subject, subject.size.run_model))
    elements = subject.size.optimizer_elements
    options: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}
    plain: dict[str, Any] = {**options, "weight_decay": 0.1, "fused": False}
    makers: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "ours, fused": lambda parameters: adamw(parameters, **options),
        "torch's, tensor by tensor": lambda parameters: torch.optim.AdamW(parameters, foreach=False, **plain),
        "torch's, foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True, **plain),
    }
    found, seconds = {}, {}
    for name, make in makers.items():
        parameters = _parameters(elements, place)
        chosen = make(parameters)
        chosen.step()
        seconds[name] = _median_s(chosen.step, place)
        found[name] = torch.cat([parameter.detach().flatten().cpu() for parameter in parameters])
        del chosen, parameters
    reference = found["torch's, tensor by tensor"]
    deviations = {name: _deviation(values, reference) for name, values in found.items()}
    return Result(
        columns=("AdamW", "parameters", "ms a step", "largest deviation"),
        rows=tuple((name, f"{elements:,}", f"{1e3 * seconds[name]:.2f}", f"{deviations[name]:.1e}") for name in makers),
        bars=(
            Bar(name="deviation of the fused update", value=deviations["ours, fused"], limit=_UPDATE_DEVIATION),
            Bar(
                name="time of the fused update, of that tensor by tensor",
                value=seconds["ours, fused"] / seconds["torch's, tensor by tensor"],
                limit=1.0,
            ),
        ),
        data={"seconds": seconds, "deviations": deviations, "elements": elements},
    )


def _parameters(elements: int, place: torch.device) -> list[nn.Parameter]:
    """Make matrices with gradients, equal whenever they are made."""
    generator = torch.Generator().manual_seed(1)
    width = 1000
    parameters = []
    for rows in (elements // (2 * width), elements // (4 * width), elements // (4 * width)):
        parameter = nn.Parameter(torch.randn(rows, width, generator=generator).to(place))
        parameter.grad = torch.randn(rows, width, generator=generator).to(place)
        parameters.append(parameter)
    return parameters


def _deviation(values: Tensor, reference: Tensor) -> float:
    """Return the largest difference, relative to the largest reference."""
    return float((values - reference).abs().max() / reference.abs().max())


def _median_s(once: Callable[[], object], place: torch.device, *, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats + 1):
        wait_for_stream(place)
        start = time.perf_counter()
        once()
        wait_for_stream(place)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
