"""The benchmark of reading corpora, on small ones."""

from __future__ import annotations

from pathlib import Path

from benchmarks.data import tokens_per_s, write_corpus
from chameleon_ft.data.shards import ShardFolder


def test_a_mixture_is_written_and_read(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        write_corpus(tmp_path / name, 16_000, seed=seed)
    folder = ShardFolder.open(tmp_path / "a")
    folder.verify()
    assert (folder.tokens.size, folder.manifest.documents) == (16_000, 16)
    assert tokens_per_s(tmp_path, 64, seconds=0.05) > 0
