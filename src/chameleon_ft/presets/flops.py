"""Floating-point operations and memory traffic of a transformer's layers, for one token; a multiply-add is two.

A matrix with n elements takes 2 n operations a token forward, 2 n for the gradient of its input and 2 n for its own, in
all the 6 N of Kaplan et al. ("Scaling Laws for Neural Language Models", 2020, section 2.1). Attention over s positions
takes 4 s a d_h forward and twice that backward, in all 12 L a d_h s for L blocks (Chowdhery et al., "PaLM", 2022,
appendix B). A causal mask hides half of that, which flash attention does not compute; but its backward computes the
scores again, and takes 2.5 times the forward (Dao, "FlashAttention-2", 2023, section 4.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from chameleon_ft.presets.execution import Attention, Execution, Recompute
from chameleon_ft.presets.shape import FeedForward, ModelShape

__all__ = ["TokenWork", "layer_work", "model_flops_per_token"]

_FLOAT32_BYTES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWork:
    """What one token costs in a layer, over all ranks of a worker.

    Attributes:
        forward_flops, input_grad_flops, weight_grad_flops: operations of matrix products.
        forward_traffic, input_grad_traffic, weight_grad_traffic: bytes that element-wise operations read and write.
        selective_flops, selective_traffic: those of what runs again if a plan recomputes the layer selectively.
    """

    forward_flops: float = 0.0
    input_grad_flops: float = 0.0
    weight_grad_flops: float = 0.0
    forward_traffic: float = 0.0
    input_grad_traffic: float = 0.0
    weight_grad_traffic: float = 0.0
    selective_flops: float = 0.0
    selective_traffic: float = 0.0


def layer_work(shape: ModelShape, execution: Execution, element_bytes: int) -> tuple[TokenWork, ...]:
    """What one token costs in each of the layers of `shape`, its elements having `element_bytes` bytes.

    The embedding multiplies nothing. Norms, rotary positions, activation function and residual sums read their inputs
    and write their outputs once, and move twice the bytes backward. The loss reads logits and makes a copy of them and
    their log-softmax in float32. With selective recomputation the scores are in I a second time; whole blocks that are
    computed again are not, see `derive_workload`.
    """
    embedding = TokenWork(
        forward_traffic=2.0 * shape.hidden * element_bytes, weight_grad_traffic=3.0 * shape.hidden * element_bytes
    )
    block = _block(shape, execution, element_bytes)
    output = 2.0 * shape.vocab * shape.hidden
    norm_traffic = 2.0 * shape.hidden * element_bytes
    head = TokenWork(
        forward_flops=output,
        input_grad_flops=output,
        weight_grad_flops=output,
        forward_traffic=norm_traffic + shape.vocab * (element_bytes + 3 * _FLOAT32_BYTES),
        input_grad_traffic=2 * norm_traffic + shape.vocab * (element_bytes + 3 * _FLOAT32_BYTES),
    )
    return (embedding, *(block for _ in range(shape.blocks)), head)


def model_flops_per_token(shape: ModelShape) -> float:
    """Operations that training on one token takes: 6 N + 12 L a d_h s, as PaLM's appendix B counts them.

    N leaves out what is only looked up, the embedding; a tied one is in it as output projection. The mask is not
    taken off, and what is computed twice to save memory is not added: the measure of model FLOPs utilisation.
    """
    looked_up = shape.embedding_params - (shape.vocab * shape.hidden if shape.tied_embeddings else 0)
    return 6.0 * (shape.num_params - looked_up) + 12.0 * shape.blocks * shape.query_dim * shape.seq_len


def _block(shape: ModelShape, execution: Execution, element_bytes: int) -> TokenWork:
    matrices = 2.0 * sum(shape.block_matrices)
    scores = 4.0 * shape.query_dim * shape.seq_len
    if execution.attention is Attention.FLASH:
        scores /= 2
        scores_backward = 2.5 * scores
    else:
        scores_backward = 2.0 * scores
    fast = _recomputable(shape)
    traffic = (fast + _other_elementwise(shape)) * element_bytes
    core_again = scores if execution.attention is Attention.EAGER else 0.0
    always = execution.recompute is Recompute.SELECTIVE
    return TokenWork(
        forward_flops=matrices + scores,
        input_grad_flops=matrices + scores_backward + (core_again if always else 0.0),
        weight_grad_flops=matrices,
        forward_traffic=traffic,
        input_grad_traffic=2 * traffic,
        selective_flops=0.0 if always else core_again,
        selective_traffic=fast * element_bytes,
    )


def _recomputable(shape: ModelShape) -> float:
    """Elements that norms and activation function, with the product with up, read and write for one token."""
    activation = (3 if shape.feed_forward is FeedForward.SWIGLU else 2) * shape.ffn
    return float(2 * 2 * shape.hidden + activation)


def _other_elementwise(shape: ModelShape) -> float:
    """Elements that residual sums and rotary positions read and write for one token."""
    rotation = 0 if shape.learned_positions else 2 * (shape.query_dim + shape.kv_dim)
    return float(2 * 3 * shape.hidden + rotation)
