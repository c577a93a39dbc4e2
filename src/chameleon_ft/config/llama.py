"""Sections of a configuration that only the built-in Llama has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from chameleon_ft.config.sections import Section


class LlamaConfig(Section):
    """Shape of the Llama-style model, or the folder of another one."""

    hf: str = Field(
        default="",
        description="Folder of a decoder-only model of transformers, with its config.json, which is trained instead of "
        "the Llama; see transformers.md. Of the other settings here, only `seq_len` counts then.",
    )
    vocab_size: int = Field(default=256, ge=2, description="Number of token ids; text is read as bytes and needs 256.")
    dim: int = Field(default=128, ge=2, description="Width of the residual stream.")
    num_layers: int = Field(
        default=6, ge=1, description="Transformer blocks; embedding and head are one layer each beside them."
    )
    num_heads: int = Field(default=4, ge=1, description="Query heads of a block.")
    num_kv_heads: int = Field(default=2, ge=1, description="Key and value heads, each shared by several query heads.")
    ffn_dim: int = Field(default=352, ge=1, description="Inner width of the feed-forward network.")
    seq_len: int = Field(default=128, ge=1, description="Tokens of one sample.")
    rope_theta: float = Field(default=10_000.0, gt=0, description="Base of the rotary position frequencies.")
    norm_eps: float = Field(default=1e-5, gt=0, description="Term that keeps the RMS norm from dividing by zero.")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Fraction of activations dropped in training.")
    tie_embeddings: bool = Field(
        default=False, description="Share one matrix between embedding and head: one parameter in two layers."
    )

    @property
    def partition_layers(self) -> int:
        """Layers that stages are made of: the embedding, the blocks, and the final norm with the head."""
        return self.num_layers + 2

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.dim % self.num_heads:
            yield "dim", f"must be a multiple of num_heads = {self.num_heads}; change one of them"
        elif (self.dim // self.num_heads) % 2:
            yield (
                "dim",
                f"gives heads of width {self.dim // self.num_heads}, and rotary positions need an even one; "
                f"take a multiple of {2 * self.num_heads}",
            )
        if self.num_heads % self.num_kv_heads:
            yield "num_heads", f"must be a multiple of num_kv_heads = {self.num_kv_heads}; change one of them"


class DataSource(Section):
    """A source of a mixture."""

    path: str = Field(min_length=1, description="As data.path.")
    weight: float = Field(default=1.0, gt=0, description="Share of the samples, relative to the other sources.")


class Data(Section):
    """The training data."""

    path: str = Field(
        default="",
        description="A text file, a folder of text, a token file or a pattern of several, or a folder of `chameleon "
        "data tokenize`; empty: the source text of Python's own library.",
    )
    mixture: Annotated[tuple[DataSource, ...], Field(strict=False)] = Field(
        default=(), description="Several sources, each with a path and a weight, instead of path."
    )
    format: Literal["auto", "text", "tokens"] = Field(
        default="auto",
        description="auto: tokens where the name ends in .bin or .npy, or tokenize wrote it; text otherwise.",
    )
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] = Field(
        default="uint16", description="Type of the ids in a raw token file."
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.path and self.mixture:
            yield "path", "is set beside mixture; put it into the mixture, or leave one of them out"
        paths = [source.path for source in self.mixture]
        if twice := next((path for path in paths if paths.count(path) > 1), None):
            yield "mixture", f"has {twice} twice; give it one weight"


class Optimizer(Section):
    """AdamW with linear warm-up and cosine decay."""

    lr: float = Field(default=3e-3, gt=0, description="Learning rate at the end of the warm-up.")
    min_lr: float = Field(default=3e-4, ge=0, description="Learning rate at the last step.")
    warmup_steps: int = Field(default=10, ge=0, description="Steps in which the learning rate rises linearly.")
    weight_decay: float = Field(default=0.1, ge=0, description="Decay of the weights per unit of learning rate.")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay of the running mean of the gradient.")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="Decay of the running mean of its square.")
    eps: float = Field(default=1e-8, gt=0, description="Term that keeps the update from dividing by zero.")
    clip_norm: float = Field(default=1.0, ge=0, description="Largest global gradient norm; 0 switches clipping off.")

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.min_lr > self.lr:
            yield "min_lr", f"must not exceed lr = {self.lr:g}; lower min_lr or raise lr"
