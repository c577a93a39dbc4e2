"""The lease in etcd: members that are gone or hang, users, TLS, values of others."""

from __future__ import annotations

import asyncio
import socket
from base64 import b64encode
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from chameleon_ft.coordinator.lease.base import Server
from chameleon_ft.coordinator.lease.etcd import EtcdLease
from chameleon_ft.errors import ConfigError, LeaseError
from chameleon_ft.protocol.address import split_address
from tests.coordinator.lease.api_server import make_certificate
from tests.coordinator.lease.etcd_server import ETCD, EtcdServer, etcd_server
from tests.coordinator.lease.places import claim_of, without_renewals

pytestmark = pytest.mark.skipif(ETCD is None, reason="there is no etcd; install the package etcd-server")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with etcd_server(tmp_path_factory.mktemp("etcd")) as started:
        yield started


@pytest.fixture
def dead() -> Iterator[str]:
    """Return an endpoint that refuses connections."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{unused.getsockname()[1]}"


def lease_at(
    address: str, run: Path, *, lease_s: float = 60.0, environment: Mapping[str, str] | None = None
) -> EtcdLease:
    return EtcdLease.at(address, run=run, lease_s=lease_s, environment=environment or {})


def server_at(server: EtcdServer, *, timeout_s: float = 60.0) -> Server:
    host, port = split_address(server.address.removeprefix("etcd://"))
    return Server(host=host, port=port, tls=None, timeout_s=timeout_s)


def test_a_member_that_is_gone_is_passed_over(server: EtcdServer, dead: str, tmp_path: Path) -> None:
    alive = server.address.removeprefix("etcd://")
    both = lease_at(f"etcd://{dead},{alive}", tmp_path)
    assert asyncio.run(both.claim(claim_of(1)))
    assert asyncio.run(both.renew(claim_of(1)))
    assert without_renewals(asyncio.run(lease_at(server.address, tmp_path).newest())) == claim_of(1)


def test_if_all_members_are_gone_the_error_names_each(dead: str, tmp_path: Path) -> None:
    with pytest.raises(LeaseError, match=rf"control\.lease, etcd at {dead}: no member can be used \({dead}: .*refused"):
        asyncio.run(lease_at(f"etcd://{dead}", tmp_path).newest())


def test_a_member_that_hangs_is_passed_over_and_the_loop_goes_on(server: EtcdServer, tmp_path: Path) -> None:
    async def scene(hanging: Server) -> None:
        claiming = asyncio.create_task(EtcdLease([hanging, server_at(server)], key="/hangs").claim(claim_of(1)))
        await asyncio.sleep(0)
        assert not claiming.done()
        assert await claiming
        with pytest.raises(LeaseError, match="timed out"):
            await EtcdLease([hanging], key="/hangs").newest()

    with etcd_server(tmp_path / "hanging") as hanging:
        hanging.stop()
        asyncio.run(scene(server_at(hanging, timeout_s=0.2)))


def test_another_server_than_etcd_is_an_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        async def scene() -> None:
            lease = lease_at(f"etcd://127.0.0.1:{listener.getsockname()[1]}", tmp_path)
            asking = asyncio.create_task(lease.newest())
            connection, _ = await asyncio.to_thread(listener.accept)
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                with pytest.raises(LeaseError, match="not that of such a server"):
                    await asking

        asyncio.run(scene())


def test_each_run_has_a_key_below_the_prefix(server: EtcdServer, tmp_path: Path) -> None:
    address = f"{server.address}/my/team/"
    assert asyncio.run(lease_at(address, tmp_path / "one").claim(claim_of(1)))
    assert asyncio.run(lease_at(address, tmp_path / "two").newest()) is None
    key = b64encode(f"/my/team{tmp_path}/one".encode()).decode()
    assert lease_at(server.address, tmp_path)._call("/v3/kv/range", {"key": key})["count"] == "1"


def test_a_value_that_is_no_claim_is_named(server: EtcdServer, tmp_path: Path) -> None:
    lease = lease_at(server.address, tmp_path)
    key = b64encode(f"/chameleon{tmp_path}".encode()).decode()
    lease._call("/v3/kv/put", {"key": key, "value": b64encode(b"hello").decode()})
    with pytest.raises(LeaseError, match=f"etcdctl del /chameleon{tmp_path}"):
        asyncio.run(lease.newest())


def test_users_and_passwords(tmp_path: Path) -> None:
    with etcd_server(tmp_path / "server") as server:
        administrator = lease_at(server.address, tmp_path)
        for path, body in (
            ("user/add", {"name": "root", "password": "secret"}),
            ("role/add", {"name": "root"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("user/add", {"name": "other", "password": "secret"}),
        ):
            administrator._call(f"/v3/auth/{path}", body)
        # Without authentication a user is no obstacle.
        root = lease_at(server.address, tmp_path, environment={"ETCDCTL_USER": "root:secret"})
        assert asyncio.run(root.claim(claim_of(1)))
        administrator._call("/v3/auth/enable", {})

        for environment, problem in (
            ({}, "user name is empty"),
            ({"ETCDCTL_USER": "root:wrong"}, "invalid user ID or password"),
            ({"ETCDCTL_USER": "other:secret"}, "permission denied"),
        ):
            with pytest.raises(LeaseError, match=f"{problem}; set ETCDCTL_USER, as NAME:PASSWORD"):
                asyncio.run(lease_at(server.address, tmp_path, environment=environment).newest())
        root = lease_at(server.address, tmp_path, environment={"ETCDCTL_USER": "root", "ETCDCTL_PASSWORD": "secret"})
        assert asyncio.run(root.renew(claim_of(1)))
        root._token = "expired.1"
        assert asyncio.run(root.renew(claim_of(1)))


def test_tls(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    (tmp_path / "other").mkdir()
    other, _ = make_certificate(tmp_path / "other")
    options = ["--cert-file", str(certificate), "--key-file", str(key)]
    with etcd_server(tmp_path / "server", tls=options) as server:
        trusted = lease_at(server.address, tmp_path, environment={"ETCDCTL_CACERT": str(certificate)})
        assert asyncio.run(trusted.claim(claim_of(1)))
        stranger = lease_at(server.address, tmp_path, environment={"ETCDCTL_CACERT": str(other)})
        with pytest.raises(LeaseError, match="certificate verify failed"):
            asyncio.run(stranger.newest())
        with pytest.raises(LeaseError, match="no member can be used"):
            asyncio.run(lease_at(server.address.replace("etcds", "etcd"), tmp_path).newest())


@pytest.mark.parametrize("name", ["ETCDCTL_CACERT", "ETCDCTL_CERT"])
def test_certificates_that_are_not_there_are_an_error_of_the_configuration(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ETCDCTL_CACERT, ETCDCTL_CERT and ETCDCTL_KEY: No such file"):
        lease_at("etcds://a:2379", tmp_path, environment={name: str(tmp_path / "none.pem")})
