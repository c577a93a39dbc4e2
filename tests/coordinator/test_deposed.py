"""A coordinator whose term has run out does nothing until it leads again, and nothing at all if another one leads."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from chameleon_ft.coordinator.coordinator import Coordinator
from chameleon_ft.errors import DeposedError
from chameleon_ft.protocol.messages import Acknowledged, Committed, Drain, Hello, Publish, StandbyHello, Stop
from chameleon_ft.protocol.parts import Member, OperationTimes
from chameleon_ft.protocol.server import Peer
from tests.coordinator.stage import Puppet, Stage, scene, vote
from tests.golden import refused

COMMITTED = {
    "generation": 1,
    "step": 3,
    "vote": vote(3),
    "grad_norm": 0.5,
    "lr": 0.1,
    "step_s": 0.1,
    "times": OperationTimes(forward_s=0.01, backward_s=0.01, longest_s=0.01),
}


@dataclass
class Term:
    """Stands in for the leadership of a coordinator."""

    coordinator: Coordinator
    term: int = 0
    leads: bool = True
    lapse: str = ""
    is_suspended: bool = False
    is_released: bool = False

    def __post_init__(self) -> None:
        self.coordinator._leadership = cast(Any, self)

    def holds(self) -> bool:
        return self.leads

    def end(self) -> None:
        self.leads = False

    async def release(self) -> None:
        self.leads, self.is_released = False, True

    async def keep(self, **_: Any) -> None:
        await asyncio.Event().wait()

    def regain(self) -> None:
        self.leads, self.term = True, self.term + 1
        self.coordinator._regained()


@scene()
async def test_what_happens_meanwhile_is_handled_once_it_leads_again(stage: Stage) -> None:
    stage.train()
    term = Term(stage.coordinator)
    before, sent = stage.coordinator.state, stage.ranks[0].count(Stop)
    term.leads = False
    stage.commit(3)
    stage.reap(1)
    assert stage.coordinator.state is before
    assert stage.ranks[0].count(Stop) == sent
    assert len(stage.run.steps()) == 3
    term.regain()
    assert [record.step for record in stage.run.steps()] == [0, 1, 2, 3]
    assert stage.ranks[0].count(Stop) == sent + 1, "the loss of worker 1 is handled"
    assert stage.ranks[0].last(Acknowledged).term == 1


@scene()
async def test_orders_wait_if_the_term_runs_out_while_they_are_worked_out(stage: Stage) -> None:
    stage.train()
    term = Term(stage.coordinator)

    def write(*_: Any, **__: Any) -> None:
        term.leads = False

    stage.coordinator._journal = cast(Any, SimpleNamespace(write=write))
    stage.reap(1)
    assert stage.ranks[0].count(Stop) == 0
    lost: list[int] = []
    journal = SimpleNamespace(write=lambda *_, **__: lost.append(len(stage.events("lost"))))
    stage.coordinator._journal = cast(Any, journal)
    term.regain()
    assert stage.ranks[0].count(Stop) == 1
    assert lost[0] == 1, "the next entry of the journal does not have that record"


@scene()
async def test_a_mistake_of_a_peer_is_found_later(stage: Stage) -> None:
    stage.train()
    term = Term(stage.coordinator)
    term.leads = False
    stranger = Puppet("stranger")
    stage.say(stranger, Committed.model_validate(COMMITTED))
    assert stranger.sent == []
    term.regain()
    assert stranger.dropped
    assert stage.events("refused")


@scene()
async def test_a_coordinator_that_is_deposed_does_nothing_any_more(stage: Stage) -> None:
    stage.train()
    Term(stage.coordinator, term=1)
    waiting = asyncio.create_task(stage.coordinator.wait())
    hello = Hello(member=Member(0, 1), host="10.0.0.1", resumes=stage.ranks[0].number, known=1, term=7)
    returned = Puppet("worker 0")
    stage.say(returned, hello)
    with refused(DeposedError):
        await waiting
    before = stage.run.events_file.read_text()
    stage.commit(3)
    stage.depart(stage.ranks[1])
    stage.coordinator.interrupt()
    assert returned.sent == []
    assert stage.ranks[0].count(Stop) == 0
    assert stage.run.events_file.read_text() == before
    assert not stage.run.summary_file.exists()


@scene()
async def test_a_coordinator_hands_over_to_one_that_stands_by(stage: Stage) -> None:
    stage.train()
    term = Term(stage.coordinator, term=1)
    waiting = asyncio.create_task(stage.coordinator.wait())
    stage.coordinator.message(cast(Peer, Puppet("standby")), StandbyHello(address="10.0.0.9:7"))
    stage.coordinator.hand_over()
    stage.commit(3)
    with refused(DeposedError):
        await waiting
    assert term.is_released
    assert len(stage.run.steps()) == 4, "until it leaves, it leads"
    assert stage.coordinator.state.ending is None
    assert not stage.events("termination")


@scene()
async def test_it_ends_the_run_if_the_one_that_stands_by_leaves_at_the_same_time(stage: Stage) -> None:
    stage.train()
    Term(stage.coordinator, term=1)
    standby = Puppet("standby")
    stage.coordinator.message(cast(Peer, standby), StandbyHello(address="10.0.0.9:7"))
    stage.coordinator.hand_over(signal.SIGHUP)
    stage.depart(standby)
    await asyncio.sleep(2.0)
    ending = stage.coordinator.state.ending
    assert ending is not None
    assert (ending.status, ending.signal) == ("terminated", "SIGHUP")
    stage.commit(3)
    assert stage.ended is None


@scene()
async def test_it_ends_the_run_if_all_workers_have_to_leave_at_the_same_time(stage: Stage) -> None:
    stage.train()
    term = Term(stage.coordinator, term=1)
    stage.coordinator.message(cast(Peer, Puppet("standby")), StandbyHello(address="10.0.0.9:7"))
    stage.coordinator.hand_over()
    stage.say(stage.host, Drain())
    await asyncio.sleep(2.0)
    assert stage.coordinator.state.ending is not None
    assert stage.coordinator.state.ending.status == "terminated"
    assert stage.ended is None, "the checkpoint is waited for"
    assert not term.is_released


@scene()
async def test_without_one_it_ends_the_run(stage: Stage) -> None:
    stage.train()
    Term(stage.coordinator, term=1)
    stage.coordinator.hand_over()
    assert stage.coordinator.state.ending is not None
    assert stage.coordinator.state.ending.status == "terminated"


@scene()
async def test_peers_are_let_go_only_if_another_coordinator_may_lead(stage: Stage) -> None:
    stage.train()
    term = Term(stage.coordinator)
    term.leads = False
    stage.coordinator._lapsed()
    assert len(stage.live()) == 4
    term.regain()
    standby = Puppet("standby")
    stage.coordinator.message(cast(Peer, standby), StandbyHello(address="10.0.0.9:7"))
    assert stage.ranks[0].last(Acknowledged).standbys == ("10.0.0.9:7",)
    term.leads = False
    stage.coordinator._lapsed()
    assert stage.live() == []
    for rank in stage.ranks.values():
        stage.depart(rank)
    term.regain()
    assert stage.coordinator.state.members.live() == (0, 1, 2, 3), "they come back"


@scene()
async def test_a_peer_that_reconnects_while_the_disk_is_late_keeps_what_is_not_in_the_journal(stage: Stage) -> None:
    stage.train()
    coordinator, before = stage.coordinator, stage.ranks[0]
    coordinator._commands.acknowledge(coordinator.state, before.number)
    handled = before.last(Acknowledged).received
    files = coordinator._recorder.files
    # It stays late, whatever is written.
    files._late_since_s, files._is_announced = 1.0, True
    stage.commit(3)
    returned = Puppet("worker 0")
    stage.say(returned, Hello(member=Member(0, 1), host="10.0.0.1", resumes=before.number, known=1))
    told = returned.last(Acknowledged)
    assert (told.received, told.written) == (handled + 1, handled)
    files._late_since_s = None
    coordinator._commands.acknowledge(coordinator.state, returned.number)
    assert returned.last(Acknowledged).written == handled + 1


@scene()
async def test_what_a_peer_is_told_to_be_in_the_journal_has_been_written(stage: Stage) -> None:
    stage.train()
    coordinator, rank = stage.coordinator, stage.ranks[0]
    written: list[dict[int, int]] = []

    def flush(*, received: dict[int, int]) -> None:
        written.append(received)

    coordinator._journal = cast(Any, SimpleNamespace(flush=flush))
    coordinator._peers.received[rank.number] = 63
    # It changes nothing, but a report before it may not have been due.
    coordinator.message(cast(Peer, rank), Publish(generation=1, key="a", value=b"b"))
    assert written == [{rank.number: 64}]
    assert rank.last(Acknowledged).received == 64

    term = Term(coordinator)
    coordinator._peers.received[rank.number] = 127
    term.leads = False
    coordinator.message(cast(Peer, rank), Publish(generation=1, key="a", value=b"b"))
    assert rank.last(Acknowledged).received == 64, "it does not lead"
