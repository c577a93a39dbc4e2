"""The pretended library of the pretended accelerator: its contract, and communicators over it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
from torch.utils import backend_registration

from chameleon_ft.config import BACKENDS
from chameleon_ft.schedule.channels import Channel, Kind
from chameleon_ft.worker.communicators.base import CommunicationError, Membership, Tag, tag_of
from chameleon_ft.worker.communicators.gloo import GlooCommunicators
from chameleon_ft.worker.communicators.two_parts import DevicePart, TwoPartCommunicators
from tests.backends import ENVIRON, use_backend
from tests.worker.ranks import TIMEOUTS, Ranks
from tests.worker.test_pretended_device import ROOT

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"), reason="another version of torch"
)


def test_the_contract() -> None:
    """Run `tests/pretended/contract.py` in a process whose accelerator is the pretended one."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/pretended/contract.py"]
    done = subprocess.run(
        words, cwd=ROOT, env={**os.environ, **ENVIRON}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout


# --- communicators over generations, in ranks of their own -----------------------------------------------------------

_rank: dict[str, Any] = {}
"""Of the process of a rank: its communicators, their device part, and the groups that it has shrunk."""


def _use_library(num_streams: int) -> None:
    """Have this rank use the pretended library, with so many streams for its communicators."""
    use_backend("pretended-nccl")
    from torch_npu import nccl, streams

    streams._POOL_SIZE = num_streams  # type: ignore[misc]
    _rank["shrunk"] = []

    def shrink(self: Any, without: Sequence[int], original: Any = nccl.ProcessGroup.shrink) -> Any:
        _rank["shrunk"].append(original(self, without))
        return _rank["shrunk"][-1]

    nccl.ProcessGroup.shrink = shrink  # type: ignore[method-assign,assignment]


def _open(membership: Membership) -> None:
    library = BACKENDS["pretended-nccl"].library
    assert library is not None
    device = _rank["device"] = DevicePart(library, timeouts=TIMEOUTS, device=torch.device("npu", 0))
    # No test waits for it.
    os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] = "1000"
    host = GlooCommunicators(timeouts=TIMEOUTS, address="127.0.0.1")
    _rank["communicators"] = TwoPartCommunicators(device, host)
    _rank["communicators"].open(membership)


def _opened(membership: Membership) -> dict[Any, tuple[int, int, bool]]:
    """Open the communicators of a generation; return key -> its group and stream, and whether it has been shrunk."""
    _open(membership)
    _rank["communicators"].settle()
    groups = {key: each.group for key, each in _rank["device"].formed.items()}
    return {key: (id(each), id(each._stream.queue), each in _rank["shrunk"]) for key, each in groups.items()}


def _interrupt(awaited: tuple[int, int] | None) -> None:
    """Interrupt a generation, in which a message of (sender, tag) may be awaited; wait until nothing of it is left."""
    if awaited is not None:
        peer, tag = awaited
        _rank["communicators"].receive(torch.zeros(3, device="npu"), peer=peer, tag=tag)
    _rank["communicators"].interrupt()
    for each in threading.enumerate():
        if each.name in ("abort", "device-groups"):
            each.join()


def _interrupt_while_forming(membership: Membership, num_made: int) -> None:
    """Open a generation, and interrupt it once so many communicators have begun to form; none of them can be made."""
    if num_made == 0:
        DevicePart._make, make = None, DevicePart._make  # type: ignore[assignment,method-assign]
    _open(membership)
    while len(_rank["device"]._made) < num_made:
        time.sleep(0.01)
    if num_made > 0:
        _interrupt(None)
    with pytest.raises(CommunicationError):
        _rank["communicators"].settle()
    if num_made == 0:
        _interrupt(None)
        DevicePart._make = make  # type: ignore[method-assign]


