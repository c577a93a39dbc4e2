"""Requirements on every lease, whatever the place in which terms are claimed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from chameleon_ft.coordinator.lease import Claim, Lease
from chameleon_ft.errors import ChameleonError, LeaseError
from tests.coordinator.lease.api_server import api_server
from tests.coordinator.lease.etcd_server import ETCD, EtcdServer, etcd_server
from tests.coordinator.lease.places import Etcd, Files, Kubernetes, Place, claim_of, without_renewals


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], EtcdServer]]:
    """Return the server that tests share; another one if the last test has ended it."""
    with contextlib.ExitStack() as stack:
        servers: list[EtcdServer] = []

        def running() -> EtcdServer:
            if not (servers and servers[-1].is_alive()):
                servers.append(stack.enter_context(etcd_server(tmp_path_factory.mktemp("etcd"))))
            return servers[-1]

        yield running


@pytest.fixture(params=["files", "etcd", "kubernetes"])
def place(request: pytest.FixtureRequest, tmp_path: Path, etcd: Callable[[], EtcdServer]) -> Iterator[Place]:
    with contextlib.ExitStack() as stack:
        match request.param:
            case "files":
                yield Files(tmp_path)
            case "etcd":
                if ETCD is None:
                    pytest.skip("there is no etcd; install the package etcd-server")
                yield Etcd(tmp_path, etcd())
            case "kubernetes":
                yield Kubernetes(tmp_path, stack.enter_context(api_server(tmp_path / "api")))


def test_without_a_claim_there_is_no_newest_one(place: Place) -> None:
    assert asyncio.run(place.lease().newest()) is None


def test_a_claim_is_seen_by_all(place: Place) -> None:
    async def scene() -> None:
        assert await place.lease().claim(claim_of(1))
        assert without_renewals(await place.lease().newest()) == claim_of(1)

    asyncio.run(scene())


def test_of_contenders_at_the_same_time_exactly_one_wins_each_term(place: Place) -> None:
    async def scene() -> None:
        leases = [place.lease() for _ in range(8)]
        for term in range(1, 11):
            won = await asyncio.gather(*(lease.claim(claim_of(term, n)) for n, lease in enumerate(leases)))
            assert won.count(True) == 1
            assert without_renewals(await leases[0].newest()) == claim_of(term, won.index(True))

    asyncio.run(scene())


def test_a_term_that_is_taken_or_was_superseded_cannot_be_claimed(place: Place) -> None:
    async def scene() -> None:
        lease = place.lease()
        assert await lease.claim(claim_of(3))
        assert not await place.lease().claim(claim_of(3, contender=1))
        assert not await place.lease().claim(claim_of(2, contender=1))
        assert without_renewals(await lease.newest()) == claim_of(3)

    asyncio.run(scene())


def test_a_claim_whose_answer_was_lost_is_confirmed_when_it_is_repeated(place: Place) -> None:
    async def scene() -> None:
        assert await place.lease().claim(claim_of(1))
        assert await place.lease().claim(claim_of(1))
        assert await place.lease().claim(claim_of(2, contender=1))
        assert not await place.lease().claim(claim_of(1))

    asyncio.run(scene())


def test_renewals_grow_for_all_to_see_until_a_higher_term_is_claimed(place: Place) -> None:
    async def scene() -> None:
        leader, other = place.lease(), place.lease()
        assert await leader.claim(claim_of(1))
        seen = [await renewals(other)]
        for _ in range(3):
            assert await leader.renew(claim_of(1))
            seen.append(await renewals(other))
        assert seen == sorted(set(seen))
        assert await other.claim(claim_of(2, contender=1))
        assert not await leader.renew(claim_of(1))
        assert without_renewals(await leader.newest()) == claim_of(2, contender=1)

    asyncio.run(scene())


def test_a_term_that_is_released_is_seen_to_be(place: Place) -> None:
    async def scene() -> None:
        leader, other = place.lease(), place.lease()
        assert await leader.claim(claim_of(1))
        assert not (await newest_of(other)).is_left()
        await leader.release(claim_of(1))
        assert (await newest_of(other)).is_left()
        await leader.renew(claim_of(1))  # that was under way
        assert (await newest_of(other)).is_left()
        assert await other.claim(claim_of(2, contender=1))
        assert not (await newest_of(leader)).is_left()

    asyncio.run(scene())


async def newest_of(lease: Lease) -> Claim:
    claim = await lease.newest()
    assert claim is not None
    return claim


def test_a_term_of_another_process_cannot_be_renewed(place: Place) -> None:
    async def scene() -> None:
        assert await place.lease().claim(claim_of(1))
        before = await place.lease().newest()
        assert not await place.lease().renew(claim_of(1, contender=1))
        assert await place.lease().newest() == before

    asyncio.run(scene())


def test_a_leader_renews_while_others_contend_for_the_next_term(place: Place) -> None:
    async def scene() -> None:
        leader, contenders = place.lease(), [place.lease() for _ in range(3)]
        assert await leader.claim(claim_of(1))
        *won, renewed = await asyncio.gather(
            *(lease.claim(claim_of(2, n)) for n, lease in enumerate(contenders, 1)), leader.renew(claim_of(1))
        )
        assert won.count(True) == 1
        assert not await leader.renew(claim_of(1))
        assert without_renewals(await leader.newest()) == claim_of(2, won.index(True) + 1), renewed

    asyncio.run(scene())


def test_a_leader_whose_claim_was_removed_makes_it_again(place: Place) -> None:
    async def scene() -> None:
        leader, other = place.lease(), place.lease()
        assert await leader.claim(claim_of(4))
        place.forget()
        assert await leader.renew(claim_of(4))
        assert without_renewals(await other.newest()) == claim_of(4)

    asyncio.run(scene())


def test_a_place_that_breaks_down_is_an_error_that_names_it_and_not_an_answer(place: Place) -> None:
    async def scene() -> None:
        lease = place.lease()
        assert await lease.claim(claim_of(1))
        place.break_down()
        for call in (lease.newest, lambda: lease.renew(claim_of(1)), lambda: lease.claim(claim_of(2))):
            with pytest.raises(LeaseError, match=r"control\.lease"):
                await call()

    asyncio.run(scene())


def test_the_process_of_a_claim_is_this_one() -> None:
    claim = Claim.of_this_process(term=2, address="10.0.0.1:29400")
    assert claim.pid == os.getpid()
    assert claim.host.split()[0] == socket.gethostname()
    assert not claim.is_left()
    assert Claim.from_json(claim.to_json()) == claim


def test_only_a_process_that_would_be_seen_here_is_known_to_have_ended() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        claim = replace(Claim.of_this_process(term=2, address="10.0.0.1:29400"), pid=process.pid)
        assert not claim.is_left()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert claim.is_left(), "its parent has not reaped it"
    assert claim.is_left()
    for host in (socket.gethostname(), f"{claim.host}1", "other"):
        assert not replace(claim, host=host).is_left(), "a container may have the name of its host"


@pytest.mark.parametrize(
    "change", [{"term": 0}, {"term": True}, {"address": ""}, {"host": None}, {"pid": 0}, {"renewals": -1}]
)
def test_a_claim_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    values: dict[str, object] = {"term": 1, "address": "10.0.0.1:29400", "host": "a", "pid": 1}
    with pytest.raises(LeaseError, match=f"{next(iter(change))} = "):
        Claim(**(values | change))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "[]", '{"term": 1}', '{"term": 1, "other": 2}'])
def test_text_that_is_no_claim_is_refused(text: str) -> None:
    with pytest.raises(ChameleonError, match="cannot be read"):
        Claim.from_json(text)


async def renewals(lease: Lease) -> int:
    newest = await lease.newest()
    assert newest is not None
    return newest.renewals
