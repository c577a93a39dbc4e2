"""The messages of a transition, sent by torch.distributed alone: the rate of the link without the runtime.

Run as ``python -m benchmarks._plain_messages MESSAGES TIMES``: MESSAGES is a file of `Messages.write`, and TIMES is
written for `read_times`. No code of the runtime is in it. Each rank posts all tensors of a round, waits for them, and
goes on to the next round; times are seconds between barriers.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

_HOST: Final = "127.0.0.1"
_WARM_UP: Final = 1


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages in rounds: (source, destination, bytes of each of its tensors).

    Attributes:
        ranks: processes, numbered from 0, that take part in the barriers.
        rounds: in each, a rank sends to at most one other and receives from at most one.
        repeats: how often all messages are sent.
        reuse: whether tensors are received into memory used before, or into new memory, like layers that stay.
    """

    ranks: int
    rounds: tuple[tuple[tuple[int, int, tuple[int, ...]], ...], ...]
    repeats: int
    reuse: bool

    def write(self, path: Path) -> None:
        """Write the messages for the process that sends them."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Messages:
        """Read messages that `write` wrote."""
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        rounds = tuple(tuple((source, to, tuple(sizes)) for source, to, sizes in each) for each in data.pop("rounds"))
        return cls(rounds=rounds, **data)

    @property
    def busiest_bytes(self) -> int:
        """Return the most bytes that a rank sends, or receives."""
        loads: dict[tuple[int, int], int] = {}
        for messages in self.rounds:
            for *ends, sizes in messages:
                for which, end in enumerate(ends):
                    loads[which, end] = loads.get((which, end), 0) + sum(sizes)
        return max(loads.values(), default=0)


def read_times(path: Path) -> tuple[float, ...]:
    """Read the seconds of each repeat."""
    return tuple(json.loads(path.read_text(encoding="utf-8")))


def _rank(rank: int, messages: Messages, port: int, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{_HOST}:{port}", rank=rank, world_size=messages.ranks)
    own = [[message for message in each if rank in message[:2]] for each in messages.rounds]
    sent = {size: torch.ones(size, dtype=torch.uint8) for each in own for _, _, sizes in each for size in sizes}
    kept: dict[tuple[int, ...], torch.Tensor] = {}

    def buffer(*key: int) -> torch.Tensor:
        tensor = kept.get(key) if messages.reuse else None
        if tensor is None:
            tensor = kept[key] = torch.empty(key[-1], dtype=torch.uint8)
        return tensor

    times_s = []
    for _ in range(_WARM_UP + messages.repeats):
        if not messages.reuse:
            kept.clear()
        dist.barrier()
        start = time.perf_counter()
        for number, each in enumerate(own):
            works = [
                dist.isend(sent[size], to) if rank == source else dist.irecv(buffer(number, index, size), source)
                for source, to, sizes in each
                for index, size in enumerate(sizes)
            ]
            for work in works:
                assert work is not None
                work.wait()
        dist.barrier()
        times_s.append(time.perf_counter() - start)
    if rank == 0:
        out.write_text(json.dumps(times_s[_WARM_UP:]), encoding="utf-8")
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.create_server((_HOST, 0)) as server:
        port: int = server.getsockname()[1]
        return port


if __name__ == "__main__":
    given = Messages.read(Path(sys.argv[1]))
    spawn(_rank, (given, _free_port(), Path(sys.argv[2])), nprocs=given.ranks)
