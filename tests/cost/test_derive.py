"""Workloads derived from shapes and rates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from chameleon_ft.cluster import Link
from chameleon_ft.cost.derive import derive_workload
from chameleon_ft.cost.presets import (
    DEVICES,
    MODELS,
    PRECISIONS,
    STATE_POLICIES,
    Attention,
    Device,
    DType,
    Execution,
    Recompute,
    device,
    model_shape,
    state_policy,
)
from chameleon_ft.cost.step import estimate_step
from chameleon_ft.cost.transition import state_bytes
from chameleon_ft.errors import ConfigError
from chameleon_ft.plan import data_pipeline_plan
from chameleon_ft.schedule import CostModel, list_schedule
from chameleon_ft.storage.profiles import read_profile
from chameleon_ft.workload import TiedParameters
from tests.cost.shapes import gpt, model_flops_per_token
from tests.golden import refused
from tests.strategies import recomputing

PROFILES = Path(__file__).parents[2] / "profiles"

# One operation a nanosecond and memory that costs nothing: seconds are operations.
COUNTER = Device(
    name="counter",
    peak_flops={DType.BF16: 1e9},
    achievable=1.0,
    memory_bytes=1,
    memory_bytes_per_s=1e300,
    intra_host=Link(0.0, math.inf),
    inter_host=Link(0.0, math.inf),
)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("device_name", DEVICES)
def test_every_preset_has_a_workload(name: str, device_name: str) -> None:
    shape = model_shape(name)
    workload = derive_workload(shape, device(device_name), micro_batch_size=1, micro_batches=8)

    assert [layer.name for layer in workload.layers[:2]] == ["embedding", "block 1"]
    assert len(workload.layers) == len(shape.blocks) + 2
    assert sum(layer.param_bytes for layer in workload.layers) == 2 * shape.num_params
    for layer in workload.layers[1:]:
        assert layer.forward_s > 0
        assert layer.weight_grad_s <= layer.input_grad_s


def test_seconds_are_operations_over_the_rate() -> None:
    shape = model_shape("llama2-7b")
    workload = derive_workload(
        shape, COUNTER, micro_batch_size=2, micro_batches=1, execution=Execution(attention=Attention.EAGER)
    )

    seconds = math.fsum(workload.layer_times_s)
    tokens = 2 * shape.seq_len
    assert seconds == pytest.approx(tokens * model_flops_per_token(shape) / 1e9, rel=1e-4)


@pytest.mark.parametrize("name", ["llama2-7b", "llama2-13b", "llama3-8b"])
def test_derived_times_are_near_those_measured_on_the_device(name: str) -> None:
    measured = read_profile(PROFILES / f"{name}-h200-141g.json").layers
    shape = dataclasses.replace(model_shape(name), seq_len=4096)
    state = state_policy("bf16-master-fp32-gradients")
    derived = derive_workload(shape, device("h200-141g"), micro_batch_size=1, micro_batches=1, state=state).layers

    embedding, block, *_, head = (
        (one.forward_s + one.backward_s) / (other.forward_s + other.backward_s)
        for one, other in zip(derived, measured, strict=True)
    )
    assert block == pytest.approx(1.0, abs=0.07)
    assert head == pytest.approx(1.0, abs=0.05)
    assert 0.3 < embedding < 1.0


def test_full_recomputation_adds_a_forward_to_the_input_half() -> None:
    kept, again = (
        derive_workload(
            model_shape("llama2-7b"),
            device("h100-80g"),
            micro_batch_size=1,
            micro_batches=1,
            execution=Execution(recompute=recompute),
        ).layers[1]
        for recompute in (Recompute.NONE, Recompute.FULL)
    )

    assert again.input_grad_s == pytest.approx(kept.input_grad_s + kept.forward_s)
    assert again.weight_grad_s == kept.weight_grad_s
    # What is made again has room only while the block's own backward runs.
    assert again.working_bytes == kept.working_bytes + kept.activation_bytes


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("tp", [1, 8])
def test_full_recomputation_is_a_plan_whose_workers_all_recompute(tp: int, split: bool) -> None:
    rates = device("h100-80g")
    plan = data_pipeline_plan(layer_costs=[1.0] * 34, dp=1, pp=4, micro_batches=8, split_backward=split)
    kept, again = (
        CostModel(
            derive_workload(
                model_shape("llama2-7b"),
                rates,
                micro_batch_size=1,
                micro_batches=8,
                execution=Execution(recompute=recompute, tp=tp),
            ),
            rates.cluster(4),
        )
        for recompute in (Recompute.NONE, Recompute.FULL)
    )
    everywhere = recomputing(plan, plan.workers)

    by_plan = estimate_step(everywhere, list_schedule(everywhere, kept), kept)
    by_costs = estimate_step(plan, list_schedule(plan, again), again)

    assert by_plan.step_s == pytest.approx(by_costs.step_s, rel=1e-12)
    assert by_plan.bound_s == pytest.approx(by_costs.bound_s, rel=1e-12)
    for worker, use in by_plan.memory.items():
        # Costs do not tell that W has no use for what is made again, nor that a recomputed layer keeps no output.
        assert by_costs.memory[worker].peak_bytes == pytest.approx(use.peak_bytes, rel=0.01)
        assert split or by_costs.memory[worker].peak_bytes >= use.peak_bytes
    without = estimate_step(plan, list_schedule(plan, kept), kept)
    assert by_plan.memory[0].peak_bytes < without.memory[0].peak_bytes
    assert by_plan.step_s > without.step_s


@pytest.mark.parametrize(
    ("policy", "per_param"), [("bf16-master", 16), ("bf16-master-fp32-gradients", 18), ("bf16", 8), ("fp32", 16)]
)
def test_state_bytes_follow_the_policy(policy: str, per_param: int) -> None:
    shape = model_shape("llama3-8b")
    workload = derive_workload(
        shape, device("a100-80g"), micro_batch_size=1, micro_batches=1, state=state_policy(policy)
    )

    assert sum(layer.held_bytes for layer in workload.layers) == per_param * shape.num_params


def test_of_a_run_in_bf16_masters_and_moments_move_and_messages_have_half_the_bytes() -> None:
    shape, rates = model_shape("llama3-8b"), device("a100-80g")
    full, half = (
        derive_workload(shape, rates, micro_batch_size=1, micro_batches=1, state=state_policy(PRECISIONS[name]))
        for name in ("fp32", "bf16")
    )
    for workload in (full, half):
        assert sum(map(state_bytes, workload.layers)) == 12 * shape.num_params
    assert [layer.output_bytes for layer in full.layers] == [2 * layer.output_bytes for layer in half.layers]


def test_tensor_parallelism_divides_bytes_and_work_and_adds_messages() -> None:
    shape = model_shape("llama3-70b")
    alone, shared = (
        derive_workload(
            shape, device("h100-80g"), micro_batch_size=1, micro_batches=1, execution=Execution(tp=tp)
        ).layers[1]
        for tp in (1, 8)
    )

    assert shared.param_bytes * 8 == alone.param_bytes
    assert shared.activation_bytes * 8 == alone.activation_bytes
    assert shared.output_bytes * 8 == alone.output_bytes
    assert shared.weight_grad_s * 8 == pytest.approx(alone.weight_grad_s)
    # Two ring all-reduces of s b h elements over links of 450 GB/s, in 14 steps each.
    messages_s = 2 * 14 * (6e-6 + 8192 * 8192 * 2 / 8 / 450e9)
    assert shared.forward_s == pytest.approx(alone.forward_s / 8 + messages_s)


def test_a_name_may_be_shortened_to_a_unique_prefix() -> None:
    assert device("H100") is device("h100-80g")
    assert device("ascend-910b") is device("ascend-910b-64g")
    assert state_policy("bf16").name == "bf16", "what is a name of its own is not short for another"


@pytest.mark.parametrize(
    "derive",
    [
        lambda: device("h100-81g"),
        lambda: device("v100"),
        lambda: model_shape("llama2"),
        lambda: state_policy("bf17"),
        lambda: dataclasses.replace(COUNTER, achievable=1.5),
        lambda: dataclasses.replace(COUNTER, memory_bytes=0),
        lambda: dataclasses.replace(COUNTER, peak_flops={}),
        lambda: COUNTER.flops_per_s(DType.FP32),
        lambda: COUNTER.cluster(0),
        lambda: Execution(tp=0),
        lambda: derive_workload(
            model_shape("qwen2.5-7b"), COUNTER, micro_batch_size=1, micro_batches=1, execution=Execution(tp=8)
        ),
        lambda: derive_workload(model_shape("qwen2.5-7b"), COUNTER, micro_batch_size=0, micro_batches=1),
    ],
)
def test_what_cannot_be_is_refused(derive: Callable[[], object]) -> None:
    with refused(ConfigError):
        derive()


def test_a_cluster_of_a_device_has_its_links_and_memory() -> None:
    cluster = device("a100-80g").cluster(16, workers_per_host=8)

    assert cluster.link(0, 7) == device("a100-80g").intra_host
    assert cluster.link(7, 8) == device("a100-80g").inter_host
    assert {worker.memory_bytes for worker in cluster.workers} == {80 * 10**9}


def test_a_tied_embedding_is_held_twice_and_reduced_once() -> None:
    shape = gpt(hidden=64, blocks=2, heads=4, seq_len=32, vocab=100)

    workload = derive_workload(shape, device("h100-80g"), micro_batch_size=1, micro_batches=4)

    (tied,) = workload.tied
    element_bytes = STATE_POLICIES["bf16-master"].gradients.num_bytes
    assert tied == TiedParameters((0, 3), 100 * 64 * element_bytes)
    reduced = sum(layer.gradient_bytes for layer in workload.layers) - tied.gradient_bytes
    assert reduced == shape.num_params * element_bytes
    untied = dataclasses.replace(shape, tied_embeddings=False)
    assert derive_workload(untied, device("h100-80g"), micro_batch_size=1, micro_batches=4).tied == ()
