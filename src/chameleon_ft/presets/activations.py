"""Bytes that a transformer's layers keep between operations, by the count of Korthikanti et al.

"Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198) counts what a block of a GPT keeps
from forward to backward for s tokens, b sequences, width h and a heads, with two bytes for an element and one for an
element of a dropout mask: s b h (34 + 5 a s / h) (its equation 1); s b h (10 + 24/t + 5 a s / (h t)) with t
tensor-parallel ranks (2); all of it divided by t with sequence parallelism (4); 34 s b h / t with selective
recomputation (6); 2 s b h with full recomputation. Here the same count is made tensor by tensor, so that it also holds
for other blocks:

- grouped-query attention keeps narrower keys and values;
- SwiGLU keeps gate, up, silu(gate) and the product, 4 f elements, where GELU keeps input and output;
- flash attention keeps one float32 for each row of the scores instead of the scores;
- without dropout there are no masks, and the softmax's output is kept once.

A block that a plan recomputes selectively drops what its fast operations make: outputs of both norms, what the
activation function and the product with up put out, and the core of attention unless it is flash attention. It keeps
the rest: inputs of norms, masks, query, key, value, gate and up, and the input of the output projection. The paper
drops the core of attention alone, and sets norms and activation function aside as small beside that.

What I leaves for W is, for each matrix, its input and the gradient of its output: 32 s b h for a GPT, as in Qi et al.,
"Zero Bubble Pipeline Parallelism" (2023), table 1. Left out as small: statistics of norms (4 bytes for each token and
norm).
"""

from __future__ import annotations

from typing import Final

from chameleon_ft.presets.execution import Attention, Execution, Recompute
from chameleon_ft.presets.shape import FeedForward, ModelShape

__all__ = [
    "block_activation_bytes",
    "block_selective_bytes",
    "block_weight_grad_bytes",
    "block_working_bytes",
    "head_activation_bytes",
    "head_weight_grad_bytes",
    "head_working_bytes",
]

_FLOAT32_BYTES: Final = 4
_MASK_BYTES: Final = 1


def block_activation_bytes(shape: ModelShape, execution: Execution, element_bytes: int) -> int:
    """Bytes for one token that a block keeps on a rank from its forward until its backward, if it keeps all it needs.

    Of a block that is computed again, only the input is kept: what crosses to it.
    """
    masks = 2 * shape.hidden * _MASK_BYTES if shape.dropout else 0
    # Inputs of both norms, of query, key and value, and of the feed-forward.
    whole = 4 * shape.hidden * element_bytes + masks
    # Query and key, value, and the input of the output projection.
    attention = (2 * shape.query_dim + 2 * shape.kv_dim) * element_bytes
    feed_forward = (shape.ffn + _inner_width(shape) + _gate_width(shape)) * element_bytes
    split = attention + feed_forward + _core(shape, execution, element_bytes)
    return _divided(whole, execution.shared) + _divided(split, execution.tp)


def block_selective_bytes(shape: ModelShape, execution: Execution, element_bytes: int) -> int:
    """Bytes for one token that a block keeps on a rank if it is recomputed selectively, see the text of the module."""
    masks = 2 * shape.hidden * _MASK_BYTES if shape.dropout else 0
    whole = 2 * shape.hidden * element_bytes + masks
    split = (2 * shape.query_dim + 2 * shape.kv_dim + _inner_width(shape)) * element_bytes
    core = _core(shape, execution, element_bytes) if execution.attention is Attention.FLASH else 0
    return _divided(whole, execution.shared) + _divided(split + core, execution.tp)


def block_weight_grad_bytes(shape: ModelShape, execution: Execution, element_bytes: int) -> int:
    """Bytes for one token that a block keeps on a rank from I until W."""
    inner = _inner_width(shape)
    whole = 4 * shape.hidden  # inputs of both halves, gradients of the outputs of both
    split = 2 * shape.query_dim + 2 * shape.kv_dim + shape.ffn + inner
    return _divided(whole * element_bytes, execution.shared) + _divided(split * element_bytes, execution.tp)


def block_working_bytes(shape: ModelShape, execution: Execution, *, tokens: int, element_bytes: int) -> int:
    """Bytes that a block needs only while its backward runs on a rank, at the most.

    Gradients inside the feed-forward (of its output and twice its inner width), and the gradient of the largest matrix
    before it is added up.
    """
    gradients = _divided((shape.hidden + 2 * shape.ffn) * element_bytes, execution.tp) * tokens
    matrix = _divided(max(shape.block_matrices) * element_bytes, execution.tp)
    return gradients + matrix


def head_activation_bytes(shape: ModelShape, execution: Execution, element_bytes: int) -> int:
    """Bytes for one token that the last layer keeps: inputs of norm and projection, and logits in float32.

    In the paper's setting 4 s b h (1 + v/h), its section 4.3.
    """
    inputs = _divided(2 * shape.hidden * element_bytes, execution.shared)
    return inputs + _divided(shape.vocab * _FLOAT32_BYTES, execution.tp)


def head_weight_grad_bytes(shape: ModelShape, execution: Execution, element_bytes: int) -> int:
    """Bytes for one token that the last layer keeps from I until W: input of the projection, gradient of the logits."""
    return _divided(shape.hidden * element_bytes, execution.shared) + _divided(
        shape.vocab * element_bytes, execution.tp
    )


def head_working_bytes(shape: ModelShape, execution: Execution, *, tokens: int, element_bytes: int) -> int:
    """Bytes that the last layer needs only while an operation runs.

    A second copy of the logits in float32, one in the type of the elements if that is another, and the gradient of the
    projection before it is added up.
    """
    copies = _FLOAT32_BYTES + (element_bytes if element_bytes < _FLOAT32_BYTES else 0)
    logits = _divided(shape.vocab * copies, execution.tp) * tokens
    return logits + _divided(shape.vocab * shape.hidden * element_bytes, execution.tp)


def _core(shape: ModelShape, execution: Execution, element_bytes: int) -> int:
    """Bytes for one token of attention's core: scores after softmax, and after dropout with its mask."""
    if execution.attention is Attention.FLASH:
        return shape.heads * _FLOAT32_BYTES
    if execution.recompute is Recompute.SELECTIVE:
        return 0
    copies = 2 * element_bytes + _MASK_BYTES if shape.dropout else element_bytes
    return shape.heads * shape.seq_len * copies


def _inner_width(shape: ModelShape) -> int:
    """Width of what the first matrices of the feed-forward put out: gate and up, or up alone."""
    return shape.ffn * (2 if shape.feed_forward is FeedForward.SWIGLU else 1)


def _gate_width(shape: ModelShape) -> int:
    """Width of silu(gate), which the product with up keeps."""
    return shape.ffn if shape.feed_forward is FeedForward.SWIGLU else 0


def _divided(amount: int, by: int) -> int:
    """`amount` shared by so many, rounded up."""
    return -(-amount // by)
