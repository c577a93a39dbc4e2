"""The shape of a model from the `config.json` that it is published with on Hugging Face.

What each type of model consists of is that of its module in the library transformers 5; the tests compare the numbers
of parameters and operations with those models.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from chameleon_ft.cost.shapes import (
    Bias,
    BlockShape,
    Experts,
    FeedForward,
    HeadNorm,
    LatentAttention,
    ModelShape,
    Norm,
    Norms,
)
from chameleon_ft.errors import ConfigError
from chameleon_ft.plan.frozen_map import FrozenMap


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """The facts about a type of model that its file leaves out.

    Attributes:
        bias: matrices with biases if the file does not say so.
        experts_ffn: key of the inner width of an expert.
        full_every: of so many blocks the last looks at all tokens, the others at a window; 1 if all blocks are alike.
        is_tied: whether the output projection is the embedding if the file does not say so.
    """

    bias: Bias = Bias.NONE
    feed_forward: FeedForward = FeedForward.SWIGLU
    norm: Norm = Norm.RMS
    norms: Norms = Norms.BEFORE
    head_norm: HeadNorm = HeadNorm.NONE
    experts_ffn: str | None = None
    has_sinks: bool = False
    full_every: int = 1
    is_tied: bool = False
    head_bias: bool = False


_LLAMA: Final = _Family()

_FAMILIES: Final[Mapping[str, _Family]] = FrozenMap(
    {
        "deepseek_v3": _Family(experts_ffn="moe_intermediate_size"),
        "gemma": _Family(is_tied=True),
        "gemma2": _Family(norms=Norms.AROUND, full_every=2, is_tied=True),
        "gemma3_text": _Family(norms=Norms.AROUND, head_norm=HeadNorm.EACH, full_every=6, is_tied=True),
        "gpt2": _Family(bias=Bias.ALL, feed_forward=FeedForward.GELU, norm=Norm.LAYER, is_tied=True),
        "gpt_neox": _Family(bias=Bias.ALL, feed_forward=FeedForward.GELU, norm=Norm.LAYER, norms=Norms.PARALLEL),
        "gpt_oss": _Family(bias=Bias.ALL, experts_ffn="intermediate_size", has_sinks=True, full_every=2),
        "llama": _LLAMA,
        "mistral": _LLAMA,
        "mixtral": _Family(experts_ffn="intermediate_size"),
        "olmo2": _Family(norms=Norms.AFTER, head_norm=HeadNorm.WHOLE),
        "phi": _Family(
            bias=Bias.ALL, feed_forward=FeedForward.GELU, norm=Norm.LAYER, norms=Norms.SHARED, head_bias=True
        ),
        "phi3": _LLAMA,
        "qwen2": _Family(bias=Bias.QKV),
        "qwen3": _Family(head_norm=HeadNorm.EACH),
        "qwen3_moe": _Family(head_norm=HeadNorm.EACH, experts_ffn="moe_intermediate_size"),
    }
)

# One name in nearly all files, and others for it.
_OTHER_NAMES: Final[Mapping[str, tuple[str, ...]]] = FrozenMap(
    {
        "hidden_size": ("n_embd",),
        "num_hidden_layers": ("n_layer",),
        "num_attention_heads": ("n_head",),
        "intermediate_size": ("n_inner",),
        "max_position_embeddings": ("n_positions",),
        "num_experts": ("num_local_experts", "n_routed_experts"),
    }
)


def from_hugging_face(config: Mapping[str, object], *, seq_len: int | None = None) -> ModelShape:
    """Return the shape that `config`, a parsed `config.json`, describes.

    Without a name in the file it is called by its type and its parameters, those active for a token behind an A.

    Args:
        config: keys and values of the file; keys that do not affect the shape are ignored.
        seq_len: tokens in a training sequence; None for `max_position_embeddings`, which is often far longer than the
            sequences of the training.

    Raises:
        ConfigError: a key that is missing or not a positive integer, a type of model with other blocks, or weights that
            are quantised.
    """
    return _Reader(config).shape(seq_len)


class _Reader:
    """A `config.json` and the family of its model."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self._config = config
        model_type = config.get("model_type")
        if model_type in ("gemma3", "mistral3", "llama4") and "text_config" in config:
            raise ConfigError(
                f"model_type is {model_type!r}, which also sees pictures; put its text_config into a file of its own"
            )
        if not isinstance(model_type, str) or model_type not in _FAMILIES:
            raise ConfigError(f"model_type is {model_type!r}; a shape can be read for these: {', '.join(_FAMILIES)}")
        self._type = model_type
        self._family = _FAMILIES[model_type]
        if config.get("quantization_config") is not None:
            raise ConfigError(
                "quantization_config is set: such weights cannot be trained; remove it to plan for weights that are "
                "not quantised"
            )

    def shape(self, seq_len: int | None) -> ModelShape:
        config, count = self._config, self._integer("num_hidden_layers")
        positions = self._integer("max_position_embeddings") if self._type == "gpt2" or seq_len is None else 0
        shape = ModelShape(
            name=self._type,
            blocks=tuple(self._block(number, count) for number in range(count)),
            vocab=self._integer("vocab_size"),
            seq_len=positions if seq_len is None else seq_len,
            tied_embeddings=bool(config.get("tie_word_embeddings", self._family.is_tied)),
            positions=positions if self._type == "gpt2" else 0,
            head_bias=self._family.head_bias,
        )
        active = f"-A{_billions(shape.active_params)}" if shape.active_params < shape.num_params else ""
        name = f"{self._type}-{_billions(shape.num_params)}{active}"
        return replace(shape, name=str(config.get("_name_or_path") or name))

    def _block(self, number: int, count: int) -> BlockShape:
        family = self._family
        hidden, heads = self._integer("hidden_size"), self._integer("num_attention_heads")
        latent = self._latent() if self._type == "deepseek_v3" else None
        if latent is not None:
            head_dim = self._integer("qk_nope_head_dim") + latent.rope_dim
        elif self._config.get("head_dim") is None and hidden % heads:
            raise ConfigError(f"hidden_size {hidden} does not divide by num_attention_heads {heads}; give head_dim")
        else:
            head_dim = self._integer("head_dim", hidden // heads)
        if self._config.get("qk_layernorm"):
            raise ConfigError(f"qk_layernorm is set; a {self._type} with norms of queries and keys is unknown")
        norms = family.norms
        if norms is Norms.PARALLEL and self._config.get("use_parallel_residual") is False:
            norms = Norms.BEFORE
        return BlockShape(
            hidden=hidden,
            heads=heads,
            kv_heads=heads if latent else self._integer("num_key_value_heads", heads),
            head_dim=head_dim,
            value_head_dim=self._integer("v_head_dim") if latent else None,
            ffn=self._integer("intermediate_size", 4 * hidden if self._type == "gpt2" else None),
            feed_forward=self._feed_forward(),
            norm=family.norm,
            norms=norms,
            head_norm=family.head_norm,
            bias=self._bias(),
            dropout=any(self._config.get(key) for key in ("resid_pdrop", "hidden_dropout")),
            rotary=self._type != "gpt2",
            window=self._window(number, count),
            sinks=family.has_sinks,
            experts=self._experts(number),
            latent=latent,
        )

    def _feed_forward(self) -> FeedForward:
        keys = ("hidden_act", "hidden_activation", "activation_function")
        activation = next((self._config[key] for key in keys if self._config.get(key) is not None), "silu")
        if not isinstance(activation, str) or not activation.startswith(("silu", "swish", "gelu", "relu")):
            raise ConfigError(f"the activation function {activation!r} is unknown; known are silu, gelu and relu")
        return self._family.feed_forward

    def _bias(self) -> Bias:
        attention, mlp = self._config.get("attention_bias"), self._config.get("mlp_bias")
        usual = self._family.bias
        if usual is Bias.ALL and attention is False:
            raise ConfigError(f"attention_bias is false; a {self._type} without biases in its attention is unknown")
        if usual is not Bias.NONE or not (attention or mlp):
            return usual
        if not attention or self._type == "deepseek_v3":
            raise ConfigError(f"biases in only some matrices of a half of a block are unknown for a {self._type}")
        return Bias.ALL if mlp else Bias.ATTENTION

    def _window(self, number: int, count: int) -> int | None:
        """Return the tokens that a block looks back, as `layer_types` says or what that is by default."""
        config, family = self._config, self._family
        if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
            return None
        if self._type in ("qwen2", "qwen3", "qwen3_moe") and not config.get("use_sliding_window"):
            return None
        types = config.get("layer_types")
        if isinstance(types, list):
            if len(types) != count:
                raise ConfigError(f"layer_types has {len(types)} entries for {count} num_hidden_layers")
            is_windowed = types[number] == "sliding_attention"
        elif self._type in ("qwen2", "qwen3"):
            is_windowed = number >= self._integer("max_window_layers")
        else:
            every = self._integer("sliding_window_pattern", family.full_every)
            is_windowed = every == 1 or (number + 1) % every != 0
        return self._integer("sliding_window") if is_windowed else None

    def _experts(self, number: int) -> Experts | None:
        config, key = self._config, self._family.experts_ffn
        if key is None:
            return None
        dense = config.get("mlp_only_layers") or ()
        every = self._integer("decoder_sparse_step", 1) if self._type == "qwen3_moe" else 1
        if (isinstance(dense, Collection) and number in dense) or (number + 1) % every:
            return None
        if self._type == "deepseek_v3" and number < self._integer("first_k_dense_replace", 0, least=0):
            return None
        ffn = self._integer(key)
        shared = self._integer("n_shared_experts", least=0) if self._type == "deepseek_v3" else 0
        return Experts(
            count=self._integer("num_experts"),
            active=self._integer("num_experts_per_tok"),
            ffn=ffn,
            shared_ffn=shared * ffn,
        )

    def _latent(self) -> LatentAttention:
        return LatentAttention(
            query_rank=None if self._config.get("q_lora_rank") is None else self._integer("q_lora_rank"),
            kv_rank=self._integer("kv_lora_rank"),
            rope_dim=self._integer("qk_rope_head_dim"),
        )

    def _integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        given: Any = next(
            (self._config[name] for name in (key, *_OTHER_NAMES.get(key, ())) if self._config.get(name) is not None),
            default,  # files contain null for a value that follows from others
        )
        if not isinstance(given, int) or isinstance(given, bool) or given < least:
            problem = "is missing" if given is None else f"is {given!r}"
            raise ConfigError(f"{key} {problem}; config.json must give it as an integer of at least {least}")
        return given


def _billions(params: int) -> str:
    """Return a number of parameters as names of models have it, such as 671B and 0.5B."""
    return f"{params / 1e9:.3g}B"
