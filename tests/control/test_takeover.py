"""Coordinators that are replaced in the middle of a run, replayed through the state machine."""

from __future__ import annotations

import pytest

from chameleon_ft.config import Checkpoint, Recovery
from chameleon_ft.control.commands import Acknowledge, Launch, Resign, Task
from chameleon_ft.control.events import Disconnected, EndRequested, Interrupted, TermClaimed, TookOver
from chameleon_ft.control.state.state import Phase
from chameleon_ft.control.wire.messages import (
    Begin,
    BeginCheckpoint,
    Discard,
    Exit,
    Finish,
    Hello,
    Kill,
    PeerFailed,
    Refused,
    Spawn,
    StandbyHello,
    Started,
    Stop,
    Switch,
)
from chameleon_ft.errors import ControlError
from tests.control.histories import AGENT, History, new_state


def training(steps: int = 3, **changes: object) -> History:
    history = History(new_state(**changes))
    history.train(steps)
    return history


def prepared_to_move(*, waves: int) -> History:
    """A run that has lost a worker, and is prepared to move layers to one on another host."""
    history = training()
    history.replace_lost(waves=waves)
    return history


def replaced(history: History, *, ranks: set[tuple[int, int]] | None = None, absent: tuple[int, ...] = ()) -> None:
    """Replace the coordinator, and have its peers come back."""
    history.commands.clear()
    history.take_over()
    history.return_agent(ranks=ranks)
    for worker in history.live():
        if worker not in absent:
            history.return_worker(worker, known=history.state.newest)


def test_training_goes_on_as_if_nothing_had_happened() -> None:
    history = training()
    replaced(history)
    assert not history.state.returning
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


def test_a_generation_whose_orders_may_not_have_been_sent_gives_way_to_another() -> None:
    history = training()
    history.reap(1)
    history.quiesce()
    assert history.state.phase is Phase.REGROUPING
    generation = history.state.generation
    replaced(history)
    # Worker 3 has its orders and sees that worker 2 leaves the generation, before it is told to do so.
    history.tell(3, PeerFailed(generation=generation, peer=2, error="closed"))
    history.quiesce()
    history.start()
    history.commit()
    assert history.state.committed == 4
    assert history.failures == [(1, "child", "SIGKILL")]


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


def test_the_first_plan_is_asked_for_again() -> None:
    history = History()
    history.holds = True
    history.gather()
    replaced(history)
    (question,) = history.questions
    assert question.holds_nothing
    history.answer(history.questions.pop())
    history.start()
    history.commit()
    assert history.state.committed == 1


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_plan_that_is_chosen_before_all_have_come_back_reaches_all(has_begun: bool) -> None:
    """The coordinator is lost when it knows all that it needs to decide, and no peer has to report anything more."""
    history = History()
    history.holds = True
    history.gather()
    if has_begun:
        history.answer(history.questions.pop())
        history.start()
        history.commit()
        history.reap(3)
        history.quiesce(1, 2)
    history.take_over()
    history.holds = False
    history.return_agent()
    if has_begun:
        history.return_worker(0)
        history.quiesce(0)
    assert history.state.phase is Phase.REGROUPING
    assert len(history.launches) == 1 + has_begun
    for worker in history.live():
        if worker or not has_begun:
            history.return_worker(worker)
    assert {stop.generation for stop in history.sent(Stop)} >= {history.state.generation}
    history.quiesce(layers=range(4) if has_begun else ())
    assert not history.launches[-1].returning
    history.start()
    history.commit()


def test_an_interrupt_in_a_recovery_is_not_lost() -> None:
    history = training()
    history.reap(3)
    history.happen(Interrupted(at=history.at))
    replaced(history)
    assert len(history.sent(Finish)) == 3


