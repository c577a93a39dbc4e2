"""Workloads from the shape of a model and the rates of a device, without running anything.

Floating-point operations count a multiply-add as two. A matrix with n elements takes 2 n operations a token forward,
2 n for the gradient of its input and 2 n for its own, in all the 6 N of Kaplan et al. ("Scaling Laws for Neural
Language Models", 2020, section 2.1). Attention over s positions takes 4 s a d_h forward and twice that backward, in all
12 L a d_h s for L blocks (Chowdhery et al., "PaLM", 2022, appendix B). A causal mask hides half of that, which flash
attention does not compute; but its backward computes the scores again, and takes 2.5 times the forward (Dao,
"FlashAttention-2", 2023, section 4.1).

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), count the bytes
that a block of a GPT keeps from forward to backward for s tokens, b sequences, width h and a heads, with two bytes for
an element and one for an element of a dropout mask: s b h (34 + 5 a s / h) (its equation 1); s b h (10 + 24/t + 5 a s /
(h t)) with t tensor-parallel ranks (2); all of it divided by t with sequence parallelism (4); 34 s b h / t with
selective recomputation (6); 2 s b h with full recomputation. Here the count is made tensor by tensor, so that it also
holds for other blocks:

- grouped-query attention keeps narrower keys and values;
- SwiGLU keeps gate, up, silu(gate) and the product, 4 f elements, where GELU keeps input and output;
- flash attention keeps one float32 for each row of the scores instead of the scores;
- without dropout there are no masks, and the output of the softmax is kept once;
- with experts a token's input is copied for each that computes it, and what each returns is kept for the router's
  gradient. The gradient of the fused parameter of all experts is one tensor;
- latent attention keeps the compressed queries, keys and values before and after their norms, and expanded ones.

A block that a plan recomputes selectively drops the outputs of its fast operations: of both norms, of the activation
function and the product with up, and the core of attention unless it is flash attention. It keeps the rest: inputs of
norms, masks, query, key, value, gate and up, and the input of the output projection. The paper drops the core of
attention alone, and neglects norms and activation function beside that.

I leaves for W, for each matrix, its input and the gradient of its output: 32 s b h for a GPT, as in Qi et al., "Zero
Bubble Pipeline Parallelism" (2023), table 1. Neglected: statistics of norms (4 bytes for each token and norm).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from chameleon_ft.cost.presets import STATE_POLICIES, Attention, Device, Execution, Recompute, StatePolicy
from chameleon_ft.cost.shapes import BlockShape, FeedForward, HeadNorm, ModelShape
from chameleon_ft.errors import ConfigError
from chameleon_ft.workload import LayerCost, TiedParameters, Workload

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


def block_bytes(
    block: BlockShape, execution: Execution, *, seq_len: int, tokens: int, element_bytes: int
) -> dict[str, int]:
    """Return byte fields of the `LayerCost` of a block on one rank, if it keeps all that its backward needs.

    The working bytes are the gradients inside the feed-forward (of its output and twice its inner width), and the
    gradient of the largest parameter before it is added up.
    """
    hidden, ffn, tp = block.hidden, block.active_ffn, execution.tp
    flash = execution.attention is Attention.FLASH
    masks = 2 * hidden * _MASK_BYTES if block.dropout else 0
    # Elements of query, key, value and the input of the output projection; of gate and up, or up alone; of silu(gate).
    attention = block.query_dim + block.key_dim + block.value_dim + block.output_dim
    inner, gate = block.inner_per_ffn * ffn, ffn if block.feed_forward is FeedForward.SWIGLU else 0
    # Inputs of norms of queries and keys, or of the latents before their norms: by matrices they are needed as well.
    normed = 0 if block.head_norm is HeadNorm.NONE else block.query_dim + block.key_dim
    # Latents, and each token's copies for its experts and what those return, are whole on every rank.
    copies = block.experts.active * hidden if block.experts else 0
    whole = block.norms.kept * hidden + 2 * block.latent_dim + 2 * copies
    whole_selectively = block.norms.kept_selectively * hidden + block.latent_dim + 2 * copies
    whole_for_w = 4 * hidden + 2 * block.latent_dim + 2 * copies
    # Scores and probabilities of the router.
    router = 2 * block.experts.count * _FLOAT32_BYTES if block.experts else 0
    # The core of attention: scores after softmax, and after dropout with its mask.
    if flash:
        core = block.heads * _FLOAT32_BYTES
    elif execution.recompute is Recompute.SELECTIVE:
        core = 0
    else:
        score_bytes = 2 * element_bytes + _MASK_BYTES if block.dropout else element_bytes
        core = block.heads * seq_len * score_bytes

    def kept(whole_bytes: int, split_bytes: int) -> int:
        """Bytes of all tokens, of tensors that tensor parallelism leaves whole and of those that it splits."""
        return tokens * (_per_rank(whole_bytes, execution.shared) + _per_rank(split_bytes, tp))

    gradients = _per_rank((hidden + 2 * ffn) * element_bytes, tp) * tokens
    return {
        # Whole are the inputs of norms, of query, key and value, and of the feed-forward.
        "activation_bytes": kept(
            whole * element_bytes + masks + router, (attention + normed + ffn + inner + gate) * element_bytes + core
        ),
        "selective_bytes": kept(
            whole_selectively * element_bytes + masks + router,
            (attention + inner) * element_bytes + (core if flash else 0),
        ),
        # Whole are the inputs of both halves, and the gradients of their outputs.
        "weight_grad_bytes": kept(whole_for_w * element_bytes, (attention + ffn + inner) * element_bytes),
        "working_bytes": gradients + _per_rank(block.largest_matrix * element_bytes, tp),
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


# All-reduces (or all-gather and reduce-scatter, which move as much) of a block's forward, and again of its backward.
_TP_REDUCTIONS: Final = 2


def derive_workload(
    shape: ModelShape,
    device: Device,
    *,
    micro_batch_size: int,
    micro_batches: int,
    execution: Execution = Execution(),
    state: StatePolicy = STATE_POLICIES["bf16-master"],
) -> Workload:
    """Return the workload of training `shape` on workers of `execution.tp` devices.

    Seconds: matrix products at the device's achievable rate, element-wise operations at its achievable bandwidth (among
    them the addition of a micro-batch's gradients to those before), and with tensor parallelism two all-reduces of the
    block's output inside the host, in the forward and again in I. Nothing overlaps. Bytes are those of one rank; see
    `chameleon_ft.cost.derive` for their sources. Full recomputation is that of a plan whose workers all
    recompute, of the workload without it.

    Raises:
        ConfigError: the device has no rate for the type of the parameters, `tp` does not divide the model, or a count
            is below one.
    """
    if micro_batch_size < 1:
        raise ConfigError(f"micro_batch_size must be at least 1; got {micro_batch_size}")
    execution.check(shape)
    tp, tokens, element_bytes = execution.tp, micro_batch_size * shape.seq_len, state.parameters.num_bytes
    flops_per_s, bytes_per_s = device.flops_per_s(state.parameters) * tp, device.bytes_per_s * tp
    # A rank sends its part of the block's output to its counterpart in the next stage.
    boundary_bytes = tokens * -(-shape.hidden * element_bytes // execution.shared)
    reductions_s = _TP_REDUCTIONS * device.intra_host.ring_all_reduce_s(tokens * shape.hidden * element_bytes, tp)

    def seconds(flops: float, traffic_bytes: float) -> float:
        return tokens * (flops / flops_per_s + traffic_bytes / bytes_per_s)

    def cost(name: str, work: TokenWork, params: int, reductions_s: float = 0.0, **num_bytes: Any) -> LayerCost:
        own_params = -(-params // tp)
        # Gradients of a micro-batch are read and added to the sum of those before.
        added_bytes = own_params * tp * (element_bytes + 2 * state.gradients.num_bytes)
        return LayerCost(
            name=name,
            forward_s=seconds(work.forward_flops, work.forward_traffic) + reductions_s,
            input_grad_s=seconds(work.input_grad_flops, work.input_grad_traffic) + reductions_s,
            weight_grad_s=seconds(work.weight_grad_flops, work.weight_grad_traffic) + added_bytes / bytes_per_s,
            selective_s=seconds(work.selective_flops, work.selective_traffic),
            param_bytes=own_params * element_bytes,
            unmoved_bytes=own_params * element_bytes if state.are_rounded else 0,
            gradient_bytes=own_params * state.gradients.num_bytes,
            optimizer_bytes=own_params * state.optimizer_bytes,
            master_bytes=own_params * state.master_bytes,
            **num_bytes,
        )

    embedding, *blocks, head = layer_work(shape, execution, element_bytes)
    sizes: Any = {"tokens": tokens, "element_bytes": element_bytes}
    kept, in_head = (each(shape, execution, **sizes) for each in (embedding_bytes, head_bytes))
    layers = (
        cost("embedding", embedding, shape.embedding_params, output_bytes=boundary_bytes, **kept),
        *(
            cost(
                f"block {number}",
                work,
                block.params,
                reductions_s,
                output_bytes=boundary_bytes,
                **block_bytes(block, execution, seq_len=shape.seq_len, **sizes),
            )
            for number, (block, work) in enumerate(zip(shape.blocks, blocks, strict=True), start=1)
        ),
        cost("head", head, shape.head_params, **in_head),
    )
    tied: tuple[TiedParameters, ...] = ()
    if shape.tied_embeddings:
        tied_params = -(-shape.vocab * shape.hidden // tp)
        tied = (TiedParameters((0, len(shape.blocks) + 1), tied_params * state.gradients.num_bytes),)
    workload = Workload(layers, micro_batches, micro_batch_size, tied=tied)
    return workload.recomputed() if execution.recompute is Recompute.FULL else workload


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWork:
    """Work for one token in a layer, over all ranks of a worker.

    Attributes:
        forward_flops, input_grad_flops, weight_grad_flops: operations of matrix products.
        forward_traffic, input_grad_traffic, weight_grad_traffic: bytes that element-wise operations read and write.
        selective_flops, selective_traffic: work that is repeated if a plan recomputes the layer selectively.
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
    """Return the work for one token in each of the layers of `shape`, with `element_bytes` bytes for an element.

    The embedding multiplies nothing. Norms, rotary positions, activation function and residual sums read their inputs
    and write their outputs once, and move twice the bytes backward. The loss reads logits and makes a copy of them and
    their log-softmax in float32. With selective recomputation I computes the scores again; whole blocks that are
    recomputed are not counted here, see `derive_workload`.
    """
    row_bytes = shape.hidden * element_bytes
    embedding = TokenWork(forward_traffic=2.0 * row_bytes, weight_grad_traffic=3.0 * row_bytes)
    projection = 2.0 * shape.vocab * shape.hidden
    loss_traffic = shape.vocab * (element_bytes + 3 * _FLOAT32_BYTES)
    head = TokenWork(
        forward_flops=projection,
        input_grad_flops=projection,
        weight_grad_flops=projection,
        forward_traffic=2.0 * row_bytes + loss_traffic,
        input_grad_traffic=2 * 2.0 * row_bytes + loss_traffic,
    )
    blocks = (_block_work(block, execution, shape.seq_len, element_bytes) for block in shape.blocks)
    return (embedding, *blocks, head)


