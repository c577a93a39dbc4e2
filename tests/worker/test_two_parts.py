"""Communicators in two parts: which part carries a message, and waits for the part that is formed in the background.

The library of a device is a fake here; tests/worker/test_pretended_nccl.py has one with the contract of NCCL.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from chameleon_ft.schedule.channels import Channel, Kind
from chameleon_ft.worker.communicators import two_parts
from chameleon_ft.worker.communicators.base import (
    CommunicationError,
    Communicators,
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

    def open(self, membership: Membership) -> None: ...

    def settle(self) -> None: ...

    def interrupt(self) -> None: ...

    def close(self) -> None: ...

    def send(self, tensor: Tensor, peer: int = 0, **_: Any) -> str:
        return f"{self.name} sends"

    def receive(self, tensor: Tensor, peer: int = 0, **_: Any) -> str:
        return f"{self.name} receives"

    def all_reduce(self, tensor: Tensor, *_: Any) -> str:
        return f"{self.name} reduces"

    def vote(self, ballot: Tensor, group: tuple[int, ...]) -> Vote:
        return Vote(ballot, len(group))


@dataclass
class Vote:
    """A vote in which all say the same."""

    ballot: Tensor
    members: int

    def wait(self) -> None:
        self.ballot *= self.members


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
    return made


def voted(communicators: Any) -> list[float]:
    ballot = torch.tensor([3.0, 4.0])
    communicators.vote(ballot, (1, 2)).wait()
    return ballot.tolist()


def test_each_kind_of_message_goes_by_its_part_once_all_members_have_both() -> None:
    device = Device()
    made = opened(device)
    activation, gradient = (tag_of((forward, 3, 1), num_layers=2) for forward in (True, False))
    again = tag_of((True, 3, 1), num_layers=2, is_rest=True)
    for part in ("host", "device"):
        assert made.send(TENSOR, peer=2, tag=activation) == f"{part} sends"
        assert made.receive(TENSOR, peer=2, tag=gradient) == f"{part} receives"
        assert made.send(TENSOR, peer=2, tag=Tag.UPDATED_PARAMETERS) == f"{part} sends"
        assert made.all_reduce(TENSOR, (1, 2)) == f"{part} reduces"
        for tag in (again, Tag.SNAPSHOT, Tag.LAYER, Tag.PARAMETERS_AGAIN):
            assert made.send(TENSOR, peer=2, tag=tag) == "host sends"
            assert made.receive(TENSOR, peer=2, tag=tag) == "host receives"
        assert voted(made) == [6.0, 8.0]
        if part == "host":
            assert made.all_reduce(TENSOR, (1, 2)) == "host reduces", "they had not formed it when they voted"
            device.allowed.set()
            made._is_formed.wait()
            assert made.all_reduce(TENSOR, (1, 2)) == "host reduces", "a member does not know of the others"
            assert voted(made) == [6.0, 8.0]


def test_a_prepared_generation_begins_with_both_parts() -> None:
    device = Device()
    made = opened(device)
    device.allowed.set()
    made.settle()
    assert made.all_reduce(TENSOR, (1, 2)) == "device reduces"


def test_much_that_is_reduced_waits_for_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_parts, "_MAX_HOST_BYTES", 2 * TENSOR.nbytes)
    device = Device()
    made = opened(device)
    assert made.send(TENSOR, peer=2, tag=Tag.UPDATED_PARAMETERS) == "host sends", "it counts by itself"
    assert [made.all_reduce(TENSOR, (1, 2)) for _ in range(2)] == ["host reduces"] * 2
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
    made._is_formed.wait()
    with pytest.raises(CommunicationError):
        made.all_reduce(TENSOR, (1, 2))
    assert made.send(TENSOR, peer=2, tag=Tag.LAYER) == "host sends"
