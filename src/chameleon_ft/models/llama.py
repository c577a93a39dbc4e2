"""A Llama as a list of layers, each of which is built on its own: embedding, transformer blocks, head.

Grouped-query attention with rotary positions, root-mean-square norms and SwiGLU feed-forward, all without biases; the
head may be tied to the embedding (`tied_parameters`). Parameters correspond one to one to those of transformers'
``LlamaForCausalLM``, whose names they have in files of weights. The job of `chameleon train` is a Llama on tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from chameleon_ft.data.corpus import load_sources
from chameleon_ft.data.mixture import Mixture
from chameleon_ft.data.samples import TokenWindows
from chameleon_ft.job.job import Job
from chameleon_ft.models.recomputation import recomputable
from chameleon_ft.optim import adamw, warmup_cosine
from chameleon_ft.weights import Weights

if TYPE_CHECKING:
    from chameleon_ft.config import LlamaConfig, TrainConfig
    from chameleon_ft.job.datasets import Dataset


_INIT_STD = 0.02


class Embedding(nn.Module):
    """Layer 0: token ids (batch, time), int64 -> (batch, time, dim)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.dim)
        self.dropout = config.dropout
        nn.init.normal_(self.tokens.weight, std=_INIT_STD)

    def forward(self, ids: Tensor) -> Tensor:
        return _drop(self.tokens(ids), self.dropout, training=self.training)


class Block(nn.Module):
    """A transformer block: x + attention(norm(x)), then x + feed_forward(norm(x)); x is (batch, time, dim)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = _Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = _FeedForward(config)
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.attention(recomputable(self.attention_norm, x))
        x = x + _drop(mixed, self.dropout, training=self.training)
        fed = self.feed_forward(recomputable(self.feed_forward_norm, x))
        return x + _drop(fed, self.dropout, training=self.training)


class Head(nn.Module):
    """The last layer: final norm and output projection; (batch, time, dim) -> logits (batch, time, vocab_size)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = _Linear(config.dim, config.vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.output(self.norm(x))
        return logits


class _Attention(nn.Module):
    """Causal self-attention; every `num_heads / num_kv_heads` query heads share one key and value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.num_heads
        kv_dim = config.num_kv_heads * self.head_dim
        self.query = _Linear(config.dim, config.dim)
        self.key = _Linear(config.dim, kv_dim)
        self.value = _Linear(config.dim, kv_dim)
        self.output = _Linear(config.dim, config.dim, std=_residual_std(config))
        self.rotary = _RotaryEmbedding(config.seq_len, self.head_dim, config.rope_theta)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, dim = x.shape
        heads = (batch, time, -1, self.head_dim)
        query = self.rotary(self.query(x).view(heads)).transpose(1, 2)
        key = self.rotary(self.key(x).view(heads)).transpose(1, 2)
        value = self.value(x).view(heads).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=key.shape[1] != query.shape[1]
        )
        projected: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, time, dim))
        return projected


class _RotaryEmbedding(nn.Module):
    """Rotary positions on (batch, time, heads, head_dim), dimension i paired with i + head_dim / 2."""

    def __init__(self, seq_len: int, head_dim: int, theta: float) -> None:
        super().__init__()
        cos, signed_sin = _rotary_tables(seq_len, head_dim, theta)
        self.cos: Tensor
        self.signed_sin: Tensor
        # Not persistent: they follow the module to its device but are not part of the training state.
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("signed_sin", signed_sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        time, head_dim = x.shape[1], x.shape[-1]
        # Swapping the halves by a roll, with the sign kept in the table, saves a negation and a concatenation.
        swapped = x.roll(head_dim // 2, dims=-1)
        return torch.addcmul(x * self.cos[:time], swapped, self.signed_sin[:time])


class _FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = _Linear(config.dim, config.ffn_dim)
        self.up = _Linear(config.dim, config.ffn_dim)
        self.down = _Linear(config.ffn_dim, config.dim, std=_residual_std(config))

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.down(recomputable(_silu_product, self.gate(x), self.up(x)))
        return projected


def _silu_product(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def llama_layers(config: LlamaConfig) -> tuple[Callable[[], nn.Module], ...]:
    """Return the factories of the ``num_layers + 2`` layers, first to last.

    Weights are drawn from N(0, 0.02^2); those of the two projections into the residual stream from
    N(0, 0.02^2 / (2 num_layers)), so that its initial variance does not grow with depth (Radford et al. 2019).
    """
    block = partial(Block, config)
    return (partial(Embedding, config), *(block for _ in range(config.num_layers)), partial(Head, config))


def tied_parameters(config: LlamaConfig) -> tuple[tuple[tuple[int, str], ...], ...]:
    """Return `Job.tied`: the matrix of the embedding and of the head, if they share it."""
    if not config.tie_embeddings:
        return ()
    return (((0, "tokens.weight"), (config.partition_layers - 1, "output.weight")),)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the summed cross-entropy in float32: logits (batch, time, vocab_size), targets (batch, time) -> scalar."""
    return functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), reduction="sum")


