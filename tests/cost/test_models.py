"""Published models: the shapes give the published numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from chameleon_ft.cost.derive import layer_work
from chameleon_ft.cost.hugging_face import from_hugging_face
from chameleon_ft.cost.presets import MODELS, Attention, Execution, Recompute, model_shape
from chameleon_ft.errors import ConfigError
from tests.cost.shapes import gpt, model_flops_per_token
from tests.golden import refused

# Parameters in the files that each model is published with on Hugging Face (their safetensors index).
PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
}


def test_all_presets_are_checked() -> None:
    assert set(PUBLISHED) == set(MODELS)


@pytest.mark.parametrize(("name", "params"), PUBLISHED.items())
def test_the_parameters_are_those_of_the_published_model(name: str, params: int) -> None:
    shape = model_shape(name)

    assert shape.num_params == params
    assert len(shape.layer_params) == len(shape.blocks) + 2


@pytest.mark.parametrize(
    ("hidden", "blocks", "heads", "billions"),
    # Narayanan et al. 2021, table 1: models with sequences of 2,048 and 51,200 words.
    [(2304, 24, 24, 1.7), (6144, 40, 48, 18.4), (12_288, 96, 96, 174.6), (25_600, 128, 160, 1008.0)],
)
def test_a_gpt_has_the_parameters_of_the_closed_form(hidden: int, blocks: int, heads: int, billions: float) -> None:
    shape = gpt(hidden=hidden, blocks=blocks, heads=heads, seq_len=2048, vocab=51_200)

    # 12 L h^2 (1 + 13 / (12 h) + (V + s) / (12 L h)), which leaves out the final norm.
    closed_form = 12 * blocks * hidden**2 + 13 * blocks * hidden + (51_200 + 2048) * hidden
    assert shape.num_params - 2 * hidden == closed_form
    assert round(shape.num_params / 1e9, 1) == billions


@pytest.mark.parametrize("name", PUBLISHED)
def test_operations_are_six_for_a_parameter_and_those_of_attention(name: str) -> None:
    shape = model_shape(name)
    work = layer_work(shape, Execution(attention=Attention.EAGER), element_bytes=2)
    flops = sum(each.forward_flops + each.input_grad_flops + each.weight_grad_flops for each in work)

    # PaLM, appendix B; norms and biases are in N but take no products, hence not quite equal.
    assert flops == pytest.approx(model_flops_per_token(shape), rel=1e-4)
    assert model_flops_per_token(shape) == pytest.approx(
        6 * (shape.num_params - shape.vocab * shape.hidden) + 12 * len(shape.blocks) * shape.hidden * shape.seq_len
    )


def test_operations_of_a_gpt_are_those_of_the_published_formula() -> None:
    shape = gpt(hidden=12_288, blocks=96, heads=96, seq_len=2048, vocab=51_200)
    work = layer_work(shape, Execution(attention=Attention.EAGER), element_bytes=2)
    flops = sum(each.forward_flops + each.input_grad_flops + each.weight_grad_flops for each in work)

    # Korthikanti et al., appendix A, for one token: 72 L h^2 (1 + s / (6 h) + v / (12 h L)).
    assert flops == pytest.approx(
        72 * 96 * 12_288**2 * (1 + 2048 / (6 * 12_288) + 51_200 / (12 * 12_288 * 96)), rel=1e-12
    )
    selective = layer_work(shape, Execution(attention=Attention.EAGER, recompute=Recompute.SELECTIVE), element_bytes=2)
    assert selective[1].input_grad_flops - work[1].input_grad_flops == 4 * 12_288 * 2048


def test_flash_attention_skips_what_the_mask_hides() -> None:
    shape = model_shape("llama3-8b")
    eager = layer_work(shape, Execution(attention=Attention.EAGER), element_bytes=2)[1]
    flash = layer_work(shape, Execution(), element_bytes=2)[1]
    scores = 4 * shape.hidden * shape.seq_len

    assert eager.forward_flops - flash.forward_flops == scores / 2
    assert eager.input_grad_flops - flash.input_grad_flops == 2 * scores - 2.5 * scores / 2


@pytest.mark.parametrize(
    ("name", "near"), [("llama3-80b", "llama3-8b"), ("llama2", "llama2-7b"), ("qwen-2.5-72b", "qwen2.5-72b")]
)
def test_the_nearest_name_is_offered(name: str, near: str) -> None:
    with refused(ConfigError):
        model_shape(name)


def test_names_may_be_written_in_capitals() -> None:
    assert model_shape("Llama3-8B") is MODELS["llama3-8b"]


@pytest.mark.parametrize("change", [{"hidden": 0}, {"kv_heads": 5}])
def test_impossible_blocks_are_refused(change: dict[str, Any]) -> None:
    with refused(ConfigError):
        dataclasses.replace(model_shape("llama3-8b").blocks[0], **change)


@pytest.mark.parametrize("change", [{"vocab": 0}, {"blocks": ()}, {"positions": 8191}])
def test_impossible_models_are_refused(change: dict[str, Any]) -> None:
    with refused(ConfigError):
        dataclasses.replace(model_shape("llama3-8b"), **change)


LLAMA_3_8B = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}


def test_a_config_json_gives_the_preset() -> None:
    assert dataclasses.replace(from_hugging_face(LLAMA_3_8B), name="llama3-8b") == model_shape("llama3-8b")


def test_qwen_has_biases_and_may_tie_its_embedding() -> None:
    # Qwen/Qwen2.5-0.5B: 494,032,768 parameters.
    shape = from_hugging_face(
        {
            "model_type": "qwen2",
            "hidden_size": 896,
            "intermediate_size": 4864,
            "max_position_embeddings": 32768,
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
        },
        seq_len=4096,
    )

    assert shape.num_params == 494_032_768
    assert shape.seq_len == 4096
    assert sum(shape.layer_params) - shape.num_params == 151_936 * 896


def test_keys_that_files_leave_out_or_null_follow_from_others() -> None:
    config = {**LLAMA_3_8B, "head_dim": None}
    del config["num_key_value_heads"]

    block = from_hugging_face(config).blocks[0]
    assert block.kv_heads == 32
    assert block.head_dim == 128


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "bert"},
        {"model_type": "mixtral"},
        {"model_type": "gemma3", "text_config": {}},
        {"quantization_config": {"quant_method": "mxfp4"}},
        {"hidden_size": None},
        {"vocab_size": "many"},
        {"hidden_act": "xielu"},
        {"mlp_bias": True},
        {"num_attention_heads": 33, "num_key_value_heads": 33},
    ],
)
def test_files_of_other_models_are_refused(change: dict[str, Any]) -> None:
    with refused(ConfigError):
        from_hugging_face({**LLAMA_3_8B, **change})
