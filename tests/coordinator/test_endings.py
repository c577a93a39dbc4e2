"""SIGTERM, to any part of a run: what can go on does, and otherwise the run ends with a checkpoint."""

from __future__ import annotations

import os

import pytest

from chameleon_ft.coordinator.commands import Finish as FinishRun
from chameleon_ft.coordinator.events import Interrupted, TookOver
from chameleon_ft.coordinator.state.state import Phase, State
from chameleon_ft.protocol.messages import CheckpointSaved, Drain, Exit, Finish, Hello, HostHello, Refused
from chameleon_ft.protocol.parts import Member
from tests.coordinator.histories import AGENT, History, new_state

CHECKPOINTED = ("terminated", "terminated by SIGTERM, with a checkpoint")
COMMAND = 5000  # its connection
AT_ONCE = ("terminated", "terminated by SIGTERM")


def training(*, hosts: int = 1) -> History:
    """A run of four workers that has taken three steps, on one host or on two."""
    history = History(new_state())
    if hosts == 1:
        history.train()
        return history
    for host in range(hosts):
        history.say(AGENT + host, HostHello(host=f"host {host}", slots=4 // hosts))
    for worker in range(4):
        history.join(worker)
    history.start()
    for _ in range(3):
        history.commit()
    return history


def terminate(history: History) -> None:
    history.happen(Interrupted(at=history.at, signal="SIGTERM"))


def finish(history: History) -> None:
    assert list(history.sent(Finish)), "the workers do not know that the run is to end"
    history.commit()
    history.finish()


@pytest.mark.parametrize("by", ["coordinator", "agent"])
def test_the_reason_names_the_signal(by: str) -> None:
    history = training()
    if by == "coordinator":
        history.happen(Interrupted(at=history.at, signal="SIGHUP"))
    else:
        history.say(AGENT, Drain(signal="SIGHUP"))
    finish(history)
    assert history.state.ended == ("terminated", "terminated by SIGHUP, with a checkpoint")


@pytest.mark.parametrize("by", ["coordinator", "agent", "agents", "workers", "all"])
def test_a_run_that_loses_all_its_workers_ends_with_a_checkpoint(by: str) -> None:
    history = training(hosts=2 if by == "agents" else 1)
    if by in ("coordinator", "all"):
        terminate(history)
    if by in ("agent", "agents", "all"):
        history.say(AGENT, Drain())
    if by == "agents":
        history.wait(0.3)
        assert history.state.ending is None, "the workers of the other host can go on"
        history.say(AGENT + 1, Drain())
    if by in ("workers", "all"):
        for worker in range(4):
            history.tell(worker, Drain())
    assert history.sent(Refused) == []
    finish(history)
    assert history.state.ended == CHECKPOINTED
    assert history.commands[-1] == FinishRun(*CHECKPOINTED)
    (order,) = history.sent(Exit, to=AGENT)
    assert order.exit_code == os.EX_TEMPFAIL
    assert State.from_json(history.state.to_json()) == history.state


def test_workers_of_which_others_remain_are_drained() -> None:
    history = training(hosts=2)
    history.say(AGENT + 1, Drain())
    for worker in (2, 3):
        history.tell(worker, Drain())  # the group of processes gets the signal
    history.wait(0.1)
    history.consider(0, 1)
    history.switch()
    history.commit()
    history.wait(0.1)
    (order,) = history.sent(Exit, to=AGENT + 1)
    assert (order, order.exit_code) == (Exit(reason="drained", is_drained=True), 0)
    assert history.state.ending is None
    assert history.failures == []


@pytest.mark.parametrize(("after_s", "ends"), [(0.0, False), (0.9, False), (1.1, True)])
def test_signals_within_a_second_are_one_and_a_later_one_ends_the_run_at_once(after_s: float, *, ends: bool) -> None:
    history = training()
    terminate(history)
    history.wait(after_s)
    terminate(history)
    assert history.state.ended == (AT_ONCE if ends else None)


def test_ctrl_c_ends_at_once_a_run_that_is_terminated_and_the_other_way_round() -> None:
    history = training()
    terminate(history)
    history.happen(Interrupted(at=history.at))
    assert history.state.ended == ("interrupted", "interrupted by the user")
    history = training()
    history.happen(Interrupted(at=history.at))
    terminate(history)
    assert history.state.ended == AT_ONCE


@pytest.mark.parametrize("times", [1, 2])
def test_a_command_ends_the_run_and_asking_again_changes_nothing(times: int) -> None:
    history = training()
    for _ in range(times):
        history.say(COMMAND, Finish())
    assert history.sent(Finish, to=COMMAND) == [Finish()] * times
    assert history.state.ended is None
    finish(history)
    assert history.state.ended == ("interrupted", "interrupted by the user, with a checkpoint")


@pytest.mark.parametrize("is_ending", [False, True])
def test_a_command_ends_the_run_at_once(*, is_ending: bool) -> None:
    history = training()
    if is_ending:
        history.say(COMMAND, Finish())
    history.say(COMMAND, Finish(at_once=True))
    assert history.state.ended == ("interrupted", "interrupted by the user")


def test_before_training_the_run_ends_at_once() -> None:
    history = History()
    history.say(AGENT, HostHello(host="a host", slots=4))
    terminate(history)
    assert history.state.ended == AT_ONCE


def test_an_agent_that_is_to_leave_before_the_run_begins_leaves_its_places_open() -> None:
    history = History()
    for host in range(2):
        history.say(AGENT + host, HostHello(host=f"host {host}", slots=2))
    for worker in range(3):
        history.join(worker)
    history.say(AGENT + 1, Drain())
    (order,) = history.sent(Exit, to=AGENT + 1)
    assert order.exit_code == os.EX_TEMPFAIL
    assert history.sent(Exit, to=history.connection(2)) == [order]
    history.depart(AGENT + 1)
    assert history.state.phase is Phase.GATHERING


@pytest.mark.parametrize("fails", [True, False])
def test_a_host_that_leaves_and_without_which_there_is_no_plan_ends_the_run(*, fails: bool) -> None:
    history = training(hosts=2)
    history.say(AGENT + 1, Drain())
    history.wait(0.1)
    if fails:
        history.fail_to_consider()
    else:
        history.consider()
    assert len(history.events("drain_failed")) == 1
    finish(history)
    assert history.state.ended == CHECKPOINTED


def test_a_worker_of_a_launcher_is_drained_and_the_last_one_ends_the_run() -> None:
    history = History(new_state(workers=1))
    history.tell(0, Hello(member=Member(0, 0), host="10.0.0.3"))
    history.start()
    history.commit()
    history.tell(0, Drain())
    finish(history)
    assert history.state.ended == CHECKPOINTED


def test_a_loss_on_the_way_does_not_keep_the_run_going() -> None:
    history = training()
    terminate(history)
    history.reap(3)
    history.quiesce()
    history.start()
    finish(history)
    assert history.state.ended == CHECKPOINTED


def test_another_coordinator_ends_the_run_too() -> None:
    history = training()
    terminate(history)
    history.happen(TookOver(at=history.at, term=1))
    assert history.state.ending is not None
    assert history.state.ending.status == "terminated"


@pytest.mark.parametrize("is_terminated", [False, True])
def test_an_end_without_its_checkpoint_says_so(is_terminated: bool) -> None:
    history = training()
    if is_terminated:
        terminate(history)
        history.commit(finish=True)
    while not is_terminated and history.state.committed < history.state.settings.steps:
        history.commit()
    step = history.state.committed
    history.tell(0, CheckpointSaved(generation=1, step=step, layers=(0, 1, 2, 3), error="no space left"))
    history.finish()
    assert history.state.ended is not None
    status, reason = history.state.ended
    assert status == ("terminated" if is_terminated else "failed")
    assert reason.endswith(", but the last checkpoint could not be written, and --resume continues from the one before")
