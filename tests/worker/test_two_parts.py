"""Communicators in two parts: which part carries a message, and waits for the part that is formed in the background.

The library of a device is a fake here; tests/worker/test_pretended_nccl.py has one with the contract of NCCL.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from chameleon_ft.worker.communicators.base import (
    Channel,
    CommunicationError,
    Communicators,
    Kind,
    Membership,
    Rendezvous,
    Tag,
    tag_of,
)
from chameleon_ft.worker.communicators.two_parts import DevicePart, TwoPartCommunicators

TENSOR = torch.ones(1)
FORMED = [Channel(1, 2, Kind.ACTIVATION), Channel(2, 1, Kind.GRADIENT), Channel(1, 2, Kind.PARAMETERS), (1, 2)]


class Part:
    """Either part: it tells what it is asked to do."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.groups: tuple[tuple[int, ...], ...] | None = None

    def open(self, membership: Membership) -> None:
        self.groups = membership.groups

    def settle(self) -> None: ...

    def interrupt(self) -> None: ...

    def close(self) -> None: ...

    def send(self, tensor: Tensor, peer: int = 0, **_: Any) -> str:
        return f"{self.name} sends"

    def receive(self, tensor: Tensor, peer: int = 0, **_: Any) -> str:
        return f"{self.name} receives"

    def all_reduce(self, tensor: Tensor, *_: Any) -> str:
        return f"{self.name} reduces"

    def vote(self, ballot: Tensor, group: tuple[int, ...]) -> str:
        return f"{self.name} votes"


class Device(Part):
    """A part whose communicators are formed once the test allows it, or with an error."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__("device")
        self.allowed = threading.Event()
        self.formed: dict[Any, Part] = {}
        self._error = error

    counts = (1, 3)

    def form(self, membership: Membership, host: Part) -> None:
        self.allowed.wait()
        if self._error is not None:
            raise self._error
        self.formed.update(dict.fromkeys(FORMED, Part("device")))


def opened(device: Device) -> Any:
    host = Part("host")
    made = TwoPartCommunicators(cast("DevicePart", device), cast("Communicators", host))
    channels = tuple(each for each in FORMED if isinstance(each, Channel))
    rendezvous = Rendezvous(lambda **_: cast("Any", None))
    made.open(
        Membership(generation=1, worker=1, members=(1, 2), groups=((1, 2),), channels=channels, rendezvous=rendezvous)
    )
    assert host.groups == (), "no group reduces through host memory"
    return made


def test_each_kind_of_message_goes_by_its_part() -> None:
    device = Device()
    device.allowed.set()
    made = opened(device)
    activation, gradient = (tag_of((forward, 3, 1), num_layers=2) for forward in (True, False))
    again = tag_of((True, 3, 1), num_layers=2, is_rest=True)
    assert made.send(TENSOR, peer=2, tag=activation) == "device sends"
    assert made.receive(TENSOR, peer=2, tag=gradient) == "device receives"
    assert made.send(TENSOR, peer=2, tag=Tag.UPDATED_PARAMETERS) == "device sends"
    assert made.all_reduce(TENSOR, (1, 2)) == "device reduces"
    assert made.vote(TENSOR, (1, 2)) == "host votes"
    for tag in (again, Tag.SNAPSHOT, Tag.LAYER, Tag.PARAMETERS_AGAIN):
        assert made.send(TENSOR, peer=2, tag=tag) == "host sends"
        assert made.receive(TENSOR, peer=2, tag=tag) == "host receives"


def test_messages_through_host_memory_do_not_wait_for_the_devices() -> None:
    device = Device()
    made = opened(device)
    assert made.send(TENSOR, peer=2, tag=Tag.LAYER) == "host sends"
    with ThreadPoolExecutor(1) as pool:
        reduced = pool.submit(made.all_reduce, TENSOR, (1, 2))
        assert not reduced.done()
        device.allowed.set()
        assert reduced.result() == "device reduces"


def test_an_interruption_ends_the_wait_for_devices_that_are_never_connected() -> None:
    device = Device()
    made = opened(device)
    with ThreadPoolExecutor(1) as pool:
        settled = pool.submit(made.settle)
        made.interrupt()
        assert isinstance(settled.exception(), CommunicationError)
    device.allowed.set()


def test_an_error_of_the_library_is_raised_where_its_communicators_are_needed() -> None:
    device = Device(RuntimeError("unhandled system error"))
    device.allowed.set()
    made = opened(device)
    with pytest.raises(CommunicationError):
        made.all_reduce(TENSOR, (1, 2))
    assert made.send(TENSOR, peer=2, tag=Tag.LAYER) == "host sends"
