"""The built-in Llama, trained from a stream of its windows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from chameleon_ft.config import TrainConfig
from chameleon_ft.job import Dataset, Job
from chameleon_ft.models.llama import llama_job


@dataclass
class _Stream:
    """The samples of a map-style dataset in the order of their numbers, with the next number as the state."""

    dataset: Dataset
    next: int = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.next < len(self.dataset):
            self.next += 1
            yield self.dataset[self.next - 1]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def job(config: TrainConfig) -> Job:
    """Return the job of the built-in Llama with its data as a stream."""
    own = llama_job(config)
    return replace(own, dataset=_Stream(own.dataset))
