"""The numbers of a job, and the addresses of hosts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from chameleon_ft.cluster import Worker as ClusterWorker
from chameleon_ft.config import Batch, Parallel, RunConfig
from chameleon_ft.errors import ConfigError
from chameleon_ft.protocol.address import (
    address_of_host,
    join_address,
    local_address_towards,
    require_worker_ports,
    split_address,
    websocket_url,
)
from chameleon_ft.protocol.job_info import OperationRate
from chameleon_ft.protocol.parts import BoundaryMessage, InspectedLayers, LeafMessage
from tests.coordinator.stage import JOB
from tests.golden import refused


def test_the_costs_of_a_job_follow_its_layers() -> None:
    config = RunConfig(
        job="a.job", workers=2, parallel=Parallel(dp=1, pp=2), batch=Batch(micro_batches=4, micro_batch_size=3)
    )
    job = dataclasses.replace(JOB, relative_costs=(1.0, 2.0, 4.0, 1.0))
    costs = job.costs(config, {1: "b", 0: "a"}, OperationRate(forward_s=8.0, backward_s=16.0))
    assert [layer.forward_s for layer in costs.workload.layers] == [1.0, 2.0, 4.0, 1.0]
    assert [layer.backward_s for layer in costs.workload.layers] == [2.0, 4.0, 8.0, 2.0]
    assert (costs.workload.micro_batches, costs.workload.micro_batch_size) == (4, 3)
    assert costs.cluster.workers == (ClusterWorker(0, "a"), ClusterWorker(1, "b"))


def test_a_fingerprint_tells_models_apart() -> None:
    assert JOB.fingerprint == dataclasses.replace(JOB, model="another description").fingerprint
    outputs = [
        BoundaryMessage(leaves=(LeafMessage(shape=shape, dtype=dtype),))
        for shape, dtype in (((2, 8), "float64"), ((8, 2), "float32"))
    ]
    others = [
        dataclasses.replace(JOB, param_bytes=(256, 256, 256, 260)),
        *(
            dataclasses.replace(JOB, layers=InspectedLayers(boundaries=(each, *JOB.layers.boundaries[1:])))
            for each in outputs
        ),
    ]
    assert len({JOB.fingerprint, *(other.fingerprint for other in others)}) == 4


@pytest.mark.parametrize(
    ("address", "parts"),
    [("a.b:1", ("a.b", 1)), ("[::1]:29400", ("::1", 29400)), ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1))],
)
def test_addresses_come_apart_and_together(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts
    assert join_address(*parts) == address
    assert websocket_url(address) == f"ws://{address}/"
    assert websocket_url(address, tls=True) == f"wss://{address}/"


def test_a_host_that_uses_other_ports_than_the_firewall_leaves_open_is_told_what_to_run(tmp_path: Path) -> None:
    kernel_range = tmp_path / "ip_local_port_range"
    kernel_range.write_text("32768\t60999\n")
    for allowed in ("", "32768-60999", "1-65535"):
        require_worker_ports(allowed, kernel_range=kernel_range)
    for allowed in ("32769-60999", "32768-60998", "40000-49999"):
        with refused(ConfigError):
            require_worker_ports(allowed, kernel_range=kernel_range)


def test_an_ipv6_address_may_lack_its_brackets() -> None:
    """As in the manifests of Kubernetes, which have the address of a pod of either kind."""
    assert split_address("fd00::7:8790") == ("fd00::7", 8790)


@pytest.mark.parametrize(
    "address",
    [
        *("", "host", "host:", ":1", "host:port", "host:65536", "host:-1", "host:1 ", "host:" + "9" * 5000),
        *("::1", "[::1]", "[host:1", "host]:1", "[]:1", "a:b:1"),
        *("a..b:1", "a" * 64 + ":1", "http://host:1", "user@host:1", "host/path:1", "a b:1", "a\0b:1"),
    ],
)
def test_what_is_no_address(address: str) -> None:
    with refused(ConfigError):
        split_address(address)


def test_the_way_to_loopback_is_loopback() -> None:
    assert local_address_towards("127.0.0.1:9") == "127.0.0.1"
    with refused(ConfigError):
        local_address_towards("no.such.host.invalid:9")


def test_a_host_is_named_by_its_interface_or_as_it_is() -> None:
    assert address_of_host("lo") == "127.0.0.1"
    assert address_of_host("node7.example") == "node7.example"
    assert address_of_host("10.0.0.7") == "10.0.0.7"


def route_missing(address: str) -> str:
    raise ConfigError("there is no route")


def the_interfaces_are(monkeypatch: pytest.MonkeyPatch, **addresses: str | None) -> None:
    monkeypatch.setattr("socket.if_nameindex", lambda: list(enumerate(addresses)))
    monkeypatch.setattr("chameleon_ft.protocol.address._interface_address", addresses.get)
    monkeypatch.setattr("chameleon_ft.protocol.address.local_address_towards", route_missing)


def test_the_only_interface_is_found_without_a_route(monkeypatch: pytest.MonkeyPatch) -> None:
    the_interfaces_are(monkeypatch, lo="127.0.0.1", eth0="10.0.0.1", ib0=None)
    assert address_of_host("auto") == "10.0.0.1"
    with refused(ConfigError):
        address_of_host("ib0")


def test_of_several_interfaces_one_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    the_interfaces_are(monkeypatch, lo="127.0.0.1", eth0="10.0.0.1", ib0="10.1.0.1")
    with refused(ConfigError):
        address_of_host("auto")
    assert address_of_host("ib0") == "10.1.0.1"


def test_a_machine_that_has_ipv6_alone_is_reached_by_that(monkeypatch: pytest.MonkeyPatch) -> None:
    the_interfaces_are(monkeypatch, lo="127.0.0.1", eth0=None)

    def routed(address: str) -> str:
        return "fd00::7" if address.startswith("[2001:db8:") else route_missing(address)

    monkeypatch.setattr("chameleon_ft.protocol.address.local_address_towards", routed)
    assert address_of_host("auto") == "fd00::7"


def test_auto_is_the_source_of_the_default_route(monkeypatch: pytest.MonkeyPatch) -> None:
    the_interfaces_are(monkeypatch, lo="127.0.0.1", eth0="10.0.0.1", ib0="10.1.0.1")
    monkeypatch.setattr("chameleon_ft.protocol.address.local_address_towards", lambda address: "10.1.0.1")
    assert address_of_host("auto") == "10.1.0.1"
