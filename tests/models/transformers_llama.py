"""Transformers' own Llama, the oracle of the layered one."""

from __future__ import annotations

from typing import Any

import pytest

from chameleon_ft.config import LlamaConfig
from chameleon_ft.models.llama import llama_weights


def names_of(config: LlamaConfig) -> list[dict[str, str]]:
    """The names of each layer's parameters, and those of transformers."""
    return [{ours: str(theirs) for ours, theirs in names.items()} for names in llama_weights(config).names or ()]


def transformers_llama(config: LlamaConfig) -> Any:
    """Return transformers' model of this shape with random weights; skip the test if it is not installed."""
    transformers = pytest.importorskip("transformers", reason="the development extra has it")
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            intermediate_size=config.ffn_dim,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.seq_len,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tie_embeddings,
            attn_implementation="eager",
        )
    )
