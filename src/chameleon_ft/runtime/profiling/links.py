"""The link between two processes of this host, and reductions over more of them."""

from __future__ import annotations

import statistics
from collections.abc import Collection
from dataclasses import dataclass

import torch

from chameleon_ft.cluster import Link
from chameleon_ft.config import RunConfig
from chameleon_ft.profiles import AllReduceTime
from chameleon_ft.runtime.profiling.exchange import Exchange, Exchanged, fit_link
from chameleon_ft.runtime.profiling.layers import spread
from chameleon_ft.runtime.profiling.members import Member, memberships, rendezvous_store, run_members

__all__ = ["LocalLinks", "link_of", "local_backend", "measure_local_links", "message_sizes"]

_HOST = "127.0.0.1"
_MESSAGE_BYTES = (64, 4096, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
_REDUCED_BYTES = (1 << 16, 1 << 20, 1 << 23)
_MOST_REDUCING = 8


@dataclass(frozen=True, slots=True)
class LocalLinks:
    """What was measured between processes of this host."""

    link: Link
    all_reduces: tuple[AllReduceTime, ...]


def message_sizes(boundary_bytes: Collection[int]) -> tuple[int, ...]:
    """Sizes from a few bytes to many, and those of the messages that will be sent."""
    return tuple(sorted({*_MESSAGE_BYTES, *(size for size in boundary_bytes if 0 < size < _MESSAGE_BYTES[-1])}))


def local_backend(config: RunConfig) -> RunConfig:
    """`config` with a backend that two processes of this host can use: NCCL wants an accelerator for each of them."""
    if config.backend == "nccl" and torch.accelerator.device_count() < 2:
        return config.model_copy(update={"backend": "gloo"})
    return config


def measure_local_links(config: RunConfig, *, message_bytes: tuple[int, ...], repeats: int) -> LocalLinks:
    """Time messages between two processes, and all-reduces over as many as will hold the same layer, up to 8.

    Raises:
        ControlError: the processes cannot reach each other.
    """
    config = local_backend(config)
    most = min(max(2, config.parallel.dp), _MOST_REDUCING)
    if config.backend == "nccl":
        most = min(most, torch.accelerator.device_count())
    exchange = Exchange(
        message_bytes=message_bytes,
        reduced_bytes=_REDUCED_BYTES,
        reducing=tuple(range(2, most + 1)),
        repeats=repeats,
    )
    with rendezvous_store(_HOST, timeout_s=config.timeouts.rendezvous_s) as store:
        found = run_members(
            [
                Member(
                    config=config,
                    membership=membership,
                    exchange=exchange,
                    address=_HOST,
                    local_index=membership.worker,
                )
                for membership in memberships(most, exchange.reducing, store=store)
            ]
        )
    return LocalLinks(
        link_of(found),
        tuple(
            AllReduceTime(reductions.workers, reductions.num_bytes, spread(reductions.times_s))
            for reductions in found.reductions
        ),
    )


def link_of(found: Exchanged) -> Link:
    """The link that the messages of an exchange have gone over."""
    return fit_link([(messages.num_bytes, statistics.median(messages.times_s)) for messages in found.messages])
