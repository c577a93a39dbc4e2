"""A small model whose samples take processor time to read: for a run, and in a plain loop with torch's DataLoader."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from chameleon_ft import Job
from chameleon_ft.data import SampleOrder

SAMPLES, READ_S = 4_096, 0.02
BATCH = 8


def sample(number: int, read_s: float) -> tuple[Tensor, Tensor]:
    """Return a sample after so many seconds of processor time."""
    end_s = time.thread_time() + read_s
    while time.thread_time() < end_s:
        pass
    tokens = (number + torch.arange(33)) % 64
    return tokens[:-1], tokens[1:]


class Slow(Dataset[tuple[Tensor, Tensor]]):
    """Map-style samples of 20 ms."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return sample(index, READ_S)


class Stream:
    """Samples of 1 ms with a position."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.next < SAMPLES:
            self.next += 1
            yield sample(self.next - 1, READ_S / 20)

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position."""
        self.next = state["next"]


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """Return the sum over all tokens."""
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")


LAYERS = (partial(nn.Embedding, 64, 32), partial(nn.Linear, 32, 64))


def job_of(dataset: Any) -> Job:
    """Return the job with some dataset."""
    sgd = partial(torch.optim.SGD, lr=0.1)
    terms = Tensor.numel
    return Job(layers=list(LAYERS), loss=loss, loss_terms=terms, dataset=dataset, optimizer=sgd)


job = partial(job_of, Slow())
streamed = partial(job_of, Stream())


def plain(steps: int, first: int) -> float:
    """Train in a plain loop with two loading processes; return the seconds of a step from `first` on."""
    order = SampleOrder(SAMPLES, 0)
    batches = [order.ids(step, BATCH) for step in range(steps)]
    loader = DataLoader(Slow(), batch_sampler=batches, num_workers=2, multiprocessing_context="fork")
    model = nn.Sequential(*(layer() for layer in LAYERS))
    optimizer, begun_s = torch.optim.SGD(model.parameters(), lr=0.1), 0.0
    for step, (inputs, targets) in enumerate(loader):
        if step == first:
            begun_s = time.perf_counter()
        optimizer.zero_grad()
        (loss(model(inputs), targets) / targets.numel()).backward()
        optimizer.step()
    return (time.perf_counter() - begun_s) / (steps - first)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(plain(int(sys.argv[1]), int(sys.argv[2])))
