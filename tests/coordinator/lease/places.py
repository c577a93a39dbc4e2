"""Places in which coordinators claim leadership, as the tests of the lease use them."""

from __future__ import annotations

import shutil
from base64 import b64encode
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

from chameleon_ft.coordinator.lease import Claim, Lease
from chameleon_ft.coordinator.lease.etcd import EtcdLease
from chameleon_ft.coordinator.lease.files import FileLease
from chameleon_ft.coordinator.lease.kubernetes import KubernetesLease
from tests.coordinator.lease.api_server import ApiServer
from tests.coordinator.lease.etcd_server import EtcdServer

_LEASE_S: Final = 60.0  # requests have a share of it; no test waits for so long


class Place(Protocol):
    """One place, which several coordinators reach."""

    def lease(self) -> Lease:
        """Return the lease as one more coordinator sees it."""

    def break_down(self) -> None:
        """Make the place refuse all access from now on."""

    def forget(self) -> None:
        """Remove all claims."""


class Files:
    """A directory."""

    def __init__(self, tmp_path: Path) -> None:
        self.directory = tmp_path / "terms"

    def lease(self) -> Lease:
        return FileLease(self.directory)

    def break_down(self) -> None:
        # Tests may run as root, whom permissions do not stop.
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.write_text("no directory any more", encoding="utf-8")

    def forget(self) -> None:
        shutil.rmtree(self.directory)


class Etcd:
    """A key of an etcd server that tests share."""

    def __init__(self, tmp_path: Path, server: EtcdServer) -> None:
        self._run = tmp_path
        self._server = server

    def lease(self) -> EtcdLease:
        return EtcdLease.at(self._server.address, run=self._run, lease_s=_LEASE_S, environment={})

    def break_down(self) -> None:
        self._server.end()

    def forget(self) -> None:
        key = b64encode(f"/chameleon{self._run}".encode()).decode()
        self.lease()._call("/v3/kv/deleterange", {"key": key})


class Kubernetes:
    """A Lease object of an API server of the test."""

    def __init__(self, tmp_path: Path, server: ApiServer) -> None:
        self._run = tmp_path
        self._server = server

    def lease(self) -> Lease:
        return KubernetesLease.at("kubernetes", run=self._run, lease_s=_LEASE_S, environment=self._server.environment)

    def break_down(self) -> None:
        self._server.rotate_token("")
        self._server.token = "of another cluster"

    def forget(self) -> None:
        self._server.objects.clear()


def claim_of(term: int, contender: int = 0) -> Claim:
    """Return the claim of a contender."""
    return Claim(term=term, address=f"10.0.0.{contender + 1}:29400", host=f"host-{contender}", pid=100 + contender)


def without_renewals(claim: Claim | None) -> Claim | None:
    """Return a claim as it was made."""
    return claim and replace(claim, renewals=0)
