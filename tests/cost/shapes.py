"""Shapes that several tests use."""

from __future__ import annotations

from chameleon_ft.cost.shapes import Bias, BlockShape, FeedForward, ModelShape, Norm


def model_flops_per_token(shape: ModelShape) -> float:
    """Operations that training on one token takes: 6 N + 12 L a d_h s, as PaLM's appendix B counts them.

    N leaves out what is only looked up, the embedding; a tied one is in it as output projection. The mask is not
    taken off, and what is computed twice to save memory is not added: the measure of model FLOPs utilisation.
    """
    looked_up = shape.embedding_params - (shape.vocab * shape.hidden if shape.tied_embeddings else 0)
    query_dims = sum(block.query_dim for block in shape.blocks)
    return 6.0 * (shape.active_params - looked_up) + 12.0 * query_dims * shape.seq_len


def gpt(*, hidden: int, blocks: int, heads: int, seq_len: int, vocab: int) -> ModelShape:
    """A GPT as Narayanan et al. and Korthikanti et al. count it."""
    block = BlockShape(
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden,
        feed_forward=FeedForward.GELU,
        norm=Norm.LAYER,
        bias=Bias.ALL,
        dropout=True,
        rotary=False,
    )
    return ModelShape(
        name="gpt",
        blocks=(block,) * blocks,
        vocab=vocab,
        seq_len=seq_len,
        tied_embeddings=True,
        positions=seq_len,
    )
