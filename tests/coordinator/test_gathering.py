"""Workers that are lost, or hang, before they take part: before a run begins, and as newcomers of a live one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chameleon_ft.config import Recovery, Timeouts
from chameleon_ft.coordinator.detectors.base import Fenced, Starting
from chameleon_ft.coordinator.detectors.process import StartTimeout
from chameleon_ft.coordinator.state.state import Phase
from chameleon_ft.protocol.messages import Hello, HostHello, Kill, Ready, Spawn, WorkerExited
from chameleon_ft.protocol.parts import Member
from tests.coordinator.histories import AGENT, History, new_state
from tests.coordinator.situations import RESPAWNING

OTHER = 2000  # connection of another agent
TIMEOUTS = Timeouts(first_step_s=150.0)


def gathering(**changes: object) -> History:
    """Workers 0 to 2 have joined; worker 3 has been started by the same agent."""
    history = History(new_state(**changes))
    history.gather_some(3)
    return history


def two_hosts(**changes: object) -> History:
    """Workers 0 and 1 on one host have joined; those of another host have been started."""
    history = History(new_state(**changes))
    history.say(AGENT, HostHello(host="a host", slots=2))
    history.say(OTHER, HostHello(host="another", slots=2))
    history.join(0)
    history.join(1)
    return history


def exited(worker: int, incarnation: int = 1) -> WorkerExited:
    return WorkerExited(member=Member(worker, incarnation), exit_code=-9)


# --- before the run begins -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("worker", [1, 3], ids=["it had joined", "it had not"])
def test_a_worker_that_is_lost_before_the_run_begins_is_started_again(worker: int) -> None:
    history = gathering(recovery=RESPAWNING)
    history.reap(worker)
    assert history.state.phase is Phase.GATHERING
    (event,) = history.events("join_failed")
    assert event["message"] == (
        f"worker {worker} was lost before the run began: SIGKILL; "
        "it is started again 4.000 s after its process has ended"
    )
    history.wait(3.9)
    assert len(history.sent(Spawn, to=AGENT)) == 1
    history.wait(0.2)
    assert history.sent(Spawn, to=AGENT)[-1] == Spawn(members=(Member(worker, 2),))
    for each in {worker, 3}:
        history.join(each)
    history.start()
    history.commit()
    assert history.members() == (0, 1, 2, 3)
    assert history.failures == [], "nothing was trained"


def test_a_worker_that_is_lost_while_the_first_plan_is_made_is_waited_for() -> None:
    history = gathering(recovery=RESPAWNING)
    history.holds = True
    history.join(3)
    (asked,) = history.questions
    history.reap(2)
    history.answer(asked)
    assert history.launches == [], "the plan includes a lost worker"
    history.wait(4.1)
    history.holds = False
    history.questions.clear()
    history.join(2)
    assert history.launched == (0, 1, 2, 3)


def test_a_worker_that_is_lost_while_the_first_generation_forms_comes_back_later() -> None:
    history = gathering(recovery=RESPAWNING)
    history.join(3)
    assert history.state.phase is Phase.REGROUPING
    history.reap(2)
    history.quiesce(layers=())
    assert history.launched == (0, 1, 3)
    history.start()
    history.commit()
    history.wait(4.1)
    history.come_back(2)
    history.wait(1.0)
    assert len(history.considerations) == 1


def test_a_worker_that_is_lost_too_often_before_the_run_begins_ends_it() -> None:
    history = gathering(recovery=RESPAWNING)
    history.reap(1)
    history.wait(4.1)
    history.reap(1)
    assert history.state.ended == (
        "failed",
        "worker 1 ended before the run began: SIGKILL; see logs and recovery.max_respawns",
    )


def test_a_worker_whose_loss_is_found_by_its_connection_is_started_again_once_its_process_has_ended() -> None:
    history = gathering(recovery=RESPAWNING)
    history.depart(history.connection(1))
    assert history.sent(Kill, to=AGENT)
    history.wait(10.0)
    assert len(history.sent(Spawn, to=AGENT)) == 1
    history.reap(1)
    history.wait(4.1)
    assert history.sent(Spawn, to=AGENT)[-1] == Spawn(members=(Member(1, 2),))


def test_a_process_that_does_not_end_is_not_waited_for_without_end() -> None:
    history = gathering(recovery=RESPAWNING)
    history.depart(history.connection(1))
    history.wait(TIMEOUTS.rendezvous_s + 1)
    assert history.state.ended == (
        "failed",
        "worker 1 was lost before the run began, and no other process has taken its place within 120 s "
        "(timeouts.rendezvous_s)",
    )


def test_without_a_restart_another_host_takes_the_place() -> None:
    history = two_hosts()
    history.say(OTHER, exited(2))
    assert history.events("join_failed")[0]["message"].endswith("SIGKILL; its place is open for 120.0 s")
    third = 3000
    history.say(third, HostHello(host="a third", slots=2))
    assert history.sent(Spawn, to=third) == [Spawn(members=(Member(2, 2),))]
    history.say(OTHER, exited(3))
    history.join(2)
    history.say(4000, HostHello(host="a fourth", slots=1))
    history.join(3)
    assert history.launched == (0, 1, 2, 3)


def test_the_places_of_a_lost_host_are_open_for_a_while() -> None:
    history = two_hosts()
    history.depart(OTHER)
    history.wait(TIMEOUTS.rendezvous_s - 1)
    assert history.state.phase is Phase.GATHERING
    history.wait(2)
    assert history.state.ended is not None
    assert history.state.ended[1].startswith("worker 2 was lost before the run began, and no other process has")


def test_a_lost_host_takes_its_places_again() -> None:
    history = two_hosts(recovery=RESPAWNING)
    history.join(2)
    connection = history.connection(2)
    history.depart(OTHER)
    history.depart(connection)
    history.say(3000, HostHello(host="another", slots=2))
    assert history.sent(Spawn, to=3000) == [Spawn(members=(Member(2, 2), Member(3, 2)))]
    history.join(2)
    history.join(3)
    assert history.launched == (0, 1, 2, 3)


def test_a_launcher_starts_a_lost_worker_again() -> None:
    history = History()
    for worker in range(3):
        history.say(100 + worker, Hello(member=Member(worker, 0), host="10.0.0.1"))
    history.depart(101)
    history.say(201, Hello(member=Member(1, 0), host="10.0.0.1"))
    history.say(103, Hello(member=Member(3, 0), host="10.0.0.1"))
    assert history.launched == (0, 1, 2, 3)


# --- processes that hang ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("begun", [False, True], ids=["before the run", "during training"])
def test_a_process_that_never_connects_is_given_up_and_started_again(begun: bool) -> None:
    history = gathering(recovery=RESPAWNING)
    if begun:
        history.join(3)
        history.start()
        history.commit()
        history.reap(3)
        history.quiesce()
        history.start()
        history.commit()
        history.wait(4.1)
        assert history.sent(Spawn, to=AGENT)[-1].members[0].incarnation == 2
    history.wait(TIMEOUTS.rendezvous_s - 1)
    assert not history.state.members[3].lost
    count = len(history.sent(Kill, to=AGENT))
    history.wait(2.0)
    assert len(history.sent(Kill, to=AGENT)) == count + 1
    cause = history.events("join_failed")[-1]["cause"]
    assert cause == "hung: its process has not connected within 120 s"
    assert history.state.respawns.deaths[3] == 1 + begun
    history.reap(3)
    history.wait(4.1)
    if begun:
        assert len(history.events("blocklisted")) == 1
    else:
        assert history.sent(Spawn, to=AGENT)[-1] == Spawn(members=(Member(3, 2),))


def test_a_wait_that_goes_on_is_the_same_value_which_the_journal_need_not_compare() -> None:
    history = gathering()
    history.wait(0.1)
    before = history.state.detectors.start_timeout.since
    history.wait(0.1)
    after = history.state.detectors.start_timeout.since
    assert after == before
    assert after[3] is before[3]


def test_a_newcomer_that_never_loads_is_given_up_and_others_do_not_wait_for_it() -> None:
    history = gathering(recovery=Recovery(respawn=True, respawn_delay_s=0.0, max_respawns=9), timeouts=TIMEOUTS)
    history.join(3)
    history.start()
    history.commit()
    for worker in (2, 3):
        history.reap(worker)
        history.quiesce()
        history.start()
    history.commit()
    history.wait(0.1)
    history.join(3)  # and never more
    history.come_back(2)
    history.wait(10.2)
    assert len(history.considerations) == 1, "it has been waited for, but not for long"
    history.consider()
    history.wait(TIMEOUTS.first_step_s)
    assert history.events("join_failed")[-1]["cause"] == "hung: it has not loaded the job within 150 s"
    assert history.state.members[3].lost
    history.reap(3)
    history.wait(0.1)
    history.come_back(3)
    history.wait(0.7)
    assert len(history.considerations) == 1, "none is loading any more"


def test_time_in_which_the_coordinator_does_not_run_is_no_reason() -> None:
    history = gathering(recovery=RESPAWNING)
    history.wait(100.0)
    history.now += 300.0
    history.wait(10.0)
    assert not history.state.members[3].lost
    history.wait(11.0)
    assert history.state.members[3].lost


def test_a_newcomer_that_is_ready_has_no_deadline() -> None:
    history = gathering(recovery=RESPAWNING, timeouts=TIMEOUTS)
    history.join(3)
    history.start()
    history.commit()
    history.reap(3)
    history.quiesce()
    history.start()
    history.wait(4.1)
    history.come_back(3)
    history.wait(TIMEOUTS.first_step_s + 1)
    assert not history.state.members[3].lost
    history.tell(3, Ready())


def test_a_process_that_takes_the_place_of_one_that_is_fenced_has_all_the_time_again() -> None:
    timeouts = Timeouts()
    connecting = Starting(0.0, 0.0, {1: "connecting"})
    late = replace(connecting, at_s=timeouts.rendezvous_s)
    detector, _ = StartTimeout(timeouts).observe(connecting)
    detector, _ = detector.observe(Fenced(1))
    detector, _ = detector.observe(late)
    _, found = detector.observe(replace(late, at_s=late.at_s + 1.0))
    assert found == ()
