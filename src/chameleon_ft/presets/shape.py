"""The shape of a decoder-only transformer, and how many parameters it has."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from chameleon_ft.errors import ConfigError


class FeedForward(StrEnum):
    """The feed-forward half of a block: down(silu(gate(x)) * up(x)) with three matrices, or down(gelu(up(x)))."""

    SWIGLU = "swiglu"
    GELU = "gelu"


class Norm(StrEnum):
    """Root-mean-square norm with a gain, or layer norm with a gain and a bias."""

    RMS = "rms"
    LAYER = "layer"


class Bias(StrEnum):
    """Which matrices of a block have a bias: none, those of query, key and value (Qwen2), or all (GPT)."""

    NONE = "none"
    QKV = "qkv"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The shape of a model: embedding, `blocks` transformer blocks, and final norm with output projection.

    These are its `blocks + 2` layers, the units of partition.

    Attributes:
        name: name of the model.
        hidden: width of the residual stream (h).
        blocks: transformer blocks (L).
        heads: query heads (a).
        kv_heads: key and value heads; fewer than `heads` is grouped-query attention (Ainslie et al. 2023).
        head_dim: width of a head; `hidden / heads` in nearly all models.
        ffn: inner width of the feed-forward.
        vocab: rows of the embedding, padding included.
        seq_len: tokens in a training sequence (s).
        tied_embeddings: whether the output projection is the embedding. Its layer then holds a copy.
        feed_forward, norm, bias: variants of the block.
        dropout: whether dropout follows attention's softmax and both halves of a block, so that masks are kept.
        learned_positions: whether positions have embeddings of their own; with rotary positions they have none.

    Raises:
        ConfigError: a count below one, or heads that are not a multiple of the key and value heads.
    """

    name: str
    hidden: int
    blocks: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    seq_len: int
    tied_embeddings: bool = False
    feed_forward: FeedForward = FeedForward.SWIGLU
    norm: Norm = Norm.RMS
    bias: Bias = Bias.NONE
    dropout: bool = False
    learned_positions: bool = False

    def __post_init__(self) -> None:
        for field in ("hidden", "blocks", "heads", "kv_heads", "head_dim", "ffn", "vocab", "seq_len"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field} of model {self.name!r} must be at least 1; got {getattr(self, field)}")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"model {self.name!r} has {self.heads} heads, which {self.kv_heads} key and value heads cannot share "
                "equally; kv_heads must divide heads"
            )

    @property
    def query_dim(self) -> int:
        """Width of all query heads together, and of the output of attention."""
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def block_matrices(self) -> tuple[int, ...]:
        """Elements of each matrix of a block: query, key, value, output; then those of the feed-forward."""
        ffn_matrices = 3 if self.feed_forward is FeedForward.SWIGLU else 2
        attention = (self.hidden * self.query_dim, self.hidden * self.kv_dim, self.hidden * self.kv_dim)
        return (*attention, self.query_dim * self.hidden, *(self.hidden * self.ffn for _ in range(ffn_matrices)))

    @property
    def block_params(self) -> int:
        """Parameters of one block: its matrices, their biases and two norms."""
        qkv_biases = self.query_dim + 2 * self.kv_dim
        biases = {Bias.NONE: 0, Bias.QKV: qkv_biases, Bias.ALL: qkv_biases + 2 * self.hidden + self.inner_width}
        return sum(self.block_matrices) + biases[self.bias] + 2 * self._norm_params

    @property
    def inner_width(self) -> int:
        """Width of the first output of the feed-forward: gate and up, or up alone."""
        return self.ffn * (2 if self.feed_forward is FeedForward.SWIGLU else 1)

    @property
    def embedding_params(self) -> int:
        """Parameters of the first layer."""
        return (self.vocab + (self.seq_len if self.learned_positions else 0)) * self.hidden

    @property
    def head_params(self) -> int:
        """Parameters that the last layer holds: final norm and output projection, the latter a copy if it is tied."""
        return self._norm_params + self.vocab * self.hidden

    @property
    def layer_params(self) -> tuple[int, ...]:
        """Parameters that each of the `blocks + 2` layers holds."""
        return (self.embedding_params, *(self.block_params for _ in range(self.blocks)), self.head_params)

    @property
    def num_params(self) -> int:
        """Parameters of the model, a tied embedding counted once."""
        return sum(self.layer_params) - (self.vocab * self.hidden if self.tied_embeddings else 0)

    @property
    def _norm_params(self) -> int:
        return self.hidden * (2 if self.norm is Norm.LAYER else 1)
