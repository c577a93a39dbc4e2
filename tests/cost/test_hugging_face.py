"""Shapes of files of published models, against those models as transformers builds them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from chameleon_ft.cost.derive import derive_workload, layer_work
from chameleon_ft.cost.hugging_face import from_hugging_face
from chameleon_ft.cost.presets import Attention, Execution, device

SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 1000,
    "max_position_embeddings": 64,
}
EXPERTS: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2, "experts_implementation": "eager"}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": EXPERTS
    | {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 128, "num_mtp_layers": 0}
    | {"num_key_value_heads": 4, "q_lora_rank": 96, "kv_lora_rank": 48, "num_experts_per_tok": 2},
    "gemma": {"num_key_value_heads": 1},
    "gemma2": {"num_key_value_heads": 2},
    "gemma3_text": {"num_key_value_heads": 2},
    "gpt2": {"n_inner": 512},
    "gpt_neox": {},
    "gpt_oss": EXPERTS | {"num_key_value_heads": 2},
    "llama": {"attention_bias": True},
    "mistral": {"head_dim": 96, "num_key_value_heads": 2},
    "mixtral": EXPERTS | {"num_key_value_heads": 2},
    "olmo2": {"num_key_value_heads": 2},
    "phi": {},
    "phi3": {"num_key_value_heads": 2, "pad_token_id": 0},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2},
    "qwen3_moe": EXPERTS | {"mlp_only_layers": [1], "moe_intermediate_size": 128},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_and_operations_are_those_of_the_model(family: str) -> None:
    config = AutoConfig.for_model(family, **SMALL | FAMILIES[family])
    shape = from_hugging_face(config.to_dict())
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")  # type: ignore[no-untyped-call]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 64, dtype=torch.int64), use_cache=False)

    assert shape.seq_len == 64
    assert shape.num_params == sum(each.numel() for each in model.parameters())
    work = layer_work(shape, Execution(attention=Attention.EAGER), element_bytes=2)
    # Angles of rotations are a matrix product there.
    assert 64 * sum(each.forward_flops for each in work) == pytest.approx(counter.get_total_flops(), rel=2e-3)


@pytest.mark.parametrize(
    ("model_type", "keys", "params", "active"),
    [
        # Jiang et al., "Mixtral of Experts", arXiv 2401.04088: 47 billion parameters, 13 of them active.
        ("mixtral", {}, 46.7e9, 12.9e9),
        # DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437: 671 and 37 billion.
        ("deepseek_v3", {}, 671e9, 37.5e9),
        # Qwen Team, "Qwen3 Technical Report", arXiv 2505.09388: Qwen3-30B-A3B.
        ("qwen3_moe", {"num_hidden_layers": 48, "head_dim": 128}, 30.5e9, 3.35e9),
        # OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", arXiv 2508.10925: 116.83 and 5.13 billion, without the
        # embedding in the latter.
        ("gpt_oss", {}, 116.83e9, 5.13e9 + 201_088 * 2880),
    ],
)
def test_total_and_active_parameters_are_the_published_ones(
    model_type: str, keys: dict[str, Any], params: float, active: float
) -> None:
    shape = from_hugging_face(AutoConfig.for_model(model_type, **keys).to_dict())

    assert shape.num_params == pytest.approx(params, rel=0.005)
    assert shape.active_params == pytest.approx(active, rel=0.01)


def test_windows_are_those_of_the_blocks() -> None:
    config = AutoConfig.for_model("gemma3_text").to_dict()
    windows = [block.window for block in from_hugging_face(config).blocks]
    del config["layer_types"]

    assert windows == [4096 if (number + 1) % 6 else None for number in range(26)]
    assert [block.window for block in from_hugging_face(config).blocks] == windows
    no_window = from_hugging_face(AutoConfig.for_model("qwen3").to_dict() | {"layer_types": None})
    assert {block.window for block in no_window.blocks} == {None}


def test_a_window_costs_what_its_tokens_see() -> None:
    config = AutoConfig.for_model("mistral", sliding_window=128).to_dict()
    shape = from_hugging_face(config, seq_len=512)
    whole = dataclasses.replace(shape.blocks[0], window=None)
    seen = sum(min(position + 1, 128) for position in range(512)) / 512

    windowed, full = (
        layer_work(dataclasses.replace(shape, blocks=(block,)), Execution(), element_bytes=2)[1]
        for block in (shape.blocks[0], whole)
    )
    scores = 4 * whole.query_dim
    assert windowed.forward_flops == pytest.approx(2 * whole.active_matrices + scores * seen, rel=1e-3)
    assert full.forward_flops - windowed.forward_flops == pytest.approx(scores * (256 - seen), rel=5e-3)


def test_experts_have_memory_for_all_and_time_for_the_active_ones() -> None:
    shape = from_hugging_face(AutoConfig.for_model("mixtral").to_dict(), seq_len=4096)
    of_experts = shape.blocks[0]
    dense = dataclasses.replace(of_experts, experts=None, ffn=of_experts.active_ffn)

    with_experts, without = (
        derive_workload(
            dataclasses.replace(shape, blocks=(block,)), device("h100-80g"), micro_batch_size=1, micro_batches=8
        ).layers[1]
        for block in (of_experts, dense)
    )
    assert with_experts.param_bytes > 3 * without.param_bytes
    assert without.forward_s < with_experts.forward_s < 1.1 * without.forward_s
    assert without.activation_bytes < with_experts.activation_bytes < 1.3 * without.activation_bytes
