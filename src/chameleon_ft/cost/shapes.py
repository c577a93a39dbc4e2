"""Shapes of transformers: the widths from which parameters, operations and bytes follow."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum

from chameleon_ft.errors import ConfigError


class FeedForward(StrEnum):
    """The feed-forward half of a block: down(act(gate(x)) * up(x)) with three matrices, or down(act(up(x))).

    Which activation function it is has no effect on a shape; SwiGLU and GELU are the usual ones.
    """

    SWIGLU = "swiglu"
    GELU = "gelu"


class Norm(StrEnum):
    """Root-mean-square norm with a gain, or layer norm with a gain and a bias."""

    RMS = "rms"
    LAYER = "layer"


class Norms(Enum):
    """Where the norms of a block are.

    Attributes:
        count: norms of the width of the residual stream.
        kept: tensors of that width that the backward needs: inputs of norms, and those of query, key and value and of
            the feed-forward.
        kept_selectively: those left if outputs of norms are computed again.
    """

    BEFORE = (2, 4, 2)  # one before each half (Llama)
    AFTER = (2, 4, 4)  # one after each half, so that no matrix reads the output of a norm (OLMo 2)
    AROUND = (4, 6, 4)  # before and after each half (Gemma 2)
    PARALLEL = (2, 3, 1)  # both halves beside each other, each with a norm of its own (GPT-NeoX)
    SHARED = (1, 2, 1)  # both halves beside each other behind one norm (Phi)

    def __init__(self, count: int, kept: int, kept_selectively: int) -> None:
        self.count = count
        self.kept = kept
        self.kept_selectively = kept_selectively


class HeadNorm(StrEnum):
    """Norms of queries and keys: none, one gain for every head (Qwen3), or a gain for all heads together (OLMo 2)."""

    NONE = "none"
    EACH = "each"
    WHOLE = "whole"


class Bias(StrEnum):
    """Matrices of a block with a bias: none, query, key and value (Qwen2), these and the output, or all (GPT)."""

    NONE = "none"
    QKV = "qkv"
    ATTENTION = "attention"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in place of a feed-forward (Shazeer et al. 2017), all of whose experts a worker holds.

    Attributes:
        count: routed experts.
        active: routed experts that compute a token.
        ffn: inner width of each.
        shared_ffn: inner width of the experts that compute every token; 0 for none.
    """

    count: int
    active: int
    ffn: int
    shared_ffn: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.active <= self.count:
            raise ConfigError(f"{self.active} active experts of {self.count}: give at least 1, and at most all")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Queries, and keys with values, are made from compressed ones: DeepSeek-V2, arXiv 2405.04434, section 2.1.

    Attributes:
        query_rank: width of the compressed queries; None if they are not compressed.
        kv_rank: width of the compressed keys and values.
        rope_dim: part of a head with rotary positions, whose key all heads share.
    """

    query_rank: int | None
    kv_rank: int
    rope_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """The shape of a transformer block.

    Attributes:
        hidden: width of the residual stream (h).
        heads: query heads (a).
        kv_heads: key and value heads; fewer than `heads` is grouped-query attention (Ainslie et al. 2023).
        head_dim: width of a head of queries and keys; `hidden / heads` in most models.
        value_head_dim: width of a head of values; None for `head_dim`.
        ffn: inner width of the feed-forward; without meaning if there are `experts`.
        feed_forward, norm, norms, head_norm, bias: variants of the block.
        dropout: dropout follows attention's softmax and both halves of a block, so that masks are kept.
        rotary: positions are rotations of queries and keys.
        window: tokens that attention looks back, itself included; None for all.
        sinks: each head has a learned score that takes part in the softmax (gpt-oss).
        experts: what is in place of the feed-forward; None for the feed-forward.
        latent: how queries, keys and values are compressed; None if they are not.

    Raises:
        ConfigError: a count below one, or heads that are not a multiple of the key and value heads.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    value_head_dim: int | None = None
    feed_forward: FeedForward = FeedForward.SWIGLU
    norm: Norm = Norm.RMS
    norms: Norms = Norms.BEFORE
    head_norm: HeadNorm = HeadNorm.NONE
    bias: Bias = Bias.NONE
    dropout: bool = False
    rotary: bool = True
    window: int | None = None
    sinks: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None

    def __post_init__(self) -> None:
        for field in ("hidden", "heads", "kv_heads", "head_dim", "ffn"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field} of a block must be at least 1; got {getattr(self, field)}")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"a block has {self.heads} heads, which {self.kv_heads} key and value heads cannot share equally; "
                "kv_heads must divide heads"
            )

    @property
    def query_dim(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def key_dim(self) -> int:
        """Width of all key heads together."""
        return self.kv_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        """Width of all value heads together."""
        return self.kv_heads * (self.value_head_dim or self.head_dim)

    @property
    def output_dim(self) -> int:
        """Width of the output of attention, before its projection."""
        return self.heads * (self.value_head_dim or self.head_dim)

    @property
    def latent_dim(self) -> int:
        """Width of what latent attention compresses for a token; 0 without it."""
        return (self.latent.query_rank or 0) + self.latent.kv_rank + self.latent.rope_dim if self.latent else 0

    @property
    def active_ffn(self) -> int:
        """Inner width of the feed-forwards that compute a token."""
        if self.experts is None:
            return self.ffn
        return self.experts.active * self.experts.ffn + self.experts.shared_ffn

    @property
    def inner_per_ffn(self) -> int:
        """Elements of the first output of a feed-forward for each of its inner width: gate and up, or up alone."""
        return 2 if self.feed_forward is FeedForward.SWIGLU else 1

    @property
    def attention_matrices(self) -> tuple[int, ...]:
        """Elements of each matrix of attention; without compression those of query, key, value and output."""
        output = self.output_dim * self.hidden
        if self.latent is None:
            return (self.hidden * self.query_dim, self.hidden * self.key_dim, self.hidden * self.value_dim, output)
        rank, kv_rank, rope_dim = self.latent.query_rank, self.latent.kv_rank, self.latent.rope_dim
        query = (self.hidden * self.query_dim,) if rank is None else (self.hidden * rank, rank * self.query_dim)
        expanded = self.heads * (self.head_dim - rope_dim) + self.value_dim
        return (*query, self.hidden * (kv_rank + rope_dim), kv_rank * expanded, output)

    @property
    def active_matrices(self) -> int:
        """Elements of the matrices that a token is multiplied with."""
        router = self.hidden * self.experts.count if self.experts else 0
        return sum(self.attention_matrices) + (self.inner_per_ffn + 1) * self.hidden * self.active_ffn + router

    @property
    def largest_matrix(self) -> int:
        """Elements of the largest parameter: a matrix, or the gates and ups of all experts, which are one parameter."""
        inner = self.inner_per_ffn * self.experts.count * self.experts.ffn if self.experts else self.ffn
        return max(*self.attention_matrices, self.hidden * inner)

    @property
    def params(self) -> int:
        """Parameters of the block."""
        unused = (self.experts.count - self.experts.active) * self.experts.ffn if self.experts else 0
        matrices = self.active_matrices + (self.inner_per_ffn + 1) * self.hidden * unused
        return matrices + self._biases + self._gains + (self.heads if self.sinks else 0)

    @property
    def active_params(self) -> int:
        """Parameters of the block that take part in the computation of a token."""
        if self.experts is None:
            return self.params
        unused = (self.experts.count - self.experts.active) * self._of_feed_forward(self.experts.ffn)
        return self.params - unused

    @property
    def norm_params(self) -> int:
        """Parameters of a norm of the residual stream."""
        return self.hidden * (2 if self.norm is Norm.LAYER else 1)

    def _of_feed_forward(self, ffn: int) -> int:
        """Return the parameters of one feed-forward of this inner width."""
        bias = self.inner_per_ffn * ffn + self.hidden if self.bias is Bias.ALL else 0
        return (self.inner_per_ffn + 1) * self.hidden * ffn + bias

    @property
    def _biases(self) -> int:
        if self.bias is Bias.NONE:
            return 0
        biases = self.query_dim + self.key_dim + self.value_dim
        if self.bias is not Bias.QKV:
            biases += self.hidden
        if self.bias is not Bias.ALL:
            return biases
        if self.experts is None:
            return biases + self.inner_per_ffn * self.ffn + self.hidden
        router, ffn = self.experts.count, self.experts.ffn
        return biases + router + self.experts.count * (self.inner_per_ffn * ffn + self.hidden)

    @property
    def _gains(self) -> int:
        heads = {
            HeadNorm.NONE: 0,
            HeadNorm.EACH: 2 * self.head_dim,
            HeadNorm.WHOLE: self.query_dim + self.key_dim,
        }[self.head_norm]
        latent = (self.latent.query_rank or 0) + self.latent.kv_rank if self.latent else 0
        return self.norms.count * self.norm_params + heads + latent


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The shape of a model: embedding, transformer blocks, and final norm with output projection.

    These are its `len(blocks) + 2` layers, the units of partition.

    Attributes:
        name: name of the model.
        blocks: the blocks (L), all of one width.
        vocab: rows of the embedding, padding included.
        seq_len: tokens in a training sequence (s).
        tied_embeddings: the output projection is the embedding. Its layer then holds a copy.
        positions: rows of an embedding of positions; 0 if there is none.
        head_bias: the output projection has a bias.

    Raises:
        ConfigError: a count below one, no blocks, or blocks of several widths.
    """

    name: str
    blocks: tuple[BlockShape, ...]
    vocab: int
    seq_len: int
    tied_embeddings: bool = False
    positions: int = 0
    head_bias: bool = False

    def __post_init__(self) -> None:
        for field in ("vocab", "seq_len"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field} of model {self.name!r} must be at least 1; got {getattr(self, field)}")
        if len({block.hidden for block in self.blocks}) != 1:
            raise ConfigError(f"model {self.name!r} needs blocks, all of one width")
        if 0 < self.positions < self.seq_len:
            raise ConfigError(
                f"model {self.name!r} has embeddings of {self.positions} positions, too few for sequences of "
                f"{self.seq_len} tokens"
            )

    @property
    def hidden(self) -> int:
        """Width of the residual stream (h)."""
        return self.blocks[0].hidden

    @property
    def embedding_params(self) -> int:
        """Parameters of the first layer."""
        return (self.vocab + self.positions) * self.hidden

    @property
    def head_params(self) -> int:
        """Parameters that the last layer holds: final norm and output projection, the latter a copy if it is tied."""
        return self.blocks[0].norm_params + self.vocab * (self.hidden + (1 if self.head_bias else 0))

    @property
    def layer_params(self) -> tuple[int, ...]:
        """Parameters that each layer holds."""
        return (self.embedding_params, *(block.params for block in self.blocks), self.head_params)

    @property
    def num_params(self) -> int:
        """Parameters of the model, a tied embedding counted once."""
        return sum(self.layer_params) - (self.vocab * self.hidden if self.tied_embeddings else 0)

    @property
    def active_params(self) -> int:
        """Parameters that take part in the computation of a token, the whole embedding among them."""
        return self.num_params - sum(block.params - block.active_params for block in self.blocks)
