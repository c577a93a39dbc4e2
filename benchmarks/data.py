"""How fast are the samples of a tokenised mixture read, by one processor?

Micro-batches are read as a worker reads them, each sample as a draw of its own, from two folders of shards on disk.
Ids are random, and the time is that of the processor, so what else runs on the machine matters little.
"""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
import torch

from benchmarks._common import Bar, Report, new_folder, report_arguments
from chameleon_ft.data import Mixture, open_corpus
from chameleon_ft.data.samples import SamplesInOrder
from chameleon_ft.data.shards import ShardWriter
from chameleon_ft.data.shards import new_folder as new_corpus

_BAR: Final = 5e6
_SEQ_LENS: Final = (128, 512, 2048)
_MICRO_BATCH: Final = 8
_SHARDS: Final = 8


def write_corpus(path: Path, tokens: int, *, seed: int) -> None:
    """Write shards of random ids, in documents of 1,000."""
    draw, shard = np.random.default_rng(seed), tokens // _SHARDS
    with new_corpus(path) as draft:
        writer = ShardWriter(draft, vocab_size=50_257, end_of_document=50_256, shard_tokens=shard)
        for _ in range(_SHARDS):
            writer.add(draw.integers(0, 50_256, shard), np.arange(1_000, shard + 1, 1_000, dtype=np.int64))
        writer.finish("{}")


def tokens_per_s(folder: Path, seq_len: int, *, seconds: float) -> float:
    """Return the tokens that are read in a second of processor time."""
    mixture = Mixture([(open_corpus(folder / name, seq_len), weight) for name, weight in (("a", 3.0), ("b", 1.0))])
    samples, number = SamplesInOrder(mixture, 0), 0
    samples.micro_batch(0, _MICRO_BATCH)
    begun_s, end_s = time.process_time(), time.monotonic() + seconds
    while time.monotonic() < end_s:
        samples.micro_batch(number * _MICRO_BATCH, _MICRO_BATCH)
        number += 1
    return number * _MICRO_BATCH * seq_len / (time.process_time() - begun_s)


def main() -> int:
    """Run the benchmark from the command line."""
    parser = report_arguments(__doc__, name="data")
    parser.add_argument("--tokens", type=int, default=64_000_000, help="tokens of each of the two corpora")
    parser.add_argument("--seconds", type=float, default=5.0, help="time of reading, for each length of samples")
    arguments = parser.parse_args()
    folder = new_folder(arguments.out)
    torch.set_num_threads(1)
    with TemporaryDirectory() as place:
        for seed, corpus in enumerate("ab"):
            write_corpus(Path(place) / corpus, arguments.tokens, seed=seed)
        rates = {seq_len: tokens_per_s(Path(place), seq_len, seconds=arguments.seconds) for seq_len in _SEQ_LENS}
    name = "tokens/s of a processor, samples of 2,048"
    return Report(
        benchmark="data",
        columns=("tokens of a sample", "million tokens/s of a processor"),
        rows=tuple((f"{seq_len:,}", f"{rate / 1e6:.1f}") for seq_len, rate in rates.items()),
        bars=(Bar(name=name, value=rates[_SEQ_LENS[-1]], limit=_BAR, at_least=True),),
        results={"tokens_per_s": {str(seq_len): rate for seq_len, rate in rates.items()}},
    ).emit(folder, as_json=arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
