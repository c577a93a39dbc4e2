"""Whole histories of a run, replayed through the state machine: how it begins, goes on elsewhere, and ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chameleon_ft.coordinator.commands import CompleteCheckpoint, Finish, Task
from chameleon_ft.coordinator.events import Decided, EndRequested, Interrupted
from chameleon_ft.coordinator.state.state import State
from chameleon_ft.coordinator.state_machine import step
from chameleon_ft.errors import ControlError
from chameleon_ft.events.records import StepRecord
from chameleon_ft.protocol.messages import CheckpointSaved, Crashed, Exit, HostHello, PeerFailed, Ready, Stop
from tests.coordinator.histories import AGENT, History
from tests.coordinator.plans import a_plan
from tests.coordinator.situations import RESPAWNING, lose_and_respawn, training
from tests.golden import refused


def test_a_run_without_failures() -> None:
    history = training(steps=5)
    history.commit()
    history.commit()
    assert [record.step for record in history.records(StepRecord)] == [0, 1, 2, 3, 4]
    history.finish()
    assert history.state.ended == ("finished", "all steps are trained")
    assert history.commands[-1] == Finish("finished", "all steps are trained")
    for connection in (AGENT, 1, 21, 41, 61):
        assert history.sent(Exit, to=connection) == [Exit(reason="all steps are trained", status="finished")]
    assert history.sent(Stop) == []


def test_nothing_is_commanded_once_the_run_is_over() -> None:
    history = training()
    history.happen(EndRequested(at=history.at, status="failed", reason="enough"))
    count = len(history.commands)
    history.reap(1)
    history.commit_by(0, 3)
    history.wait(10.0)
    history.happen(Interrupted(at=history.at))
    assert len(history.commands) == count
    assert history.state.ended == ("failed", "enough")


@pytest.mark.parametrize("before", [True, False], ids=["before it is ready", "while it gathers"])
def test_the_crash_of_a_rank_while_the_run_gathers_ends_it(before: bool) -> None:
    history = History()
    history.say(AGENT, HostHello(host="a host", slots=4))
    if not before:
        history.join(2)
        history.tell(2, Crashed(error="ValueError: no such layer"))
        assert history.state.ended is not None
        assert history.state.ended[1] == "worker 2 failed in step 0: ValueError: no such layer; see logs/worker-2.log"
    else:
        history.reap(2, 1)
        assert history.state.ended == ("failed", "worker 2 ended before the run began: exit code 1; see logs")


def test_an_interrupt_ends_the_run_after_the_step() -> None:
    history = training()
    history.happen(Interrupted(at=history.at))
    history.commit()
    history.finish()
    assert history.state.ended == ("interrupted", "interrupted by the user, with a checkpoint")


def test_the_end_is_told_to_workers_that_are_loading_and_a_stop_is_not() -> None:
    history = training(recovery=RESPAWNING)
    lose_and_respawn(history)
    history.join(1)
    history.reap(2)
    history.quiesce()
    assert history.sent(Stop, to=22) == []
    history.happen(EndRequested(at=history.at, status="interrupted", reason="enough"))
    assert history.sent(Exit, to=22) == [Exit(reason="enough", status="interrupted")]


def test_a_checkpoint_is_complete_with_its_last_layer_and_void_after_a_return_to_another() -> None:
    history = training()
    history.tell(0, CheckpointSaved(generation=1, step=2, layers=(0, 1), copy_s=0.1, write_s=3.0))
    history.tell(1, CheckpointSaved(generation=1, step=2, layers=(2, 3), copy_s=0.3, write_s=2.0))
    assert [command for command in history.commands if isinstance(command, CompleteCheckpoint)] == [
        CompleteCheckpoint(2, agreed=0)
    ]
    assert history.events("checkpoint") == [{"step": 2, "copy_s": 0.3, "write_s": 3.0}]
    history.tell(0, CheckpointSaved(generation=1, step=3, layers=(0, 1)))
    history.holds = True
    history.reap(1)
    history.quiesce()
    (question,) = history.questions
    plan = replace(a_plan(history.live(), first_step=2), load=2)
    history.happen(Decided(at=history.at, question=question.question, spec=plan))
    assert history.state.committed == 2
    history.tell(2, CheckpointSaved(generation=1, step=3, layers=(2, 3)))
    assert len(history.events("checkpoint")) == 1


def test_decisions_are_prepared_while_all_is_well_and_forgotten_with_it() -> None:
    history = training()
    assert Task.PREPARE_DECISIONS in history.commands
    history.commands.clear()
    history.reap(1)
    history.quiesce()
    assert Task.FORGET_DECISIONS in history.commands


def test_another_process_can_continue_a_run_in_the_middle_of_an_incident() -> None:
    history = training(recovery=RESPAWNING)
    history.tell(3, PeerFailed(generation=1, peer=2, error="reset"))
    history.reap(1)
    history.quiesce(0)
    history.state = State.from_json(history.state.to_json())
    history.quiesce(2, 3)
    history.start()
    history.commit()
    assert history.failures == [(1, "child", "SIGKILL")]
    assert history.state.committed == 4


def test_a_message_that_is_not_allowed_leaves_the_state_as_it_is() -> None:
    history = training()
    before = history.state
    with refused(ControlError):
        history.tell(1, Exit(reason="enough"))
    with refused(ControlError):
        history.say(999, Ready())
    assert history.state is before


def test_the_same_event_leads_to_the_same_state() -> None:
    history = training()
    event = EndRequested(at=history.at, status="failed", reason="enough")
    assert step(history.state, event) == step(history.state, event)
