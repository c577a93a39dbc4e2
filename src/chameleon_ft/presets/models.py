"""Shapes of published models, and of models published on Hugging Face.

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

from chameleon_ft.errors import ConfigError
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.presets._lookup import named
from chameleon_ft.presets.shape import Bias, ModelShape

# Model types of Hugging Face made of the blocks that `ModelShape` describes, with their default biases.
_TYPES: Final[Mapping[str, Bias]] = FrozenMap({"llama": Bias.NONE, "mistral": Bias.NONE, "qwen2": Bias.QKV})


MODELS: Final[Mapping[str, ModelShape]] = FrozenMap(
    {
        name: ModelShape(
            name=name,
            hidden=hidden,
            blocks=blocks,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=hidden // heads,
            ffn=ffn,
            vocab=vocab,
            seq_len=seq_len,
            bias=Bias.QKV if name.startswith("qwen") else Bias.NONE,
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


def from_hugging_face(config: Mapping[str, object], *, seq_len: int | None = None) -> ModelShape:
    """Return the shape that `config`, a parsed `config.json`, describes.

    Args:
        config: keys and values of the file; keys that do not affect the shape are ignored.
        seq_len: tokens in a training sequence; None for `max_position_embeddings`, which is often far longer than the
            sequences of the training.

    Raises:
        ConfigError: a key that is missing or not a positive integer, or a type of model with other blocks: mixtures of
            experts, biases in the output projection or the feed-forward, an activation other than SiLU.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _TYPES:
        raise ConfigError(f"model_type is {model_type!r}; a shape can be read for these: {', '.join(_TYPES)}")
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ConfigError(
            f"hidden_act is {activation!r}; a {model_type} with another activation than 'silu' is unknown"
        )
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key, False):
            raise ConfigError(f"{key} is set; a {model_type} with biases in all matrices of a block is unknown")

    def integer(key: str, default: int | None = None) -> int:
        # Files contain null for a value that follows from others.
        value = default if (given := config.get(key)) is None else given
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            problem = "is missing" if value is None else f"is {value!r}"
            raise ConfigError(f"{key} {problem}; config.json must give it as an integer of at least 1")
        return value

    hidden, heads = integer("hidden_size"), integer("num_attention_heads")
    if config.get("head_dim") is None and hidden % heads:
        raise ConfigError(f"hidden_size {hidden} does not divide by num_attention_heads {heads}; give head_dim")
    return ModelShape(
        name=str(config.get("_name_or_path") or model_type),
        hidden=hidden,
        blocks=integer("num_hidden_layers"),
        heads=heads,
        kv_heads=integer("num_key_value_heads", heads),
        head_dim=integer("head_dim", hidden // heads),
        ffn=integer("intermediate_size"),
        vocab=integer("vocab_size"),
        seq_len=integer("max_position_embeddings") if seq_len is None else seq_len,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        bias=_TYPES[model_type],
    )