def test_a_newcomer_that_was_away_during_the_switch_begins_once_it_is_back() -> None:
    history, number = preparing()
    history.prepare()
    history.take_over()
    history.return_agent()
    for worker in (0, 1, 2):
        history.return_worker(worker, known=number, switch_to=number)
    history.commit_by(0, history.state.committed, switch=True)
    assert history.state.generation == number
    history.commands.clear()
    history.return_worker(3, known=number)
    (begin,) = history.sent(Begin, to=history.now_at(history.connection(3)))
    assert (begin.generation, begin.first_step) == (number, history.state.committed)
    assert history.sent(Stop) == []
    history.start()
    history.commit()
    assert history.members() == (0, 1, 2, 3)


def test_a_plan_that_was_found_while_peers_are_away_is_looked_for_again() -> None:
    history = training(recovery=Recovery(respawn=True, respawn_delay_s=0.1))
    history.reap(3)
    history.quiesce()
    history.start()
    history.commit()
    history.wait(0.3)
    history.come_back(3)
    history.wait(0.7)
    history.happen(Disconnected(at=history.at, connection=history.connection(2), will_return=True))
    history.consider(0, 1, 2, 3)
    assert history.state.next is None
    history.return_worker(2)
    history.wait(0.1)
    history.consider(0, 1, 2, 3)
    history.switch()
    assert history.members() == (0, 1, 2, 3)


def test_layers_do_not_begin_to_move_while_a_worker_is_away() -> None:
    history = prepared_to_move(waves=2)
    history.happen(Disconnected(at=history.at, connection=history.connection(0), will_return=True))
    history.commit_by(1, history.state.committed, switch=True)
    assert history.state.active is not None
    assert history.state.active.migration is not None
    history.return_worker(0, known=history.state.newest)
    history.start()
    history.commit()
    history.wait(0.1)
    assert history.state.next is not None
    assert history.state.next.plan.policy == "cancelled-migration"
    history.switch()
    history.wait(0.1)
    assert history.considerations, "another course is looked for"


def test_first_orders_that_were_not_sent_are_made_again() -> None:
    history = History()
    history.gather()
    assert history.state.phase is Phase.REGROUPING
    history.holds = True
    replaced(history)
    history.quiesce(layers=())
    (question,) = history.questions
    assert question.holds_nothing


def test_a_run_that_waits_for_workers_waits_on() -> None:
    history = History()
    history.holds = True
    history.gather_some(2)
    replaced(history)
    assert history.questions == []
    history.join(2)
    history.join(3)
    assert len(history.questions) == 1


def preparing() -> tuple[History, int]:
    """Have a worker come back; return the number of the generation that is prepared for it, too."""
    history = training(recovery=Recovery(respawn=True, respawn_delay_s=0.1))
    history.reap(3)
    history.quiesce()
    history.start()
    history.commit()
    history.wait(0.3)
    history.come_back(3)
    history.wait(0.7)
    history.consider(0, 1, 2, 3)
    assert history.state.next is not None
    return history, history.state.next.number


@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_prepared_generation_is_given_up_unless_workers_may_have_switched(is_prepared: bool) -> None:
    history, number = preparing()
    if is_prepared:
        history.prepare()
    replaced(history)
    assert {each.generation for each in history.sent(Switch)} == ({number} if is_prepared else set())
    assert {each.generation for each in history.sent(Discard)} == (set() if is_prepared else {number})
    if is_prepared:
        history.commit(switch=True)
        history.start()
        assert history.state.generation == number
        assert history.members() == (0, 1, 2, 3)
    else:
        history.wait(0.1)
        assert history.considerations, "it is considered anew"


