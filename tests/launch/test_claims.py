"""Which of several processes that start or resume one run leads it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from chameleon_ft.config import Control, RunConfig
from chameleon_ft.coordinator.events import Moment
from chameleon_ft.coordinator.journal import Journal
from chameleon_ft.coordinator.leadership import Leadership
from chameleon_ft.coordinator.lease import Claim, Lease, lease_of
from chameleon_ft.errors import DeposedError, LiveRunError
from chameleon_ft.launch import coordinator as standby
from chameleon_ft.launch.coordinator import _claim, continue_run
from chameleon_ft.launch.processes import FORK
from chameleon_ft.launch.start import RunStart
from chameleon_ft.protocol.server import listening_socket
from chameleon_ft.storage.file_queue import FileQueue
from chameleon_ft.storage.files import ControlAddress, RunDirectory
from tests.coordinator.histories import new_state
from tests.coordinator.test_leadership import Place
from tests.golden import refused


def start(path: Path, *, lease_s: float) -> RunStart:
    run = RunDirectory(path)
    run.path.mkdir(exist_ok=True)
    return cast(RunStart, SimpleNamespace(run=run, config=RunConfig(control=Control(lease_s=lease_s))))


def elsewhere(lease: Lease, term: int) -> Any:
    """Claim a term by a process of another host."""
    return lease.claim(Claim(term=term, address="10.0.0.1:1", host="elsewhere", pid=1))


def test_of_two_that_resume_a_run_at_once_one_leads_and_the_other_says_so(tmp_path: Path) -> None:
    async def scene() -> None:
        first = start(tmp_path / "run", lease_s=1.0)
        await elsewhere(lease_of(first.config, first.run), 4)

        async def led(address: str) -> Leadership:
            leadership = await _claim(first, address)
            keeping = asyncio.create_task(leadership.keep(lambda: None, lambda: None))
            await asyncio.wait({keeping}, timeout=2.0)  # by then the other has seen it renew its term
            keeping.cancel()
            return leadership

        found = await asyncio.gather(led("10.0.0.2:1"), led("10.0.0.3:1"), return_exceptions=True)
        (leader,) = (each for each in found if isinstance(each, Leadership))
        (error,) = (each for each in found if isinstance(each, LiveRunError))
        assert (leader.term, leader.holds()) == (5, True)
        holder = f"process {os.getpid()} on {socket.gethostname()}, which leads in term 5"
        assert f"{first.run.path}: this run is still live in {holder}; " in str(error)
        newest = await lease_of(first.config, first.run).newest()
        assert newest is not None
        assert newest.is_same_leader(leader.claim), "no harm is done to it"

    asyncio.run(scene())


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_run_that_has_ended_elsewhere_is_resumed_at_once_and_one_that_is_lost_after_the_lease(
    tmp_path: Path, *, has_ended: bool
) -> None:
    async def scene() -> None:
        resumed = start(tmp_path / "run", lease_s=1000.0 if has_ended else 0.2)
        await elsewhere(lease_of(resumed.config, resumed.run), 4)
        with FileQueue() as files:
            ended = ("interrupted", "interrupted by the user") if has_ended else None
            journal = Journal(resumed.run.journal_file(3), files)
            journal.begin(replace(new_state(), term=4, ended=cast(Any, ended)), Moment(unix_s=1.0, monotonic_s=1.0))
        assert (await _claim(resumed, "10.0.0.2:1")).term == 5

    asyncio.run(scene())


@pytest.mark.parametrize("error", [LiveRunError(Path("run"), "process 1"), DeposedError(3, "h:1"), DeposedError(3)])
def test_the_launcher_prints_what_its_coordinator_has_raised(error: Exception) -> None:
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_of_two_that_take_a_run_over_at_once_the_second_says_that_it_is_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def started_job(*_: object, **__: object) -> None: ...

    monkeypatch.setattr(standby, "started_job", started_job)
    run = RunDirectory(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        run.write_control(ControlAddress(address=address, token="t", pid=1))
        with refused(LiveRunError):
            asyncio.run(continue_run(RunConfig(), run=run, beside=lambda *_: contextlib.nullcontext(), processes=FORK))


@pytest.mark.parametrize("is_of_this_host", [True, False])
def test_a_standby_that_no_peer_knows_leads_where_the_lost_coordinator_was_if_it_can(
    tmp_path: Path, is_of_this_host: bool
) -> None:
    """Before, it waits for the place of the lease, which does not answer when it starts."""
    run, own = RunDirectory(tmp_path), "127.0.0.2:7"
    with listening_socket("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    before = f"127.0.0.1:{port}" if is_of_this_host else "192.0.2.1:7"
    run.write_control(ControlAddress(address=before, token="t", pid=1))
    place = Place(is_out_of_reach=True)
    place.take(Claim(term=3, address=before, host="elsewhere", pid=1, is_released=True))

    async def scene() -> Leadership:
        claiming = asyncio.create_task(standby._claim_term(place, run, own, 0.1, asyncio.Event()))
        await asyncio.sleep(0)
        place.is_out_of_reach = False
        found = await claiming
        assert isinstance(found, Leadership)
        return found

    leadership = asyncio.run(scene())
    assert (leadership.term, leadership.claim.address) == (4, before if is_of_this_host else own)
