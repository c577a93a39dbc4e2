"""Measurements of links: the fit, and real processes."""

from __future__ import annotations

import contextlib
import math
import queue
import socket
import threading
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.cluster import Link
from chameleon_ft.config import BackendName, Batch, Parallel, RunConfig
from chameleon_ft.errors import ConfigError, ControlError
from chameleon_ft.worker.communicators.store import serve_store
from chameleon_ft.worker.profiling.links import (
    Exchange,
    Member,
    PeerConnection,
    fit_link,
    local_backend,
    measure_link_to,
    measure_local_links,
    message_sizes,
    run_members,
    serve_link,
)
from tests.golden import refused
from tests.worker.ranks import TIMEOUTS

sizes = st.lists(st.integers(1, 1 << 24), min_size=2, max_size=8, unique=True)
links = st.builds(Link, st.floats(1e-6, 1e-2), st.floats(1e6, 1e11))


def deviation(link: Link, times: Sequence[tuple[int, float]]) -> float:
    return sum(abs(link.message_s(num_bytes) - seconds) / seconds for num_bytes, seconds in times)


@given(links, sizes)
def test_a_link_that_keeps_to_the_model_is_found(link: Link, sizes: list[int]) -> None:
    times = [(size, link.message_s(size)) for size in sizes]
    found = fit_link(times)
    for size, seconds in times:
        assert found.message_s(size) == pytest.approx(seconds, rel=1e-6)


@given(sizes, st.lists(st.floats(1e-6, 10.0), min_size=8, max_size=8, unique=True), links)
def test_no_other_link_fits_better_where_more_takes_longer(sizes: list[int], seconds: list[float], other: Link) -> None:
    times = list(zip(sorted(sizes), sorted(seconds), strict=False))
    assert deviation(fit_link(times), times) <= deviation(other, times) * (1 + 1e-9) + 1e-9


@given(links, st.integers(1, 5), st.floats(2.0, 1000.0))
def test_one_measurement_among_others_that_is_far_off_changes_nothing(link: Link, spoiled: int, factor: float) -> None:
    clean = [(4**power, link.message_s(4**power)) for power in range(6, 13)]
    times = [(n, s * factor if number == spoiled else s) for number, (n, s) in enumerate(clean)]
    found = fit_link(times)
    assert [found.message_s(n) for n, _ in clean] == pytest.approx([s for _, s in clean], rel=1e-6)


def test_sizes_of_the_job_itself_are_measured_too() -> None:
    sizes = message_sizes([131_000, 0, 131_000])
    assert 131_000 in sizes
    assert 0 not in sizes
    assert list(sizes) == sorted(set(sizes))


