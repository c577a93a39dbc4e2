"""Messages and reductions between processes, timed, and the link that they come to."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch

from chameleon_ft.cluster import Link
from chameleon_ft.errors import ConfigError
from chameleon_ft.runtime.communicators import Communicators

__all__ = ["Exchange", "Exchanged", "TimedMessages", "TimedReductions", "fit_link", "run_exchange"]

_WARM_UP = 3
_TAG = 0
_MOST_BYTES = 1 << 30
_MOST_REPEATS = 10_000
_ELEMENT = torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What processes exchange, all of them alike.

    Attributes:
        message_bytes: sizes of the messages that workers 0 and 1 send each other.
        reduced_bytes: sizes of the all-reduces.
        reducing: numbers of workers, the first ones, that reduce.
        repeats: how often each is timed.

    Raises:
        ConfigError: sizes or repeats that nobody can mean.
    """

    message_bytes: tuple[int, ...]
    reduced_bytes: tuple[int, ...] = ()
    reducing: tuple[int, ...] = ()
    repeats: int = 20

    def __post_init__(self) -> None:
        sizes = (*self.message_bytes, *self.reduced_bytes)
        if not (self.message_bytes and all(0 < size <= _MOST_BYTES for size in sizes)):
            raise ConfigError(f"an exchange needs sizes between 1 and {_MOST_BYTES} bytes; got {sizes}")
        if not 1 <= self.repeats <= _MOST_REPEATS:
            raise ConfigError(f"repeats must be between 1 and {_MOST_REPEATS}; got {self.repeats}")


@dataclass(frozen=True, slots=True)
class TimedMessages:
    """Messages of one size: seconds from the start of a send until it has arrived, half of there and back."""

    num_bytes: int
    times_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TimedReductions:
    """All-reduces of one size over so many workers."""

    workers: int
    num_bytes: int
    times_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What worker 0 has seen of an exchange; others have seen nothing."""

    messages: tuple[TimedMessages, ...] = ()
    reductions: tuple[TimedReductions, ...] = ()


def run_exchange(exchange: Exchange, communicators: Communicators, *, worker: int, device: torch.device) -> Exchanged:
    """Take part in an exchange as `worker`. Raises CommunicationError."""
    messages: list[TimedMessages] = []
    reductions: list[TimedReductions] = []
    for num_bytes in exchange.message_bytes:
        if worker == 0:
            messages.append(TimedMessages(num_bytes, _ping(communicators, num_bytes, exchange.repeats, device)))
        elif worker == 1:
            _pong(communicators, num_bytes, exchange.repeats, device)
    for workers in exchange.reducing:
        for num_bytes in exchange.reduced_bytes if worker < workers else ():
            times_s = _reduce(communicators, tuple(range(workers)), num_bytes, exchange.repeats, device)
            reductions.append(TimedReductions(workers, num_bytes, times_s))
    return Exchanged(tuple(messages), tuple(reductions)) if worker == 0 else Exchanged()


def fit_link(times: Sequence[tuple[int, float]]) -> Link:
    """The link whose predictions for messages of (bytes, seconds) are off by the least sum of relative errors.

    Single measurements that are far off have no more weight than others. The best of the lines that rise passes through
    two of the points, or through one with no latency at all, so that trying these is enough.
    """
    candidates = [(0.0, seconds / num_bytes) for num_bytes, seconds in times]
    for (few, short_s), (many, long_s) in combinations(sorted(times), 2):
        if many > few and long_s > short_s:
            byte_s = (long_s - short_s) / (many - few)
            candidates.append((short_s - byte_s * few, byte_s))
    latency_s, byte_s = min(
        (candidate for candidate in candidates if candidate[0] >= 0 and candidate[1] > 0),
        key=lambda line: sum(abs(line[0] + line[1] * num_bytes - seconds) / seconds for num_bytes, seconds in times),
    )
    return Link(latency_s, 1 / byte_s)


def _ping(communicators: Communicators, num_bytes: int, repeats: int, device: torch.device) -> tuple[float, ...]:
    there, back = _tensor(num_bytes, device), _tensor(num_bytes, device)

    def once() -> None:
        answer = communicators.receive(back, peer=1, tag=_TAG)
        sent = communicators.send(there, peer=1, tag=_TAG)
        answer.wait()
        sent.wait()

    return tuple(seconds / 2 for seconds in _timed(once, repeats, device))


def _pong(communicators: Communicators, num_bytes: int, repeats: int, device: torch.device) -> None:
    there, back = _tensor(num_bytes, device), _tensor(num_bytes, device)
    count = _WARM_UP + repeats
    receive = communicators.receive(there, peer=0, tag=_TAG)
    for number in range(count):
        receive.wait()
        _synchronize(device)
        if number + 1 < count:
            receive = communicators.receive(there, peer=0, tag=_TAG)  # ahead of what it is for, as a rank does
        communicators.send(back, peer=0, tag=_TAG).wait()


def _reduce(
    communicators: Communicators, group: tuple[int, ...], num_bytes: int, repeats: int, device: torch.device
) -> tuple[float, ...]:
    # One waits for all others, so that each begins where the one before has ended.
    reduced = _tensor(num_bytes, device)
    return tuple(_timed(lambda: communicators.all_reduce(reduced, group).wait(), repeats, device))


def _timed(once: Callable[[], None], repeats: int, device: torch.device) -> list[float]:
    times_s: list[float] = []
    for _ in range(_WARM_UP + repeats):
        start = time.perf_counter()
        once()
        _synchronize(device)
        times_s.append(time.perf_counter() - start)
    return times_s[_WARM_UP:]


def _tensor(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(-(-num_bytes // _ELEMENT.itemsize), dtype=_ELEMENT, device=device)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
