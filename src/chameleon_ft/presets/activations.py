"""Bytes that a transformer's layers keep between operations, by the count of Korthikanti et al.

"Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198) counts the bytes that a block of a
GPT keeps from forward to backward for s tokens, b sequences, width h and a heads, with two bytes for an element and one
for an element of a dropout mask: s b h (34 + 5 a s / h) (its equation 1); s b h (10 + 24/t + 5 a s / (h t)) with t
tensor-parallel ranks (2); all of it divided by t with sequence parallelism (4); 34 s b h / t with selective
recomputation (6); 2 s b h with full recomputation. Here the count is made tensor by tensor, so that it also holds for
other blocks:

- grouped-query attention keeps narrower keys and values;
- SwiGLU keeps gate, up, silu(gate) and the product, 4 f elements, where GELU keeps input and output;
- flash attention keeps one float32 for each row of the scores instead of the scores;
- without dropout there are no masks, and the output of the softmax is kept once.

A block that a plan recomputes selectively drops the outputs of its fast operations: of both norms, of the activation
function and the product with up, and the core of attention unless it is flash attention. It keeps the rest: inputs of
norms, masks, query, key, value, gate and up, and the input of the output projection. The paper drops the core of
attention alone, and neglects norms and activation function beside that.

I leaves for W, for each matrix, its input and the gradient of its output: 32 s b h for a GPT, as in Qi et al., "Zero
Bubble Pipeline Parallelism" (2023), table 1. Neglected: statistics of norms (4 bytes for each token and norm).
"""

from __future__ import annotations

from typing import Final

from chameleon_ft.presets.execution import Attention, Execution, Recompute
from chameleon_ft.presets.shape import FeedForward, ModelShape

_FLOAT32_BYTES: Final = 4
_MASK_BYTES: Final = 1
_TOKEN_ID_BYTES: Final = 8


def embedding_bytes(shape: ModelShape, execution: Execution, *, tokens: int, element_bytes: int) -> dict[str, int]:
    """Return byte fields of the `LayerCost` of the first layer on one rank.

    It keeps the ids for its gradient, which the backward turns into one row for each token.
    """
    row_bytes = _per_rank(shape.hidden * element_bytes, execution.shared)
    return {
        "activation_bytes": tokens * _TOKEN_ID_BYTES,
        "weight_grad_bytes": tokens * (_TOKEN_ID_BYTES + row_bytes),
    }


def block_bytes(shape: ModelShape, execution: Execution, *, tokens: int, element_bytes: int) -> dict[str, int]:
    """Return byte fields of the `LayerCost` of a block on one rank, if it keeps all that its backward needs.

    The working bytes are the gradients inside the feed-forward (of its output and twice its inner width), and the
    gradient of the largest matrix before it is added up.
    """
    hidden, ffn, tp = shape.hidden, shape.ffn, execution.tp
    flash = execution.attention is Attention.FLASH
    masks = 2 * hidden * _MASK_BYTES if shape.dropout else 0
    # Elements of query, key, value and the input of the output projection; of gate and up, or up alone; of silu(gate).
    attention = 2 * shape.query_dim + 2 * shape.kv_dim
    inner, gate = shape.inner_width, ffn if shape.feed_forward is FeedForward.SWIGLU else 0
    # The core of attention: scores after softmax, and after dropout with its mask.
    if flash:
        core = shape.heads * _FLOAT32_BYTES
    elif execution.recompute is Recompute.SELECTIVE:
        core = 0
    else:
        copies = 2 * element_bytes + _MASK_BYTES if shape.dropout else element_bytes
        core = shape.heads * shape.seq_len * copies

    def kept(whole_bytes: int, split_bytes: int) -> int:
        """Bytes of all tokens, of tensors that tensor parallelism leaves whole and of those that it splits."""
        return tokens * (_per_rank(whole_bytes, execution.shared) + _per_rank(split_bytes, tp))

    gradients = _per_rank((hidden + 2 * ffn) * element_bytes, tp) * tokens
    return {
        # Whole are the inputs of both norms, of query, key and value, and of the feed-forward.
        "activation_bytes": kept(
            4 * hidden * element_bytes + masks, (attention + ffn + inner + gate) * element_bytes + core
        ),
        "selective_bytes": kept(
            2 * hidden * element_bytes + masks, (attention + inner) * element_bytes + (core if flash else 0)
        ),
        # Whole are the inputs of both halves, and the gradients of their outputs.
        "weight_grad_bytes": kept(4 * hidden * element_bytes, (attention + ffn + inner) * element_bytes),
        "working_bytes": gradients + _per_rank(max(shape.block_matrices) * element_bytes, tp),
    }


def head_bytes(shape: ModelShape, execution: Execution, *, tokens: int, element_bytes: int) -> dict[str, int]:
    """Return byte fields of the `LayerCost` of the last layer on one rank: 4 s b h (1 + v/h) in the paper, section 4.3.

    It keeps the inputs of norm and projection and the logits in float32; for W the input of the projection and the
    gradient of the logits. The working bytes are a second copy of the logits in float32, one in the element type if
    that is another, and the gradient of the projection before it is added up.
    """
    hidden_bytes, vocab, tp = shape.hidden * element_bytes, shape.vocab, execution.tp
    logit_bytes = _FLOAT32_BYTES + (element_bytes if element_bytes < _FLOAT32_BYTES else 0)
    kept = _per_rank(2 * hidden_bytes, execution.shared) + _per_rank(vocab * _FLOAT32_BYTES, tp)
    kept_for_w = _per_rank(hidden_bytes, execution.shared) + _per_rank(vocab * element_bytes, tp)
    return {
        "activation_bytes": tokens * kept,
        "weight_grad_bytes": tokens * kept_for_w,
        "working_bytes": _per_rank(vocab * logit_bytes, tp) * tokens + _per_rank(vocab * hidden_bytes, tp),
    }


def _per_rank(num_bytes: int, ranks: int) -> int:
    """Return the bytes of one of so many ranks, rounded up."""
    return -(-num_bytes // ranks)