@pytest.mark.parametrize(
    "wrong",
    [
        {"message_bytes": ()},
        {"message_bytes": (0,)},
        {"message_bytes": (1 << 40,)},
        {"message_bytes": (1,), "repeats": 0},
        {"message_bytes": (1,), "reduced_bytes": (-1,)},
    ],
)
def test_an_impossible_exchange_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Exchange(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize(("devices", "measured_over"), [(1, "gloo"), (2, None)])
def test_two_processes_share_a_single_accelerator_over_gloo(
    devices: int, measured_over: str | None, backend: BackendName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: devices)
    found = local_backend(RunConfig(backend=backend, device="cuda"))
    assert (found.backend, found.share_devices) == (measured_over or backend, measured_over is not None)


@pytest.mark.multiprocess
def test_links_between_processes_of_this_host() -> None:
    config = RunConfig(workers=3, parallel=Parallel(dp=3, pp=1), batch=Batch(micro_batches=3), timeouts=TIMEOUTS)
    found = measure_local_links(config, message_bytes=(64, 100_000), repeats=3)
    assert found.link.latency_s >= 0
    assert math.isfinite(found.link.bytes_per_s)
    assert {reduce.workers for reduce in found.all_reduces} == {2, 3}
    assert all(reduce.time.count == 3 and reduce.time.median_s > 0 for reduce in found.all_reduces)


@pytest.mark.multiprocess
def test_a_failed_member_is_reported_without_waiting_for_the_others() -> None:
    exchange, config = Exchange(message_bytes=(64,), repeats=1), RunConfig(timeouts=TIMEOUTS)
    with serve_store("127.0.0.1") as port:
        both = [
            Member(
                # The second one finds out that it has no such device while the first one waits for it.
                config=config.model_copy(update={"device": "cuda"}) if worker else config,
                exchange=exchange,
                worker=worker,
                workers=2,
                store=f"127.0.0.1:{port}",
                key=b"",
                address="127.0.0.1",
            )
            for worker in range(2)
        ]
        with pytest.raises(ControlError, match='device = "cuda"'):
            run_members(both)


def test_an_unreachable_host_is_named_with_a_remedy() -> None:
    with refused(ConfigError):
        measure_link_to("127.0.0.1:9", RunConfig(), token="secret", message_bytes=(64,), repeats=1)


def test_an_address_of_another_host_cannot_be_answered_on() -> None:
    with refused(ConfigError):
        serve_link("192.0.2.1:9999", token="secret", tell=lambda text: None)


class _HeardError(Exception):
    """Ends a server, which has no end of its own."""


@contextlib.contextmanager
def serving(token: str) -> Iterator[tuple[str, queue.SimpleQueue[str]]]:
    """Serve until the first process that could not measure; yield the address, and what is said."""
    said: queue.SimpleQueue[str] = queue.SimpleQueue()

    def tell(text: str) -> None:
        said.put(text)
        if "could not" in text:
            raise _HeardError

    def serve() -> None:
        with contextlib.suppress(_HeardError):
            serve_link("127.0.0.1:0", token=token, tell=tell)

    server = threading.Thread(target=serve)
    server.start()
    yield said.get().partition(";")[0].removeprefix("answering on "), said
    server.join()


def connected(address: str) -> socket.socket:
    host, port = address.split(":")
    return socket.create_connection((host, int(port)))


def test_an_unknown_request_is_rejected() -> None:
    with serving("secret") as (address, said), connected(address) as stranger:
        connection = PeerConnection.opened(stranger, "secret", answers=False)
        connection.send('{"store": "10.0.0.1:80"}')
        assert "127.0.0.1 could not measure the link to here: what it asked for was not understood" in said.get()


def test_a_process_with_another_token_is_rejected_before_anything_is_parsed() -> None:
    with serving("secret") as (address, said):
        with refused(ControlError):
            measure_link_to(address, RunConfig(), token="guess", message_bytes=(64,), repeats=1)
        assert "could not measure the link to here: the other end has another token" in said.get()


@pytest.mark.parametrize("change", ["repeated", "changed", "of the other direction", "out of order"])
def test_a_message_that_is_not_the_next_of_the_other_end_is_rejected(change: str) -> None:
    ours, theirs = socket.socketpair()
    into, out = socket.socketpair()
    with ours, theirs, into, out:
        made: list[PeerConnection] = []
        answering = threading.Thread(target=lambda: made.append(PeerConnection.opened(theirs, "secret", answers=True)))
        answering.start()
        sender = PeerConnection.opened(ours, "secret", answers=False)
        answering.join()
        (receiver,) = made
        sender.send("first")
        assert receiver.receive() == "first"
        sender.connection = into  # where the bytes can be changed
        sender.send("second")
        second = out.recv(1 << 16)
        sender.send("third")
        third = out.recv(1 << 16)
        ours.sendall(
            {
                "repeated": second + second,
                "changed": second[:-1] + b"D",
                "of the other direction": b"",
                "out of order": third,
            }[change]
        )
        if change == "repeated":
            assert receiver.receive() == "second"
        if change == "of the other direction":
            receiver.connection = into
            receiver.send("answer")
            ours.sendall(out.recv(1 << 16))
            receiver.connection = theirs
        with refused(ControlError):
            receiver.receive()