@pytest.mark.parametrize("has_moved", [False, True])
def test_a_switch_that_the_journal_lacks_is_found_by_what_workers_have_been_told(has_moved: bool) -> None:
    """The disk did not answer when all had prepared, and the coordinator was lost after they had switched."""
    history, number = preparing()
    history.prepare(0, 1, 2)
    journaled = history.state
    history.prepare(3)
    history.commit(switch=True)
    history.start()
    switched = history.state.active
    history.state = journaled
    history.commands.clear()
    history.take_over()
    history.return_agent()
    for worker in range(4):
        history.return_worker(worker, known=number, switch_to=number)
        assert history.sent(Discard, to=history.now_at(history.connection(worker))) == []
    assert {stop.generation for stop in history.sent(Stop)} == {number + 1}
    history.holds = True
    history.quiesce(placed=number if has_moved else 0)
    assert switched is not None
    assert history.state.active is not None
    assert history.state.in_force is not None
    if has_moved:
        assert history.state.active.plan == switched.plan
        assert history.state.in_force.plan.placement == switched.plan.placement
    else:
        assert history.state.in_force.plan.placement == journaled.in_force.plan.placement  # type: ignore[union-attr]
    assert history.failures[1:] == []
    assert history.state.doubtful is None


def test_workers_that_follow_a_plan_that_the_journal_lacks_end_the_run() -> None:
    history = training()
    history.take_over()
    history.return_agent()
    for worker in range(4):
        history.return_worker(worker, known=2, switch_to=2)
    history.quiesce(placed=2)
    assert history.state.ended == ("failed", "the plan that workers follow is not in the journal of the run; resume it")


def test_layers_that_move_are_given_up() -> None:
    history = prepared_to_move(waves=1)
    history.commit(switch=True)
    history.start()
    assert history.state.active is not None
    assert history.state.active.migration is not None
    history.commands.clear()
    history.take_over()
    history.return_agent()
    history.return_agent(AGENT + 1)
    for worker in history.live():
        history.return_worker(worker, known=history.state.newest)
    history.wait(0.1)
    assert Task.PREPARE_GENERATION in history.commands
    assert history.state.next is not None
    assert history.state.next.plan.policy == "cancelled-migration"


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
    history.say(77, Hello(worker=1, host="10.0.0.1", incarnation=1, resumes=21))
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
    assert history.sent(Spawn) == [Spawn(workers=(1,), incarnations=(2,))]


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
    assert history.state.schedule.is_requested
    replaced(history)
    assert [message.request for message in history.sent(BeginCheckpoint)] == [1, 1, 1, 1]


def test_a_second_replacement_finds_the_peers_of_the_first() -> None:
    history = training()
    replaced(history, absent=(2,))
    replaced(history)
    assert not history.state.returning
    history.commit()
    assert history.state.committed == 4
    assert not [command for command in history.commands if isinstance(command, Launch)]


def test_a_run_whose_first_plan_was_not_written_ends_with_the_reason() -> None:
    history = History()
    history.holds = True
    history.gather()
    history.take_over()
    history.return_agent()
    history.return_worker(0, known=history.state.newest + 1)
    assert history.state.ended is not None
    assert history.state.ended == (
        "failed",
        "the first plan is not in the journal, and workers have it; resume the run",
    )


def test_a_rank_that_joins_twice_on_one_connection_is_refused() -> None:
    history = training()
    with pytest.raises(ControlError, match="worker 0 has joined already"):
        history.join(0)


def test_a_coordinator_resigns_once_a_peer_has_obeyed_a_higher_term() -> None:
    history = training()
    history.take_over()
    before = history.state
    hello = Hello(worker=0, host="10.0.0.1", incarnation=1, resumes=history.connection(0), known=1, term=2)
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
    history.say(900, Hello(worker=2, host="10.0.0.1", incarnation=1, resumes=acknowledged, known=1, term=2))
    assert history.sent(Refused) == []
    assert history.state.members[2].connection == 900


def test_connections_that_end_while_this_coordinator_does_not_lead_are_made_again() -> None:
    history = training(steps=9)
    history.wait(0.1)
    connections = [AGENT, *map(history.connection, history.live())]
    history.happen(TermClaimed(at=history.at, term=2))
    for connection in connections:
        history.depart(connection)
    assert history.state.returning == frozenset(connections)
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
    assert 50 not in history.state.returning
