"""The shape of a model from the `config.json` that it is published with on Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from chameleon_ft.errors import ConfigError
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.presets.shape import Bias, ModelShape

__all__ = ["from_hugging_face"]

# Model types made of the blocks that `ModelShape` describes, and the biases they have unless the file says otherwise.
_KNOWN: Final[Mapping[str, Bias]] = FrozenMap({"llama": Bias.NONE, "mistral": Bias.NONE, "qwen2": Bias.QKV})


def from_hugging_face(config: Mapping[str, object], *, seq_len: int | None = None) -> ModelShape:
    """The shape that `config`, the parsed `config.json`, describes.

    Args:
        config: keys and values of the file; those that do not decide the shape are ignored.
        seq_len: tokens in a training sequence; `max_position_embeddings` unless given, which is often far longer than
            what a model was trained with.

    Raises:
        ConfigError: a key that is missing or not a positive integer, or a type of model with other blocks: mixtures of
            experts, biases in the output projection or the feed-forward, an activation other than SiLU.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _KNOWN:
        raise ConfigError(f"model_type is {model_type!r}; a shape can be read for these: {', '.join(_KNOWN)}")
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ConfigError(
            f"hidden_act is {activation!r}; a {model_type} with another activation than 'silu' is unknown"
        )
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key, False):
            raise ConfigError(f"{key} is set; a {model_type} with biases in all matrices of a block is unknown")
    hidden = _integer(config, "hidden_size")
    heads = _integer(config, "num_attention_heads")
    if not _given(config, "head_dim") and hidden % heads:
        raise ConfigError(f"hidden_size {hidden} does not divide by num_attention_heads {heads}; give head_dim")
    return ModelShape(
        name=str(config.get("_name_or_path") or model_type),
        hidden=hidden,
        blocks=_integer(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=_integer(config, "num_key_value_heads") if _given(config, "num_key_value_heads") else heads,
        head_dim=_integer(config, "head_dim") if _given(config, "head_dim") else hidden // heads,
        ffn=_integer(config, "intermediate_size"),
        vocab=_integer(config, "vocab_size"),
        seq_len=_integer(config, "max_position_embeddings") if seq_len is None else seq_len,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        bias=_KNOWN[model_type],
    )


def _given(config: Mapping[str, object], key: str) -> bool:
    # Files write null for a value that follows from others.
    return config.get(key) is not None


def _integer(config: Mapping[str, object], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        what = "is missing" if value is None else f"is {value!r}"
        raise ConfigError(f"{key} {what}; config.json must give it as an integer of at least 1")
    return value