def _exchange(worker: int, channels: Sequence[Channel], groups: Sequence[tuple[int, ...]]) -> list[float]:
    """Send on each channel and reduce in each group; return what has arrived, in this order."""
    tags = {Kind.PARAMETERS: int(Tag.UPDATED_PARAMETERS), Kind.ACTIVATION: _ACTIVATION, Kind.GRADIENT: _GRADIENT}
    messages, arriving, communicators = [], [], _rank["communicators"]
    for each in channels:
        tensor = torch.full((2,), float(each.sender)).to("npu")
        if worker == each.sender:
            messages.append(communicators.send(tensor, peer=each.receiver, tag=tags[each.kind]))
        elif worker == each.receiver:
            arriving.append(tensor.zero_())
            messages.append(communicators.receive(tensor, peer=each.sender, tag=tags[each.kind]))
    for group in (each for each in groups if worker in each):
        arriving.append(torch.full((2,), float(worker)).to("npu"))
        messages.append(communicators.all_reduce(arriving[-1], group))
    for message in messages:
        message.wait()
    return [float(tensor[0]) for tensor in arriving]


_ACTIVATION, _GRADIENT = (tag_of((forward, 0, 0), num_layers=1) for forward in (True, False))
_THERE, _BACK, _ON = Channel(0, 1, Kind.ACTIVATION), Channel(1, 0, Kind.GRADIENT), Channel(1, 2, Kind.ACTIVATION)
_CHANNELS: Final = (_THERE, _BACK, _ON)


@pytest.mark.multiprocess
def test_survivors_keep_shrink_or_renew_each_communicator() -> None:
    def members(
        ranks: Ranks, groups: Sequence[tuple[int, ...]], channels: Sequence[Channel], *, count: int = 3
    ) -> list[tuple[Membership]]:
        own = [tuple(each for each in channels if rank in (each.sender, each.receiver)) for rank in range(count)]
        made = ranks.memberships(groups, members=range(count))
        return [(replace(each, channels=its),) for each, its in zip(made, own, strict=True)]

    with Ranks(4) as ranks:
        ranks.run(_use_library, [(7,)] * 4)
        before = ranks.run(
            _opened, members(ranks, [(0, 1), (0, 1, 2, 3)], [*_CHANNELS, Channel(2, 3, Kind.ACTIVATION)], count=4)
        )
        os.kill(ranks.pid(3), signal.SIGKILL)
        ranks.run(_interrupt, [((1, _GRADIENT),), (None,), (None,)])
        groups = [(0, 1), (0, 1, 2)]
        now = ranks.run(_opened, members(ranks, groups, _CHANNELS))
        for rank, keys in enumerate([{_THERE, (0, 1)}, {_THERE, _ON, (0, 1)}, {_ON}]):
            assert {key for key in now[rank] if now[rank][key] == before[rank].get(key)} == keys, "they are kept"
            assert {key for key, (*_, is_shrunk) in now[rank].items() if is_shrunk} == {(0, 1, 2)}
        assert ranks.run(_exchange, [(rank, _CHANNELS, groups) for rank in range(3)]) == [
            [1.0, 1.0, 3.0],
            [0.0, 1.0, 3.0],
            [1.0, 3.0],
        ]

        # More communicators than there are streams are made one after the other.
        for _ in range(4):
            ranks.run(_interrupt, [((1, _GRADIENT),), (None,), (None,)])
            now = ranks.run(_opened, members(ranks, groups, _CHANNELS))
            assert all(len({stream for _, stream, _ in of_rank.values()}) == len(of_rank) for of_rank in now)

        # Rank 2 fails before it makes any.
        ranks.run(_interrupt, [((1, _GRADIENT),), ((0, _ACTIVATION),), (None,)])
        unformed = members(ranks, [(0, 1, 2)], [_THERE, _BACK, Channel(1, 2, Kind.GRADIENT)])
        ranks.run(_interrupt_while_forming, [(*each, num) for each, num in zip(unformed, (3, 4, 0), strict=True)])

        # There are too few streams for all of these.
        channels = [Channel(*pair, kind) for pair in ((0, 1), (1, 0)) for kind in Kind]
        now = ranks.run(_opened, members(ranks, groups, channels))
        assert [len(of_rank) for of_rank in now] == [7, 7, 1]
        arrived = ranks.run(_exchange, [(rank, channels, groups) for rank in range(3)])
        assert arrived == [[1.0] * 3 + [1.0, 3.0], [0.0] * 3 + [1.0, 3.0], [3.0]]
