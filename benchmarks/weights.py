"""How much do workers read and hold while they load their initial weights from safetensors files?

Each worker is a process of its own, which builds its layers as a rank does at the start of a run. Counted are the bytes
that the kernel reads from disk for the process, with none of the files in the page cache before, and the largest
resident memory since before the layers were built.

Then the model gets adapters, and the bytes that a checkpoint has of it after an update are counted.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from torch import nn

from benchmarks._common import Bar, Report, new_folder, report_arguments
from chameleon_ft import Job, Weights
from chameleon_ft.models.build import param_bytes, tensor_bytes
from chameleon_ft.plan import LayerRange
from chameleon_ft.quantities import data_size
from chameleon_ft.sync import Segment
from chameleon_ft.worker.execution.gradients import GradientBuffers
from chameleon_ft.worker.execution.layers import HeldLayers

_WORKERS: Final = 4
_READ_BAR: Final = 1.05
_MEMORY_BAR: Final = 1.2
_CHECKPOINT_BAR: Final = 0.05
_RANK: Final = 8
_SHARD_LAYERS: Final = 3
_CPU: Final = torch.device("cpu")


class Block(nn.Module):
    """A layer of several matrices, as that of a transformer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)


def job_of(folder: Path, dim: int, blocks: int, vocab: int) -> Job:
    """Return a job with a table, blocks and a head, whose weights are in a folder."""
    embedding, head = partial(nn.Embedding, vocab, dim), partial(nn.Linear, dim, vocab, bias=False)
    return Job(
        layers=[embedding, *[partial(Block, dim)] * blocks, head],
        loss=nn.CrossEntropyLoss(reduction="sum"),
        dataset=[(torch.zeros(1), torch.zeros(1))],
        optimizer=torch.optim.AdamW,
        weights=Weights(folder),
        built_in_full=(),
    )


def write_files(job: Job, folder: Path) -> None:
    """Write the weights of a job, some layers to a file."""
    index: dict[str, str] = {}
    for first in range(0, job.num_layers, _SHARD_LAYERS):
        tensors = {
            f"layers.{layer}.{name}": each
            for layer in range(first, min(first + _SHARD_LAYERS, job.num_layers))
            for name, each in job.layers[layer]().state_dict().items()
        }
        name = f"model-{first:05d}.safetensors"
        save_file(tensors, folder / name)
        index |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def forget(folder: Path) -> None:
    """Have the kernel drop the files from its page cache."""
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load(folder: Path, sizes: tuple[int, int, int], layers: range) -> dict[str, int]:
    """Load layers in this process; return the bytes that it read, held at most, and needs."""
    job = job_of(folder, *sizes)
    # What the first use of torch loads does not count.
    HeldLayers(replace(job, layers=[partial(nn.Linear, 2, 2)], weights=None), [0], seed=0, device=_CPU)
    Path("/proc/self/clear_refs").write_text("5")
    before_bytes, read_bytes = resident_bytes("VmRSS"), bytes_from_disk()
    held = HeldLayers(job, layers, seed=0, device=_CPU)
    return {
        "read_bytes": bytes_from_disk() - read_bytes,
        "peak_bytes": resident_bytes("VmHWM") - before_bytes,
        "layer_bytes": sum(each.nbytes for layer in layers for each in held.state_of(layer).values()),
    }


def resident_bytes(which: str) -> int:
    """Return the resident memory of this process, now (VmRSS) or at most (VmHWM)."""
    return 1024 * int(Path("/proc/self/status").read_text().partition(f"{which}:")[2].split()[0])


def bytes_from_disk() -> int:
    """Return the bytes that the kernel has read for this process."""
    return int(Path("/proc/self/io").read_text().partition("\nread_bytes:")[2].split()[0])


def bytes_in_checkpoint(job: Job) -> int:
    """Return the bytes of the tensors that a checkpoint has after an update."""
    total = 0
    for layer in range(job.num_layers):
        held = HeldLayers(job, [layer], seed=0, device=_CPU)
        buffers = GradientBuffers(held, (Segment(LayerRange(layer, layer + 1), (0,)),))
        buffers.zero()
        held.update(0)
        total += tensor_bytes(held.snapshot(layer))
    return total


def measure(sizes: tuple[int, int, int], kept_in: Path | None) -> tuple[list[dict[str, int]], dict[str, int]]:
    """Write a model, and load it in as many processes as there are workers, one after the other.

    Return what each has read and held, and the bytes of the model and of its checkpoints, with adapters and without.
    The model is in a temporary folder unless it is to be kept.
    """
    with TemporaryDirectory() if kept_in is None else nullcontext(new_folder(kept_in)) as place:
        folder = Path(place)
        job = job_of(folder, *sizes)
        write_files(job, folder)
        shares = [worker * job.num_layers // _WORKERS for worker in range(_WORKERS + 1)]
        found = []
        for first, end in pairwise(shares):
            forget(folder)
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                found.append(process.submit(load, folder, sizes, range(first, end)).result())
        if not any(each["read_bytes"] for each in found):
            raise SystemExit(
                f"{folder}: is in memory, so nothing is read from disk; name a folder on a disk by --keep-in"
            )
        adapted = job.with_adapters(LoraConfig(r=_RANK, target_modules=[f"attention.{number}" for number in range(4)]))
        kept = {
            "model_bytes": sum(param_bytes(job)),
            "checkpoint_bytes": bytes_in_checkpoint(job),
            "adapters_checkpoint_bytes": bytes_in_checkpoint(adapted),
        }
    return found, kept


def main() -> int:
    """Run the benchmark from the command line."""
    parser = report_arguments(__doc__, name="weights")
    parser.add_argument("--dim", type=int, default=1024, help="width of the model")
    parser.add_argument("--blocks", type=int, default=36, help="number of its layers, without the first and the last")
    parser.add_argument("--vocab", type=int, default=32_000, help="rows of its table and of its head")
    parser.add_argument("--keep-in", type=Path, metavar="DIR", help="write the model there, and keep it")
    arguments = parser.parse_args()
    folder = new_folder(arguments.out)
    found, kept = measure((arguments.dim, arguments.blocks, arguments.vocab), arguments.keep_in)
    read = [each["read_bytes"] / each["layer_bytes"] for each in found]
    held = [each["peak_bytes"] / each["layer_bytes"] for each in found]
    return Report(
        benchmark="weights",
        columns=("worker", "bytes of its layers", "read from disk", "peak memory"),
        rows=tuple(
            (str(worker), data_size(each["layer_bytes"]), f"{one:.3f}", f"{other:.3f}")
            for worker, (each, one, other) in enumerate(zip(found, read, held, strict=True))
        ),
        bars=(
            Bar(name="bytes read, of those of the layers, of any worker", value=max(read), limit=_READ_BAR),
            Bar(name="peak memory, of the bytes of the layers, of any worker", value=max(held), limit=_MEMORY_BAR),
            Bar(
                name="checkpoint with adapters, of the bytes of the model",
                value=kept["adapters_checkpoint_bytes"] / kept["model_bytes"],
                limit=_CHECKPOINT_BAR,
            ),
        ),
        results={"workers": found, **kept},
    ).emit(folder, as_json=arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
