"""Small tokenizers for tests, made by the library itself."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

TEXT = "the quick brown fox jumps over the lazy dog, and the dog sleeps; größer\n"


def make_tokenizer(folder: Path, *, end: str = "<|endoftext|>") -> Path:
    """Write a byte-level BPE tokenizer, with truncation and padding, and return its file."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[end], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator([TEXT] * 3, trainer)
    made.enable_truncation(8)
    made.enable_padding(length=16)
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"
