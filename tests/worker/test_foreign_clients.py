"""Processes that do not belong to a run and reach its ports: whatever they send, they change nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import psutil
import pytest
from torch._C._distributed_c10d import TCPStore
from websockets.asyncio.server import serve
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from chameleon_ft.protocol import server
from chameleon_ft.protocol.address import bearer, split_address, websocket_url
from chameleon_ft.protocol.codec import encode
from chameleon_ft.protocol.messages import Publish
from chameleon_ft.storage.files import RunDirectory
from tests.harness import Ended, ScriptedView, assert_as_the_plain_loop, fails, small_config, train_here

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("silence_is_short")]

NOISE = (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04\x95" + b"A" * 200, b"\xff" * 4096)


@pytest.fixture
def silence_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the coordinator, before it ends, wait less for clients that say nothing."""
    monkeypatch.setattr(server, "serve", partial(serve, open_timeout=4.0))


def listening_ports() -> set[int]:
    """The TCP ports on which this process and its descendants listen."""
    ports = set()
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            found = process.net_connections("tcp")
            ports |= {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN}
    return ports


@contextmanager
def foreign_clients(before: set[int]) -> Iterator[set[int]]:
    """Connect to all ports but those of `before` as soon as they are there, send noise, and stay; yields the ports."""
    is_over, found = threading.Event(), set[int]()
    stays = contextlib.ExitStack()

    def disturb() -> None:
        while not is_over.wait(0.05):
            for port in listening_ports() - before - found:
                found.add(port)
                for noise in NOISE:
                    with contextlib.suppress(OSError):
                        client = stays.enter_context(socket.create_connection(("127.0.0.1", port), timeout=1.0))
                        client.sendall(noise)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()
        stays.close()


def assert_unharmed(ended: Ended, *, lost: set[int]) -> None:
    assert ended.code == 0, ended.summary["reason"]
    assert ended.lost == lost, "no innocent worker"
    assert ended.summary["samples_lost"] == ended.summary["samples_repeated"] == 0
    assert_as_the_plain_loop(ended)


@pytest.mark.parametrize("tls", ["off", "generate"])
def test_noise_and_silence_on_every_port_harm_no_worker(tmp_path: Path, tls: str) -> None:
    config = small_config(tmp_path, failures=(fails(1, step=4),))
    config = config.model_copy(update={"control": config.control.model_copy(update={"tls": tls})})
    with foreign_clients(listening_ports()) as disturbed:
        ended = train_here(config, tmp_path / "run")

    assert_unharmed(ended, lost={1})
    assert len(disturbed) > config.workers, "the coordinator's port, and those of the workers"


def test_no_key_can_be_written_without_the_token(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    refused = []

    def write_keys() -> None:
        control = run.read_control()
        host, port = split_address(control.address)
        forged = Publish(generation=2, key="generation-2/group-0/0/0", value=bytes(3))
        for token in ("", "guessed"):
            try:
                with connect(websocket_url(control.address), additional_headers=bearer(token), proxy=None) as client:
                    client.send(encode(forged))
            except InvalidStatus:
                refused.append(token)
        with pytest.raises(RuntimeError):
            TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=0.5))
        refused.append("TCPStore")

    view = ScriptedView(at_step={2: lambda: threading.Thread(target=write_keys).start()})
    ended = train_here(small_config(tmp_path, steps=40, failures=(fails(1, step=30),)), run.path, view=view)

    assert refused == ["", "guessed", "TCPStore"]
    assert_unharmed(ended, lost={1})
    assert {event["reason"] for event in ended.events("refused")} >= {"wrong join token"}


def test_the_coordinator_listens_on_one_port(tmp_path: Path) -> None:
    before, during = listening_ports(), set[int]()
    me = psutil.Process()

    def look() -> None:
        ours = {each.laddr.port for each in me.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
        during.update(ours - before)

    run = RunDirectory(tmp_path / "run")
    ended = train_here(small_config(tmp_path, steps=3), run.path, view=ScriptedView(at_step={1: look}))
    assert ended.code == 0
    assert len(during) == 1


def test_a_host_with_other_ports_than_the_firewall_leaves_open_starts_no_worker(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config = config.model_copy(update={"control": config.control.model_copy(update={"worker_ports": "1-2"})})
    ended = train_here(config, tmp_path / "run")

    assert (ended.code, ended.steps) == (1, [])
    assert "control.worker_ports = 1-2: this host gives workers ports from" in ended.summary["reason"]
    assert 'run `sysctl -w net.ipv4.ip_local_port_range="1 2"`' in ended.summary["reason"]
