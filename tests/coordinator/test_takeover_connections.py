"""Terms, standbys and connections when another coordinator continues a run, or one that was held up does."""

from __future__ import annotations

from chameleon_ft.coordinator.commands import Acknowledge, Resign
from chameleon_ft.coordinator.events import Disconnected, EndRequested, TermClaimed, TookOver
from chameleon_ft.coordinator.state.state import Phase
from chameleon_ft.errors import ControlError
from chameleon_ft.protocol.messages import Exit, Hello, Refused, StandbyHello
from chameleon_ft.protocol.parts import Member
from tests.coordinator.histories import AGENT
from tests.coordinator.takeovers import replaced, training
from tests.golden import refused


def test_a_rank_that_joins_twice_on_one_connection_is_refused() -> None:
    history = training()
    with refused(ControlError):
        history.join(0)


def test_a_coordinator_resigns_once_a_peer_has_obeyed_a_higher_term() -> None:
    history = training()
    history.take_over()
    before = history.state
    hello = Hello(member=Member(0, 1), host="10.0.0.1", resumes=history.connection(0), known=1, term=2)
    assert history.say(history.connection(0) + 10_000, hello) == (Resign(),)
    assert history.state == before


def test_all_peers_are_told_who_stands_by() -> None:
    history = training()
    history.commands.clear()
    history.say(500, StandbyHello(address="10.0.0.9:7"))
    told = [command.connection for command in history.commands if isinstance(command, Acknowledge)]
    assert sorted(told) == sorted([500, AGENT, *(history.connection(worker) for worker in range(4))])
    assert told[-1] == 500, "the others can find it as soon as it knows"
    assert dict(history.state.standbys) == {500: "10.0.0.9:7"}
    history.commands.clear()
    history.depart(500)
    assert not history.state.standbys
    assert len([command for command in history.commands if isinstance(command, Acknowledge)]) == 5


def test_standbys_are_expected_back_after_a_takeover() -> None:
    history = training()
    history.say(500, StandbyHello(address="10.0.0.9:7"))
    history.say(501, StandbyHello(address="10.0.0.10:7"))
    replaced(history)
    history.say(600, StandbyHello(address="10.0.0.10:7"))
    assert dict(history.state.standbys) == {500: "10.0.0.9:7", 600: "10.0.0.10:7"}
    history.wait(6.0)
    assert dict(history.state.standbys) == {600: "10.0.0.10:7"}, "the first one leads now, or is gone"
    assert history.failures == []
    assert history.events("host_lost") == []


def test_standbys_are_told_the_end() -> None:
    history = training()
    history.say(500, StandbyHello(address="10.0.0.9:7"))
    history.happen(EndRequested(at=history.at, status="failed", reason="enough"))
    assert history.sent(Exit, to=500) == [Exit(reason="enough", status="failed")]


def test_peers_are_told_a_term_that_was_claimed_again() -> None:
    history = training()
    history.commands.clear()
    history.happen(TermClaimed(at=history.at, term=3))
    assert history.state.term == 3
    assert len([command for command in history.commands if isinstance(command, Acknowledge)]) == 5
    assert history.state.phase is Phase.TRAINING


def test_a_worker_that_gives_up_a_silent_connection_and_says_so_has_a_while_to_come_back() -> None:
    history = training()
    history.happen(Disconnected(at=history.at, connection=history.connection(2), will_return=True))
    assert history.state.phase is Phase.TRAINING
    history.return_worker(2)
    history.happen(Disconnected(at=history.at, connection=history.connection(3), will_return=True))
    history.wait(6.0)
    history.quiesce()
    history.start()
    assert history.failures == [(3, "connection", "control connection closed")]


def test_a_connection_that_was_not_acknowledged_before_the_coordinator_was_lost_is_resumed() -> None:
    history = training()
    acknowledged = history.now_at(history.connection(2))
    history.take_over()
    history.return_worker(2)
    replaced(history, absent=(2,))
    history.take_over()
    history.commands.clear()
    history.say(900, Hello(member=Member(2, 1), host="10.0.0.1", resumes=acknowledged, known=1, term=2))
    assert history.sent(Refused) == []
    assert history.state.members[2].connection == 900


def test_connections_that_end_while_this_coordinator_does_not_lead_are_made_again() -> None:
    history = training(steps=9)
    history.wait(0.1)
    connections = [AGENT, *map(history.connection, history.live())]
    history.happen(TermClaimed(at=history.at, term=2))
    for connection in connections:
        history.depart(connection)
    assert history.state.reconnection.awaited == frozenset(connections)
    history.return_agent()
    for worker in history.live():
        history.return_worker(worker, known=1)
    history.commit()
    history.finish()
    assert history.state.ended == ("finished", "all steps are trained")
    assert history.failures == []
    assert [event["term"] for event in history.events("reclaimed")] == [2]


def test_one_that_is_not_made_again_is_a_loss() -> None:
    history = training()
    history.happen(TermClaimed(at=history.at, term=2))
    history.depart(history.connection(2))
    history.wait(6.0)
    assert history.live() == (0, 1, 3)


def test_a_coordinator_that_stood_by_does_no_longer_once_it_leads() -> None:
    history = training()
    for number, address in enumerate(("10.0.0.8:7", "10.0.0.9:7")):
        history.say(50 + number, StandbyHello(address=address))
    history.happen(TookOver(at=history.at, term=2, address="10.0.0.8:7"))
    assert history.state.standbys == {51: "10.0.0.9:7"}
    assert 50 not in history.state.reconnection.awaited