def _block_work(block: BlockShape, execution: Execution, seq_len: int, element_bytes: int) -> TokenWork:
    flash = execution.attention is Attention.FLASH
    matrices = 2.0 * block.active_matrices
    scores = 2.0 * (block.query_dim + block.output_dim) * (_seen(seq_len, block.window) if flash else seq_len)
    repeated_scores = 0.0 if flash else scores
    always = execution.recompute is Recompute.SELECTIVE
    # Elements that fast operations read and write: norms, and the activation function with the product with up; then
    # residual sums, rotary positions, copies for experts and their sum, and norms of queries, keys and latents.
    activation = 3 if block.feed_forward is FeedForward.SWIGLU else 2
    recomputable = 2 * block.norms.count * block.hidden + activation * block.active_ffn
    rotation = 2 * (block.query_dim + block.key_dim) if block.rotary else 0
    routing = 4 * block.experts.active * block.hidden if block.experts else 0
    normed = 2 * block.latent_dim
    if block.head_norm is not HeadNorm.NONE:
        normed += 2 * (block.query_dim + block.key_dim)
    traffic = float(recomputable + 2 * 3 * block.hidden + rotation + routing + normed) * element_bytes
    return TokenWork(
        forward_flops=matrices + scores,
        input_grad_flops=matrices + (2.5 if flash else 2.0) * scores + (repeated_scores if always else 0.0),
        weight_grad_flops=matrices,
        forward_traffic=traffic,
        input_grad_traffic=2 * traffic,
        selective_flops=0.0 if always else repeated_scores,
        selective_traffic=float(recomputable) * element_bytes,
    )


def _seen(seq_len: int, window: int | None) -> float:
    """Return how many tokens a token of a sequence looks at, on average, behind a causal mask with a window."""
    seen = min(seq_len, window or seq_len)
    return seen - seen**2 / (2 * seq_len)
