"""A coordinator that continues a run while a plan is chosen, a generation is prepared, or layers move."""

from __future__ import annotations

import pytest

from chameleon_ft.config import Recovery
from chameleon_ft.coordinator.commands import Task
from chameleon_ft.coordinator.events import Disconnected
from chameleon_ft.coordinator.handlers.switches import without_migration
from chameleon_ft.coordinator.state.state import Phase
from chameleon_ft.protocol.messages import Begin, Discard, PeerFailed, Stop, Switch
from tests.coordinator.histories import AGENT, History
from tests.coordinator.takeovers import prepared_to_move, preparing, replaced, training


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
    assert not history.launches[-1].reconnection.awaited
    history.start()
    history.commit()


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
    assert history.state.switches.next is None
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
    assert history.state.switches.next is not None
    assert history.state.switches.next.spec.policy == "cancelled-migration"
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
    assert history.state.reconnection.doubtful is None


@pytest.mark.parametrize("migrates", [False, True])
def test_a_plan_that_the_journal_lacks_is_that_which_workers_follow(migrates: bool) -> None:
    """The disk was full when worker 3 was lost; then layers may have begun to move to a worker that had joined."""
    history = training()
    journaled = history.state
    history.reap(3)
    history.quiesce()
    history.start()
    history.commit()
    followed, number = history.state.active, history.state.generation
    assert followed is not None
    if migrates:
        other = prepared_to_move(waves=1)
        other.commit(switch=True)
        assert other.state.active is not None
        assert other.state.active.migration is not None
        followed, number = other.state.active, other.state.generation
    history.state = journaled
    history.take_over()
    history.return_agent()
    history.reap(3)
    assert history.state.generation <= number, "it has the number of one that workers know"
    for worker in (0, 1, 2):
        history.return_worker(worker, known=number)
    assert history.state.generation > number
    history.holds = True
    history.quiesce(0, placed=number - 1)
    history.quiesce(1, 2, placed=number, spec=followed.to_json())
    (question,) = history.questions
    assert question.active_generation == number
    assert question.in_force is not None
    assert question.in_force.plan == (without_migration(followed) if migrates else followed).plan
    assert not any(report.spec for report in question.quiesced.values()), "it is kept once"
    assert [event["generation"] for event in history.events("plan_restored")] == [number]
    history.holds = False
    history.answer(history.questions.pop())
    history.start()
    history.commit()
    assert history.state.ended is None


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
    assert history.state.switches.next is not None
    assert history.state.switches.next.spec.policy == "cancelled-migration"


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
