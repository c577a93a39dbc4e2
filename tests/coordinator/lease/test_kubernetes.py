"""The lease in Kubernetes: tokens, permissions, objects that others write, and what an administrator sees."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chameleon_ft.coordinator.lease.kubernetes import KubernetesLease
from chameleon_ft.errors import ConfigError, LeaseError
from tests.coordinator.lease.api_server import ApiServer, api_server
from tests.coordinator.lease.places import claim_of, without_renewals


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    with api_server(tmp_path / "api") as started:
        yield started


def lease_in(
    server: ApiServer, *, run: Path = Path("/shared/runs/one"), address: str = "kubernetes"
) -> KubernetesLease:
    return KubernetesLease.at(address, run=run, lease_s=60.0, environment=server.environment)


def the_object(server: ApiServer) -> dict[str, Any]:
    (found,) = server.objects.values()
    return found


def test_the_specification_says_to_an_administrator_which_process_leads(server: ApiServer) -> None:
    async def scene() -> None:
        assert await lease_in(server).claim(claim_of(1))
        assert await lease_in(server).claim(claim_of(2, contender=3))
        claimed = the_object(server)["spec"]
        assert await lease_in(server).renew(claim_of(2, contender=3))
        renewed = the_object(server)["spec"]
        assert claimed | {"renewTime": renewed["renewTime"]} == renewed
        assert (renewed["leaseTransitions"], renewed["leaseDurationSeconds"]) == (2, 60)
        assert renewed["holderIdentity"] == "host-3_103"
        assert renewed["renewTime"] > claimed["renewTime"]

    asyncio.run(scene())


def test_each_run_has_an_object_in_the_namespace_of_the_pod_or_in_another(server: ApiServer) -> None:
    async def scene() -> None:
        for run in ("/shared/runs/one", "/elsewhere/one", "/runs/Größe & Co.", "/runs/???"):
            assert await lease_in(server, run=Path(run)).claim(claim_of(1))
        assert await lease_in(server, address="kubernetes://other").claim(claim_of(1))

    asyncio.run(scene())
    names = [name for namespace, name in server.objects if namespace == "training"]
    assert [name[: name.rindex("-")] for name in names] == ["chameleon-one"] * 2 + ["chameleon-gr-e-co", "chameleon"]
    assert ("other", names[0]) in server.objects


def test_a_token_that_was_replaced_is_read_again(server: ApiServer) -> None:
    lease = lease_in(server)
    assert asyncio.run(lease.claim(claim_of(1)))
    server.rotate_token("second")
    assert asyncio.run(lease.renew(claim_of(1)))


@pytest.mark.parametrize("verb", ["get", "create", "update"])
def test_each_permission_is_asked_for(server: ApiServer, verb: str) -> None:
    async def scene() -> None:
        lease = lease_in(server)
        if verb == "update":
            assert await lease.claim(claim_of(1))
        server.verbs.remove(verb)
        with pytest.raises(LeaseError, match=rf"status 403.*cannot {verb}.*needs a Role with the verbs get, create"):
            await lease.claim(claim_of(2))

    asyncio.run(scene())


def test_what_others_have_written_into_the_object_stays(server: ApiServer) -> None:
    async def scene() -> None:
        lease = lease_in(server)
        assert await lease.claim(claim_of(1))
        found = the_object(server)
        found["metadata"] |= {"labels": {"team": "one"}, "annotations": {"note": "made by hand"}}
        found.pop("spec")
        assert await lease.newest() is None
        assert await lease.claim(claim_of(4))
        assert without_renewals(await lease.newest()) == claim_of(4)
        assert the_object(server)["metadata"]["labels"] == {"team": "one"}
        assert the_object(server)["metadata"]["annotations"]["note"] == "made by hand"

    asyncio.run(scene())


def test_an_object_that_is_changed_or_deleted_between_read_and_write_is_read_again(server: ApiServer) -> None:
    async def scene() -> None:
        lease = lease_in(server)
        assert await lease.claim(claim_of(1))
        read = lease._read
        others = [lambda: lease_in(server)._claim(claim_of(1), is_renewal=True), server.objects.clear]

        def read_before_others() -> Any:
            found = read()
            if others:
                others.pop()()
            return found

        lease._read = read_before_others  # type: ignore[method-assign]
        assert await lease.renew(claim_of(1))
        assert not others
        assert without_renewals(await lease.newest()) == claim_of(1)

    asyncio.run(scene())


def test_an_annotation_that_is_no_claim_is_named(server: ApiServer) -> None:
    lease = lease_in(server)
    assert asyncio.run(lease.claim(claim_of(1)))
    the_object(server)["metadata"]["annotations"]["chameleon-ft/claim"] = "hello"
    with pytest.raises(LeaseError, match=r"training/leases/chameleon-one-\w+.*annotation chameleon-ft/claim: .*delete"):
        asyncio.run(lease.newest())


@pytest.mark.parametrize("missing", ["KUBERNETES_SERVICE_HOST", "CHAMELEON_SERVICE_ACCOUNT"])
def test_outside_of_a_pod_the_error_says_what_to_set(server: ApiServer, missing: str) -> None:
    del server.environment[missing]
    with pytest.raises(ConfigError, match="run the coordinator in a pod with a service account, or set KUBERNETES_"):
        lease_in(server)


def test_an_api_server_of_another_authority_is_not_trusted(server: ApiServer, tmp_path: Path) -> None:
    with api_server(tmp_path / "other") as other:
        server.environment["KUBERNETES_SERVICE_PORT"] = other.environment["KUBERNETES_SERVICE_PORT"]
        with pytest.raises(LeaseError, match="certificate verify failed"):
            asyncio.run(lease_in(server).newest())
