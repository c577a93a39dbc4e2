"""Workers that are to leave, replayed through the state machine."""

from __future__ import annotations

import pytest

from chameleon_ft.coordinator.events import Interrupted
from chameleon_ft.coordinator.state.state import Phase
from chameleon_ft.errors import ControlError
from chameleon_ft.events.records import JoinRecord
from chameleon_ft.protocol.messages import (
    Drain,
    Exit,
    Hello,
    HostHello,
    Kill,
    Message,
    Ready,
    Refused,
    Spawn,
    Switch,
    WorkerExited,
)
from chameleon_ft.protocol.parts import Member
from tests.coordinator.histories import AGENT, History, new_state
from tests.coordinator.situations import RESPAWNING, come_back, drain, lose_and_respawn, training
from tests.golden import refused


def test_a_drained_worker_leaves_once_a_step_is_committed_without_it() -> None:
    history = training(recovery=RESPAWNING)
    assert drain(history, 1) == Drain(workers=(1,))
    assert 1 in history.live()
    history.wait(0.1)
    assert history.considerations, "there is nothing to wait for"
    assert history.considerations[0].members.staying() == (0, 2, 3)
    history.consider(0, 2, 3)
    upcoming = history.state.switches.next
    assert upcoming is not None
    assert upcoming.unprepared == {0, 2, 3}
    history.prepare()
    assert history.sent(Switch, to=21) == [Switch(generation=2)], "it trains until then"
    history.commit(switch=True)
    history.start()
    history.wait(1.0)
    assert history.sent(Exit) == []
    history.commit()
    history.wait(0.1)
    assert history.sent(Exit) == history.sent(Exit, to=21) == [Exit(reason="drained", is_drained=True)], (
        "its agent has others"
    )
    assert history.events("drained")[0]["worker"] == 1
    (record,) = history.records(JoinRecord)
    assert (record.workers, record.drained) == ((), (1,))
    history.depart(21)
    history.reap(1, 0)
    history.wait(20.0)
    assert history.failures == [], "its end is no loss"
    assert len(history.sent(Spawn)) == 1, "it does not come back"
    assert history.state.phase is Phase.TRAINING


def test_a_worker_that_ends_before_it_is_told_that_it_has_left_is_no_loss() -> None:
    history = training(recovery=RESPAWNING)
    drain(history, 1)
    history.wait(0.1)
    history.consider(0, 2, 3)
    history.prepare()
    history.commit(switch=True)
    history.start()
    history.wait(1.0)
    history.depart(21)
    history.reap(1, -15)
    history.wait(20.0)
    assert history.failures == []
    assert [event["worker"] for event in history.events("drained")] == [1]
    assert len(history.sent(Spawn)) == 1, "it does not come back"
    assert history.state.phase is Phase.TRAINING
    history.commit()


@pytest.mark.parametrize("is_admitted", [True, False])
@pytest.mark.parametrize("host", ["a host", "10.0.0.1"])
def test_all_workers_of_a_host_but_not_all_of_the_run_can_be_drained(host: str, *, is_admitted: bool) -> None:
    history = training()
    history.say(AGENT + 1, HostHello(host="node7 (10.0.0.7)", slots=2))
    for worker in (4, 5):
        history.tell(worker, Hello(member=Member(worker, 1), host="10.0.0.7"))
    refused = drain(history, host=host)
    assert isinstance(refused, Refused)
    assert "no worker would be left" in refused.reason
    history.tell(4, Ready())
    if is_admitted:
        history.wait(0.1)
    assert drain(history, host=host) == Drain(workers=(0, 1, 2, 3), host=host)
    history.wait(0.1)
    assert history.considerations[-1].members.staying() == (4,)
    assert history.state.ending is None


def test_it_is_said_why_workers_leave() -> None:
    history = training(recovery=RESPAWNING)
    drain(history, 1)
    history.tell(2, Drain(signal="SIGHUP"))
    history.say(AGENT + 1, HostHello(host="node7", slots=1))
    history.tell(4, Hello(member=Member(4, 1), host="10.0.0.7"))
    history.say(AGENT + 1, Drain(signal="SIGTERM"))
    assert [event["message"] for event in history.events("draining")] == [
        "until no plan needs worker 1 any more, because of chameleon drain",
        "until no plan needs worker 2 any more, because of SIGHUP to its process",
        "until no plan needs worker 4 any more, because of SIGTERM to the agent",
    ]


