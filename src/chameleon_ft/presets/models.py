"""Shapes of published models.

Sources, for the shapes and (in the tests) the numbers of parameters:

- Llama 2: Touvron et al., "Llama 2: Open Foundation and Fine-Tuned Chat Models", arXiv 2307.09288; sequences of 4,096.
- Llama 3: Dubey et al., "The Llama 3 Herd of Models", arXiv 2407.21783, table 3; sequences of 8,192.
- Qwen2.5: Qwen Team, "Qwen2.5 Technical Report", arXiv 2412.15115; sequences of 4,096 in the main phase of
  pre-training.

Widths that the reports leave out are those of the `config.json` that each model is published with
(meta-llama/Llama-2-*, meta-llama/Meta-Llama-3-*, meta-llama/Llama-3.1-405B, Qwen/Qwen2.5-*). The 405B has 8 key and
value heads, as in the report.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.presets._lookup import named
from chameleon_ft.presets.shape import Bias, ModelShape

__all__ = ["MODELS", "model_shape"]


def _llama_2(size: str, hidden: int, blocks: int, heads: int, kv_heads: int, ffn: int) -> ModelShape:
    return _shape(f"llama2-{size}", hidden, blocks, heads, kv_heads, ffn, vocab=32_000, seq_len=4096)


def _llama_3(size: str, hidden: int, blocks: int, heads: int, ffn: int) -> ModelShape:
    return _shape(f"llama3-{size}", hidden, blocks, heads, 8, ffn, vocab=128_256, seq_len=8192)


def _qwen_2_5(size: str, hidden: int, blocks: int, heads: int, kv_heads: int, ffn: int) -> ModelShape:
    name = f"qwen2.5-{size}"
    return _shape(name, hidden, blocks, heads, kv_heads, ffn, vocab=152_064, seq_len=4096, bias=Bias.QKV)


def _shape(
    name: str,
    hidden: int,
    blocks: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    *,
    vocab: int,
    seq_len: int,
    bias: Bias = Bias.NONE,
) -> ModelShape:
    return ModelShape(
        name=name,
        hidden=hidden,
        blocks=blocks,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        ffn=ffn,
        vocab=vocab,
        seq_len=seq_len,
        bias=bias,
    )


MODELS: Final[Mapping[str, ModelShape]] = FrozenMap(
    {
        shape.name: shape
        for shape in (
            _llama_2("7b", 4096, 32, 32, 32, 11_008),
            _llama_2("13b", 5120, 40, 40, 40, 13_824),
            _llama_2("70b", 8192, 80, 64, 8, 28_672),
            _llama_3("8b", 4096, 32, 32, 14_336),
            _llama_3("70b", 8192, 80, 64, 28_672),
            _llama_3("405b", 16_384, 126, 128, 53_248),
            _qwen_2_5("7b", 3584, 28, 28, 4, 18_944),
            _qwen_2_5("32b", 5120, 64, 40, 8, 27_648),
            _qwen_2_5("72b", 8192, 80, 64, 8, 29_568),
        )
    }
)
"""The shapes by name."""


def model_shape(name: str) -> ModelShape:
    """The published model of this name; `dataclasses.replace` changes its `seq_len`. Raises ConfigError if unknown."""
    return named(MODELS, name, "model")
