"""Losses of workers, replayed through the state machine: fencing, stopping, deciding, regrouping."""

from __future__ import annotations

import pytest

from chameleon_ft.coordinator.commands import Drop, LogFault, MeasureTransfer, Send
from chameleon_ft.coordinator.events import DecisionFailed, FaultsInjected
from chameleon_ft.coordinator.state.incidents import Fault
from chameleon_ft.coordinator.state.state import Phase
from chameleon_ft.events.records import StepRecord
from chameleon_ft.protocol.messages import Crashed, Inject, Kill, Refused, Started, Stop
from tests.coordinator.histories import AGENT
from tests.coordinator.situations import training


def test_a_lost_worker_is_fenced_and_the_others_go_on() -> None:
    history = training()
    commands = history.reap(1)
    assert Send(AGENT, Kill(worker=1)) in commands
    assert Drop(21) in commands
    assert [worker for worker in range(4) if history.sent(Stop, to=20 * worker + 1)] == [0, 2, 3]
    assert history.state.phase is Phase.STOPPING
    history.quiesce(0, 2)
    assert history.state.phase is Phase.STOPPING
    history.quiesce(3)
    assert (history.state.phase, history.state.generation) == (Phase.REGROUPING, 2)
    assert history.failures == [], "the incident is not over"
    history.start()
    assert history.failures == [(1, "child", "SIGKILL")]
    assert history.members() == (0, 2, 3)
    history.commit()
    assert history.records(StepRecord)[-1].workers == 3


def test_a_worker_whose_agent_is_gone_cannot_be_killed() -> None:
    history = training()
    history.depart(AGENT)
    history.depart(21)
    assert history.sent(Kill) == []
    history.quiesce()
    history.start()
    assert history.failures == [(1, "connection", "control connection closed")]


def test_what_a_lost_worker_still_says_counts_for_nothing() -> None:
    history = training()
    history.reap(1)
    assert history.say(21, Started(generation=1)) == ()
    history.quiesce()
    history.start()
    assert history.say(21, Crashed(error="an error")) == ()
    assert history.failures == [(1, "child", "SIGKILL")]


def test_two_workers_lost_one_while_the_others_quiesce() -> None:
    history = training()
    history.reap(1)
    history.quiesce(0, 2)
    history.reap(0)  # it had quiesced
    assert history.state.phase is Phase.STOPPING
    history.quiesce(3)
    history.start()
    assert [worker for worker, *_ in history.failures] == [1, 0]
    assert history.state.generation == 2, "one stop was enough"
    assert history.members() == (2, 3)


def test_a_loss_while_it_is_decided_makes_the_decision_void() -> None:
    history = training()
    history.holds = True
    history.reap(1)
    history.quiesce()
    (first,) = history.questions
    assert history.state.phase is Phase.DECIDING
    history.reap(2)
    assert history.state.phase is Phase.DECIDING
    first, second = history.questions
    history.answer(first)
    assert len(history.launches) == 1, "no worker trains with one that is lost"
    history.answer(second)
    assert history.launched == (0, 3)
    history.answer(second)
    assert len(history.launches) == 2, "an answer counts once"
    history.start()
    assert [worker for worker, *_ in history.failures] == [1, 2]


def test_a_loss_while_layers_move() -> None:
    history = training()
    history.moves_to = 3
    history.reap(1)
    history.quiesce()
    assert history.state.in_force is not history.state.active, "no worker has switched yet"
    before = history.state.in_force
    history.reap(2)
    assert (history.state.phase, history.state.generation) == (Phase.STOPPING, 3)
    history.moves_to = None
    history.quiesce(placed=1)
    assert history.questions == []
    assert history.launches[-1].generation == 3
    assert before is not None
    assert before.plan.workers == (0, 1, 2, 3)
    history.start()
    assert [worker for worker, *_ in history.failures] == [1, 2]


def test_what_has_moved_is_recorded_and_measured() -> None:
    history = training()
    history.moves_to = 3
    history.reap(1)
    history.quiesce()
    history.start()
    (event,) = history.events("transition")
    assert (event["generation"], event["workers"], event["rounds"], event["moved_bytes"]) == (2, 3, 1, 64)
    assert [command for command in history.commands if isinstance(command, MeasureTransfer)]


def test_when_the_last_worker_is_lost_the_run_ends() -> None:
    history = training()
    for worker in range(4):
        history.reap(worker)
    assert history.state.ended == ("failed", "no worker is left")
    assert len(history.failures) == 4


def test_when_nothing_can_be_decided_the_run_ends() -> None:
    history = training()
    history.holds = True
    history.reap(1)
    history.quiesce()
    (question,) = history.questions
    history.happen(DecisionFailed(at=history.at, question=question.question, reason="no layer is held"))
    assert history.state.ended == ("failed", "no layer is held")
    assert history.failures == [(1, "child", "SIGKILL")]


def test_a_late_failure_of_an_earlier_decision_changes_nothing() -> None:
    history = training()
    history.happen(DecisionFailed(at=history.at, question=0, reason="of the past"))
    assert history.state.phase is Phase.TRAINING


def test_an_injected_failure_is_timed_from_when_it_was() -> None:
    history = training()
    history.say(2000, Inject(worker=1, kind="kill"))
    assert LogFault(1) in history.commands
    history.happen(FaultsInjected(at=history.at, faults=(Fault(1, "kill", history.at.unix_s),)))
    history.now += 0.25
    history.reap(1)
    (loss,) = history.state.incident.losses
    assert loss.noticed_at - (loss.failed_at or 0.0) == pytest.approx(0.25)
    history.say(2000, Inject(worker=1, kind="kill"))
    assert history.sent(Refused, to=2000) == [Refused(reason="worker 1 is not live; live are [0, 2, 3]")]


def test_an_error_of_the_job_is_tried_elsewhere_and_then_ends_the_run_with_a_checkpoint() -> None:
    history = training()
    history.tell(1, Crashed(error="ValueError: a bug", is_alive=True))
    history.quiesce()
    history.start()
    assert history.live() == (0, 2, 3)
    history.tell(2, Crashed(error="ValueError: a bug", is_alive=True))
    history.tell(3, Crashed(error="ValueError: a bug", is_alive=True))
    assert history.live() == (0, 2, 3), "they are needed"
    history.quiesce()
    assert history.state.ending is not None
    assert history.state.ending.trains_no_step
    committed = history.state.committed
    history.start()
    history.finish()
    assert history.live() == (0, 2, 3)
    assert history.state.ended is not None
    status, reason = history.state.ended
    assert status == "failed"
    assert "ValueError: a bug" in reason
    assert f"checkpoint of step {committed}" in reason


def test_an_error_of_the_job_on_the_only_holder_of_a_layer_loses_no_worker() -> None:
    history = training()
    for worker in (1, 2, 3):
        history.reap(worker)
    history.quiesce()
    history.start()
    history.tell(0, Crashed(error="ValueError: a bug", is_alive=True))
    assert history.live() == (0,)
    assert history.state.ending is not None
    assert history.state.ending.trains_no_step
