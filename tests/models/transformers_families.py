"""Tiny configurations of families of transformers, and the values of layers in the models of that library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from chameleon_ft.models.transformers_walk import Walk

VOCAB = 97
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_EXPERTS = {"num_experts_per_tok": 2}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

# Windows are shorter than the samples of tests, so that they count, and a layer or two see all of a sample.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _GROUPED),
    "qwen2": ("Qwen2Config", {**_GROUPED, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**_GROUPED, "head_dim": 16}),
    "mistral": ("MistralConfig", {**_GROUPED, "sliding_window": 5}),
    "gemma2": ("Gemma2Config", {**_GROUPED, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 5}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            **_GROUPED,
            "head_dim": 16,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 64,
            "bos_token_id": None,
            "eos_token_id": None,
            "scale_attn_by_inverse_layer_idx": True,
            **_NO_DROPOUT,
        },
    ),
    "gpt_neox": ("GPTNeoXConfig", _SIZES),
    "phi": ("PhiConfig", _SIZES),
    "olmo2": ("Olmo2Config", _GROUPED),
    "mixtral": ("MixtralConfig", {**_GROUPED, **_EXPERTS, "num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_GROUPED, **_EXPERTS, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 24},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **_SIZES,
            **_EXPERTS,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "moe_intermediate_size": 24,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "bert": (
        "BertConfig",
        {**_SIZES, "is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            **_GROUPED,
            **_EXPERTS,
            "head_dim": 16,
            "num_local_experts": 4,
            "sliding_window": 5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
}
# Whose loss and gradients are compared, also of documents in a sample.
COMPARED = tuple(FAMILIES)
FAMILIES |= {
    "minimax": (
        "MiniMaxConfig",
        {
            **_GROUPED,
            **_EXPERTS,
            "head_dim": 8,
            "num_local_experts": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "bart": (
        "BartConfig",
        {"vocab_size": VOCAB, "d_model": 32, "encoder_layers": 3, "decoder_layers": 3, "decoder_attention_heads": 4},
    ),
    "apertus": ("ApertusConfig", _GROUPED),
}


def family(name: str, **changes: Any) -> Any:
    """Return the configuration of a family."""
    import transformers

    kind, values = FAMILIES[name]
    return getattr(transformers, kind)(**{**values, **changes})


def whole_model(config: Any) -> Any:
    """Return the model of transformers, initialised by it in float32."""
    import transformers

    make: Any = transformers.AutoModelForCausalLM.from_config
    return make(config, dtype=torch.float32).train()


def load_layers(walk: Walk, layers: Sequence[nn.Module], model: nn.Module) -> None:
    """Give layers the values of a whole model; what it ties stays tied."""
    state = model.state_dict()
    for index, layer in enumerate(layers, -1):
        layer.load_state_dict({own: state[name] for own, name in walk.names(index).items()})
    for (first, name), (last, other) in walk.tied():
        module, _, leaf = other.rpartition(".")
        setattr(layers[last].get_submodule(module), leaf, layers[first].get_parameter(name))