def layer_flops(config: LlamaConfig) -> tuple[float, ...]:
    """Return the floating-point operations of each layer's forward for one token of a full sequence.

    Counted are matrix products, with two operations per multiply-add, and attention over half of the positions, the
    average under a causal mask. The copy of the embedding counts as one operation per element.
    """
    kv_dim = config.num_kv_heads * (config.dim // config.num_heads)
    weights = 2 * config.dim * config.dim + 2 * config.dim * kv_dim + 3 * config.dim * config.ffn_dim
    # Scores and weighted sum: two products of (head_dim x seq_len / 2) per head.
    attention = 2 * 2 * config.dim * config.seq_len / 2
    block = 2.0 * weights + attention
    return (float(config.dim), *(block for _ in range(config.num_layers)), 2.0 * config.dim * config.vocab_size)


class _Linear(nn.Linear):
    """A linear layer without bias, initialised from N(0, std^2)."""

    def __init__(self, inputs: int, outputs: int, *, std: float = _INIT_STD) -> None:
        self.std = std
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


def _residual_std(config: LlamaConfig) -> float:
    return _INIT_STD / math.sqrt(2 * config.num_layers)


def _rotary_tables(seq_len: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cos and signed sin of the rotation angles, each (seq_len, 1, head_dim), float32.

    Position t rotates pair i by t * theta^(-2i / head_dim) (Su et al. 2021). The first half of the sines is negated:
    (x1, x2) becomes (x1 cos - x2 sin, x2 cos + x1 sin).
    """
    frequency = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(seq_len, dtype=torch.float32), frequency).unsqueeze(1)
    return torch.cat((angle.cos(), angle.cos()), dim=-1), torch.cat((-angle.sin(), angle.sin()), dim=-1)


def _drop(x: Tensor, probability: float, *, training: bool) -> Tensor:
    # At probability 0 torch would still advance the generator and copy.
    return functional.dropout(x, probability, training=training) if probability > 0 else x


def llama_job(config: TrainConfig) -> Job:
    """Return the job of ``config.model`` on the data prepared in ``config.output_dir`` (see `load_sources`).

    Raises:
        ConfigError: another model is named, by its folder, which cannot be trained.
        DataError: the data cannot be used.
    """
    optimizer, model = config.optimizer, config.model
    training: dict[str, Any] = {
        "dataset": _dataset(config),
        "optimizer": partial(
            adamw,
            lr=optimizer.lr,
            weight_decay=optimizer.weight_decay,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
        ),
        "learning_rate": partial(
            warmup_cosine,
            peak=optimizer.lr,
            floor=optimizer.min_lr,
            warmup_steps=optimizer.warmup_steps,
            total_steps=config.steps,
        ),
        "clip_norm": optimizer.clip_norm or None,
    }
    if model.hf:
        return Job.from_transformers(model.hf, targets="next tokens", **training)
    return Job(
        layers=llama_layers(model),
        loss=next_token_loss,
        loss_terms=Tensor.numel,
        layer_costs=layer_flops(model),
        tied=tied_parameters(model),
        weights=llama_weights(model),
        **training,
    )


def _dataset(config: TrainConfig) -> Dataset:
    windows = [TokenWindows(tokens, config.model.seq_len) for tokens in load_sources(config)]
    if not (mixture := config.data.mixture):
        return windows[0]
    return Mixture([(each, source.weight) for each, source in zip(windows, mixture, strict=True)])


_EMBEDDING = {"tokens.weight": "model.embed_tokens.weight"}
_BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.gate.weight": "mlp.gate_proj.weight",
    "feed_forward.up.weight": "mlp.up_proj.weight",
    "feed_forward.down.weight": "mlp.down_proj.weight",
}
_HEAD = {"norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}


def llama_weights(config: LlamaConfig, path: str | Path | None = None) -> Weights:
    """Return the names of the parameters in ``LlamaForCausalLM``, and files of that to read, if any."""
    blocks = [
        {ours: f"model.layers.{layer}.{theirs}" for ours, theirs in _BLOCK.items()}
        for layer in range(config.num_layers)
    ]
    return Weights(path, [_EMBEDDING, *blocks, _HEAD], save_config=partial(_save_config, config))


def _save_config(config: LlamaConfig, folder: Path) -> None:
    content = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
    }
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
