"""Coordinators that are replaced in the middle of a run, replayed through the state machine."""

from __future__ import annotations

from chameleon_ft.config import Checkpoint, Recovery
from chameleon_ft.coordinator.commands import Launch
from chameleon_ft.coordinator.events import Interrupted
from chameleon_ft.coordinator.state.state import Phase
from chameleon_ft.errors import ControlError
from chameleon_ft.protocol.messages import (
    BeginCheckpoint,
    Discard,
    Exit,
    Finish,
    Hello,
    Kill,
    Refused,
    Spawn,
    Started,
    Stop,
)
from chameleon_ft.protocol.parts import Member
from tests.coordinator.histories import AGENT, History, process_of
from tests.coordinator.takeovers import replaced, training
from tests.golden import refused


def test_training_goes_on_as_if_nothing_had_happened() -> None:
    history = training()
    replaced(history)
    assert not history.state.reconnection.awaited
    assert history.sent(Stop) == []
    assert history.sent(Discard) == []
    history.wait(1.0)
    history.commit()
    assert (history.state.generation, history.state.committed) == (1, 4)
    assert history.failures == []
    assert [event["step"] for event in history.events("took_over")] == [3]


def test_a_worker_that_does_not_come_back_is_lost() -> None:
    history = training()
    replaced(history, absent=(2,))
    history.wait(4.0)
    assert history.state.phase is Phase.TRAINING, "it may still come"
    history.wait(2.0)
    history.quiesce()
    history.start()
    assert history.failures == [(2, "connection", "control connection closed")]
    assert history.launched == (0, 1, 3)


def test_a_worker_that_ended_meanwhile_is_lost_as_soon_as_its_agent_says_so() -> None:
    history = training()
    replaced(history, absent=(2,), ranks={(0, 1), (1, 1), (3, 1)})
    history.reap(2)
    history.quiesce()
    history.start()
    assert history.failures == [(2, "child", "SIGKILL")]
    assert history.sent(Spawn) == [], "it was started before"


def test_an_agent_that_does_not_come_back_leaves_its_workers_in_the_run() -> None:
    history = training()
    history.take_over()
    for worker in history.live():
        history.return_worker(worker)
    history.wait(6.0)
    assert [event["host"] for event in history.events("host_lost")] == ["a host"]
    assert history.live() == (0, 1, 2, 3)
    assert history.failures == []


def test_a_recovery_is_begun_anew_and_no_loss_is_forgotten() -> None:
    history = training()
    history.holds = True
    history.reap(1)
    history.quiesce()
    assert history.state.phase is Phase.DECIDING
    replaced(history)
    assert [stop.generation for stop in history.sent(Stop, to=history.now_at(history.connection(0)))] == [3]
    history.holds = False
    history.quiesce()
    history.start()
    assert history.failures == [(1, "child", "SIGKILL")]
    assert history.launched == (0, 2, 3)


def test_workers_that_have_quiesced_are_not_asked_again() -> None:
    history = training()
    history.reap(1)
    history.quiesce(0)
    replaced(history)
    assert history.sent(Stop, to=history.now_at(history.connection(0))) == []
    assert len(history.sent(Stop)) == 2
    history.quiesce(2, 3)
    history.start()
    assert history.launched == (0, 2, 3)


def test_an_interrupt_in_a_recovery_is_not_lost() -> None:
    history = training()
    history.reap(3)
    history.happen(Interrupted(at=history.at))
    replaced(history)
    assert len(history.sent(Finish)) == 3


def test_a_run_that_waits_for_workers_waits_on() -> None:
    history = History()
    history.holds = True
    history.gather_some(2)
    replaced(history)
    assert history.questions == []
    history.join(2)
    history.join(3)
    assert len(history.questions) == 1


def test_before_a_run_begins_a_rank_whose_first_message_is_not_in_the_journal_joins_again() -> None:
    history = History()
    history.holds = True
    history.gather_some(2)
    in_journal = history.state
    history.join(2)
    history.join(3)
    assert len(history.questions) == 1
    history.state = in_journal
    replaced(history, ranks={(worker, 1) for worker in range(4)})
    assert history.sent(Spawn, to=history.now_at(AGENT)) == [], "it runs all of them"
    for worker in (2, 3):
        connection, process = history.connection(worker), process_of(worker)
        hello = Hello(member=Member(worker, 1), host="10.0.0.1", process=process, resumes=connection)
        history.say(connection + 10_000, hello)
    assert history.sent(Refused) == []
    assert history.state.members.live() == (0, 1, 2, 3)
    assert len(history.questions) == 1


def test_before_a_run_begins_another_process_than_the_agents_does_not_join_again() -> None:
    history = History()
    history.gather_some(2)
    replaced(history)
    hello = Hello(member=Member(2, 2), host="10.0.0.1", process=process_of(2, 2), resumes=77)
    with refused(ControlError):
        history.say(78, hello)


def test_a_coordinator_that_was_behind_stops_what_it_does_not_know() -> None:
    history = training()
    history.take_over()
    history.return_worker(0, known=5)
    for worker in (1, 2, 3):
        history.return_worker(worker)
    assert {stop.generation for stop in history.sent(Stop)} == {6}
    history.quiesce()
    history.start()
    history.commit()
    assert history.state.generation == 6
    assert history.state.committed == 4


def test_a_lost_worker_is_refused_and_its_agent_ends_it() -> None:
    history = training()
    history.depart(history.connection(1))
    history.quiesce()
    history.start()
    replaced(history, ranks={(0, 1), (1, 1), (2, 1), (3, 1)})
    assert history.sent(Kill, to=history.now_at(AGENT)) == [Kill(worker=1)]
    history.say(77, Hello(member=Member(1, 1), host="10.0.0.1", resumes=21))
    assert history.sent(Refused, to=77) == [Refused(reason="worker 1 is not in the run any more")]
    history.say(77, Started(generation=1))  # sent before it knew: ignored


def test_a_rank_that_was_not_started_is_started() -> None:
    history = training(recovery=Recovery(respawn=True, respawn_delay_s=0.1))
    history.reap(1)
    history.quiesce()
    history.start()
    history.wait(0.3)
    assert history.state.members[1].incarnation == 2
    replaced(history, ranks={(0, 1), (2, 1), (3, 1)})
    assert history.sent(Spawn) == [Spawn(members=(Member(1, 2),))]


def test_an_interrupted_run_still_ends() -> None:
    history = training()
    history.happen(Interrupted(at=history.at))
    replaced(history)
    assert len(history.sent(Finish)) == 4
    history.commit(finish=True)
    history.finish()
    assert history.state.ended == ("interrupted", "interrupted by the user, with a checkpoint")
    assert len(history.sent(Exit)) == 5


def test_a_requested_checkpoint_is_requested_of_workers_that_come_back() -> None:
    history = training(checkpoint=Checkpoint(every="auto"))
    assert history.state.checkpoints.schedule.is_requested
    replaced(history)
    assert [message.request for message in history.sent(BeginCheckpoint)] == [1, 1, 1, 1]


def test_a_second_replacement_finds_the_peers_of_the_first() -> None:
    history = training()
    replaced(history, absent=(2,))
    replaced(history)
    assert not history.state.reconnection.awaited
    history.commit()
    assert history.state.committed == 4
    assert not [command for command in history.commands if isinstance(command, Launch)]