@pytest.mark.parametrize("by", [AGENT + 1, 2000])
def test_workers_that_do_not_take_part_yet_leave_at_once(by: int) -> None:
    history = training(recovery=RESPAWNING)
    history.say(AGENT + 1, HostHello(host="node7 (10.0.0.7)", slots=3))
    for worker in (4, 5):
        history.tell(worker, Hello(member=Member(worker, 1), host="10.0.0.7"))
    history.tell(4, Ready())
    answer = drain(history, host="node7" if by == 2000 else None, by=by)
    assert isinstance(answer, Drain)
    assert answer.workers == (4, 5, 6)
    assert history.sent(Exit, to=81) == [Exit(reason="drained", is_drained=True)], "it has loaded"
    history.wait(0.1)
    kills = [message for message in history.sent(Message, to=AGENT + 1) if not isinstance(message, Spawn | Drain)]
    assert kills == [Kill(worker=5), Kill(worker=6), Exit(reason="drained", is_drained=True)], "the others are loading"
    assert history.sent(Exit, to=101) == []
    for worker in (4, 5):
        history.depart(20 * worker + 1)
    for worker in (4, 5, 6):
        history.say(AGENT + 1, WorkerExited(member=Member(worker, 1), exit_code=-9))
    history.depart(AGENT + 1)
    history.commit()
    history.wait(20.0)
    assert history.considerations == []
    assert history.failures == []
    assert (history.events("join_failed"), history.events("respawn"), history.events("host_lost")) == ([], [], [])
    with refused(ControlError):
        history.tell(6, Hello(member=Member(6, 1), host="10.0.0.7"))


def test_a_worker_that_is_loading_again_is_ended_by_its_agent() -> None:
    history = training(recovery=RESPAWNING)
    lose_and_respawn(history)
    before = len(history.sent(Kill, to=AGENT))
    assert drain(history, 1) == Drain(workers=(1,))
    assert history.sent(Kill, to=AGENT)[before:] == [Kill(worker=1)]
    history.reap(1)
    history.wait(20.0)
    assert [worker for worker, *_ in history.failures] == [1], "the loss before"
    assert len(history.events("respawn")) == 1
    assert history.sent(Exit) == [], "its agent has others"


def train_with_second_host() -> History:
    """A run in which workers 4 and 5 of a second agent train too."""
    history = training(recovery=RESPAWNING)
    history.say(AGENT + 1, HostHello(host="late", slots=2))
    for worker in (4, 5):
        history.come_back(worker)
    history.wait(0.7)
    history.consider(0, 1, 2, 3, 4, 5)
    history.switch()
    history.commit()
    return history


def test_an_agent_ends_once_all_its_workers_have_left() -> None:
    history = train_with_second_host()
    drain(history, 4)
    history.wait(0.1)
    history.consider(0, 1, 2, 3, 5)
    history.switch()
    history.commit()
    history.wait(0.1)
    assert history.sent(Exit, to=AGENT + 1) == []
    drain(history, 5)
    history.wait(0.1)
    history.consider(0, 1, 2, 3)
    history.switch()
    history.commit()
    history.wait(0.1)
    assert history.sent(Exit, to=AGENT + 1) == [Exit(reason="drained", is_drained=True)]
    history.say(AGENT + 1, WorkerExited(member=Member(5, 1), exit_code=0))
    history.depart(AGENT + 1)
    history.wait(20.0)
    assert history.failures == []
    assert [event["host"] for event in history.events("host_drained")] == ["late"]
    assert history.events("host_lost") == []
    history.say(AGENT + 2, HostHello(host="later", slots=1))
    assert history.sent(Spawn, to=AGENT + 2) == [Spawn(members=(Member(4, 2),))], "its number is free"


def test_an_agent_whose_last_worker_is_lost_while_it_leaves_ends_too() -> None:
    history = train_with_second_host()
    assert drain(history, by=AGENT + 1) == Drain(workers=(4, 5))
    for worker in (4, 5):
        history.say(AGENT + 1, WorkerExited(member=Member(worker, 1), exit_code=-9))
    history.quiesce()
    history.start()
    history.wait(0.1)
    assert history.sent(Exit, to=AGENT + 1) == [Exit(reason="drained", is_drained=True)]


