"""Shapes that several tests use."""

from __future__ import annotations

from chameleon_ft.presets import Bias, FeedForward, ModelShape, Norm


def gpt(*, hidden: int, blocks: int, heads: int, seq_len: int, vocab: int) -> ModelShape:
    """A GPT as Narayanan et al. and Korthikanti et al. count it."""
    return ModelShape(
        name="gpt",
        hidden=hidden,
        blocks=blocks,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden,
        vocab=vocab,
        seq_len=seq_len,
        tied_embeddings=True,
        feed_forward=FeedForward.GELU,
        norm=Norm.LAYER,
        bias=Bias.ALL,
        dropout=True,
        learned_positions=True,
    )