def test_an_agent_whose_workers_are_lost_has_nothing_to_drain() -> None:
    history = train_with_second_host()
    for worker in (4, 5):
        history.say(AGENT + 1, WorkerExited(member=Member(worker, 1), exit_code=-9))
    history.quiesce()
    history.start()
    assert drain(history, by=AGENT + 1) == Drain()
    history.wait(0.1)
    assert history.sent(Exit, to=AGENT + 1) == [Exit(reason="drained", is_drained=True)]
    assert history.events("draining") == []
    history.wait(20.0)
    assert history.events("respawn") == []


def test_what_cannot_be_drained_is_refused_with_a_reason() -> None:
    assert isinstance(drain(History(), 1), Refused)
    history = training()
    history.reap(3)
    history.quiesce()
    history.start()
    for workers, host, reason in [
        ((3,), None, "worker 3 is not live; live are [0, 1, 2]"),
        ((9,), None, "worker 9 is not live; live are [0, 1, 2]"),
        ((), "elsewhere", "no worker is on host 'elsewhere'; the hosts are 10.0.0.1"),
        ((), None, "no worker is named; name workers, or a host with workers"),
        ((0, 1, 2), None, "no worker would be left of [0, 1, 2]; leave one at least, or end the run"),
    ]:
        assert drain(history, *workers, host=host) == Refused(reason=reason)
    assert history.state.members.draining() == frozenset()
    history.happen(Interrupted(at=history.at))
    assert drain(history, 1) == Refused(reason="the run ends after this step")


@pytest.mark.parametrize("fails", [True, False])
def test_a_worker_without_which_there_is_no_plan_stays(fails: bool) -> None:
    history = training()
    drain(history, 1)
    history.wait(0.1)
    if fails:
        history.fail_to_consider()
    else:
        history.consider()
    (event,) = history.events("drain_failed")
    assert event["workers"] == (1,)
    assert history.state.members.draining() == frozenset()
    history.commit()
    history.wait(20.0)
    assert history.considerations == []
    assert history.sent(Exit) == []


def train_with_launched_worker() -> History:
    """A run whose worker 3 was started by a launcher, and the others by an agent."""
    history = History(new_state(recovery=RESPAWNING))
    history.say(AGENT, HostHello(host="a host", slots=3))
    for worker in range(3):
        history.join(worker)
    history.tell(3, Hello(member=Member(3, 0), host="10.0.0.3"))
    history.start()
    history.commit()
    return history


def test_a_launched_worker_can_ask_to_leave() -> None:
    history = train_with_launched_worker()
    assert drain(history, by=61) == Drain(workers=(3,))
    history.wait(0.1)
    history.consider(0, 1, 2)
    history.switch()
    history.commit()
    history.wait(0.1)
    assert history.sent(Exit) == history.sent(Exit, to=61) == [Exit(reason="drained", is_drained=True)]
    history.depart(61)
    assert history.failures == []


def test_a_drain_gives_up_a_generation_with_that_worker_which_no_worker_was_told_to_switch_to() -> None:
    history = training(recovery=RESPAWNING)
    come_back(history)
    history.consider(0, 1, 2, 3)
    drain(history, 2)
    assert history.state.switches.next is None
    history.wait(0.1)
    assert history.considerations[-1].members.staying() == (0, 1, 3)


def test_a_drain_waits_for_a_migration() -> None:
    history = training(recovery=RESPAWNING)
    come_back(history)
    history.consider(0, 1, 2, 3, waves=1)
    history.switch()
    drain(history, 2)
    assert history.state.switches.next is not None
    history.switch()
    history.wait(0.1)
    assert history.considerations[-1].members.staying() == (0, 1, 3)


@pytest.mark.parametrize("lost", [1, 2])
def test_a_loss_while_a_worker_is_drained_is_an_ordinary_one(lost: int) -> None:
    history = training(recovery=RESPAWNING)
    drain(history, 1)
    history.wait(0.1)
    history.consider(0, 2, 3)
    history.reap(lost)
    assert history.state.phase is Phase.STOPPING
    history.quiesce()
    history.start()
    assert [worker for worker, *_ in history.failures] == [lost]
    history.wait(10.0)
    if lost == 1:
        assert history.considerations == [], "it has left"
        assert len(history.sent(Spawn)) == 1, "and does not come back"
    else:
        assert history.considerations[-1].members.staying() == (0, 3), "it is still to leave"
