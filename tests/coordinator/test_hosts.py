"""Agents that end while their ranks train on, and agents that adopt these, replayed through the state machine."""

from __future__ import annotations

import pytest

from chameleon_ft.config import Recovery
from chameleon_ft.coordinator.commands import Drop, Welcome
from chameleon_ft.coordinator.state.state import Phase
from chameleon_ft.errors import ControlError
from chameleon_ft.protocol.messages import (
    Adopt,
    Drain,
    Exit,
    HangEvidence,
    Hello,
    HostHello,
    Kill,
    Message,
    Probe,
    Refused,
    Spawn,
    WorkerExited,
)
from chameleon_ft.protocol.parts import Member
from tests.coordinator.histories import AGENT, History, process_of
from tests.coordinator.situations import training
from tests.golden import refused

NEXT = AGENT + 1  # connection of the agent that follows
RESPAWN = Recovery(respawn=True, respawn_delay_s=0.1)


def orphaned(**changes: object) -> History:
    """One whose agent was killed just then."""
    history = training(**changes)
    history.depart(AGENT)
    history.commands.clear()
    return history


def adoption(*workers: int, given_up: tuple[int, ...] = ()) -> Adopt:
    ranks = tuple((Member(worker, 1), process_of(worker)) for worker in workers)
    return Adopt(ranks=ranks, given_up=tuple(map(process_of, given_up)))


# --- ranks outlive their agent ---------------------------------------------------------------------------------------


def test_workers_train_on_without_their_agent() -> None:
    history = training()
    history.depart(AGENT)
    history.wait(1.0)
    history.commit()
    assert (history.state.generation, history.state.committed) == (1, 4)
    assert history.failures == []
    (event,) = history.events("host_lost")
    assert event["workers"] == (0, 1, 2, 3)
    assert event["message"] == (
        "the agent of a host is gone; workers 0, 1, 2, 3 keep running, and another agent there adopts them"
    )


def test_one_that_is_lost_without_an_agent_is_not_started_again() -> None:
    history = orphaned(recovery=RESPAWN)
    history.depart(history.connection(1))
    history.quiesce()
    history.start()
    history.wait(60.0)
    assert history.failures == [(1, "connection", "control connection closed")]
    assert history.sent(Spawn) == []


def test_a_hung_one_tells_where_it_hangs_and_ends_itself() -> None:
    history = orphaned()
    connection = history.connection(1)
    history.silence(connection)
    assert history.sent(Kill, to=connection) == [Kill(worker=1, is_hung=True)]
    assert Drop(connection) not in history.commands, "or it could not answer"
    stacks = HangEvidence(member=Member(1, 1), process="state R", activity="")
    history.say(connection, stacks.model_copy(update={"worker": 2}))
    history.depart(connection)
    history.quiesce()
    history.start()
    assert [event["worker"] for event in history.events("hang")] == [1], "it can tell of itself only"
    assert history.events("not_ended") == []
    with pytest.raises(ControlError):
        history.say(history.connection(2), stacks)


def test_one_that_cannot_hear_is_reported() -> None:
    history = orphaned()
    connection = history.connection(1)
    history.silence(connection)
    history.silence(connection, 5.0)
    assert Drop(connection) in history.commands
    (event,) = history.events("not_ended")
    assert "worker 1 and the agent" in event["message"]
    assert "process 101 on 10.0.0.1" in event["message"]


# --- they are adopted ------------------------------------------------------------------------------------------------


def test_another_agent_of_the_host_adopts_them() -> None:
    history = orphaned(recovery=RESPAWN)
    history.commit()
    history.say(NEXT, HostHello(host="a host", slots=4))
    assert history.sent(Adopt, to=NEXT) == [adoption(0, 1, 2, 3)]
    assert history.sent(Spawn) == []
    (event,) = history.events("host_joined")
    assert event["message"] == "a host adopts workers 0, 1, 2, 3"
    assert history.state.generation == 1, "no worker stops for it"

    history.say(NEXT, WorkerExited(member=Member(2, 1), exit_code=None))
    history.quiesce()
    history.start()
    assert history.failures == [(2, "child", "its process has ended")]
    history.wait(0.3)
    assert history.sent(Spawn, to=NEXT) == [Spawn(members=(Member(2, 2),))]


def test_an_adopted_worker_is_looked_after_like_any() -> None:
    history = orphaned()
    history.say(NEXT, HostHello(host="a host", slots=4))
    history.silence(history.connection(1))
    assert history.sent(Probe, to=NEXT) == [Probe(probe=0, worker=1)]
    assert history.failures == []
    history.say(NEXT, Drain())
    assert all(history.state.members[worker].draining or history.state.ending for worker in range(4))


@pytest.mark.parametrize(
    ("hello", "adopted"),
    [
        (HostHello(host="another host", slots=4), ()),
        (HostHello(host="a host", slots=2), (0, 1)),
        (HostHello(host="a host", slots=6), (0, 1, 2, 3)),
    ],
)
def test_an_agent_adopts_as_many_of_its_host_as_it_can_run_and_starts_others(
    hello: HostHello, adopted: tuple[int, ...]
) -> None:
    history = orphaned()
    history.say(NEXT, hello)
    assert history.sent(Adopt, to=NEXT) == ([adoption(*adopted)] if adopted else [])
    started = sum(len(spawn.workers) for spawn in history.sent(Spawn, to=NEXT))
    assert started == hello.slots - len(adopted)


def test_ranks_of_an_agent_that_lives_are_not_adopted() -> None:
    history = training()
    history.say(NEXT, HostHello(host="a host", slots=2))
    assert history.sent(Adopt) == []
    assert history.sent(Spawn, to=NEXT) == [Spawn(members=(Member(4, 1), Member(5, 1)))]
    history.depart(AGENT)
    history.say(NEXT + 1, HostHello(host="a host", slots=4))
    assert history.sent(Adopt, to=NEXT + 1) == [adoption(0, 1, 2, 3)]


def test_a_worker_that_a_launcher_started_is_not_adopted() -> None:
    history = History()
    for worker in range(4):
        history.say(
            history.connection(worker), Hello(member=Member(worker, 0), host="a host", process=process_of(worker))
        )
    history.start()
    history.say(NEXT, HostHello(host="a host", slots=2))
    assert history.sent(Adopt) == []


def test_the_next_agent_ends_what_was_given_up_before_it_starts_another_process() -> None:
    history = orphaned()
    history.silence(history.connection(1))
    history.quiesce()
    history.start()
    history.commands.clear()
    history.say(NEXT, HostHello(host="a host", slots=4))
    assert history.sent(Adopt, to=NEXT) == [adoption(0, 2, 3, given_up=(1,))]
    assert history.sent(Spawn, to=NEXT) == [Spawn(members=(Member(1, 2),))]
    assert [each.type for each in history.sent(Message, to=NEXT)] == ["adopt", "spawn"]
    history.depart(NEXT)
    history.say(NEXT + 1, HostHello(host="a host", slots=4))
    assert history.sent(Adopt, to=NEXT + 1) == [adoption(0, 2, 3)], "it is ended once"


def test_before_the_run_begins_the_ranks_that_have_come_are_adopted_and_the_others_started() -> None:
    history = History()
    history.gather_some(2)
    history.depart(AGENT)
    history.say(NEXT, HostHello(host="a host", slots=4))
    assert history.sent(Adopt, to=NEXT) == [adoption(0, 1)]
    assert history.sent(Spawn, to=NEXT) == [Spawn(members=(Member(2, 2), Member(3, 2)))]
    history.join(2)
    history.join(3)
    assert history.state.phase is Phase.REGROUPING


# --- an agent whose connection was cut -------------------------------------------------------------------------------


def returns(history: History, *ranks: int, slots: int = 4) -> None:
    """Have the agent connect again that was lost, with these ranks."""
    own = tuple((rank, 1) for rank in ranks)
    history.say(NEXT, HostHello(host="a host", slots=slots, id="x", resumes=AGENT, ranks=own))


@pytest.mark.parametrize("is_silent", [False, True])
def test_an_agent_whose_connection_was_cut_keeps_its_ranks(*, is_silent: bool) -> None:
    history = training(recovery=RESPAWN)
    if is_silent:
        history.silence(AGENT)
    else:
        history.depart(AGENT)
    history.wait(1.0)
    history.commands.clear()
    returns(history, 0, 1, 2, 3)
    assert history.sent(Message, to=NEXT) == [adoption(0, 1, 2, 3)], "it is neither refused nor told to end any"
    history.wait(1.0)
    assert (history.failures, history.state.generation) == ([], 1)
    history.say(NEXT, WorkerExited(member=Member(2, 1), exit_code=-9))
    history.quiesce()
    history.start()
    history.wait(0.3)
    assert history.sent(Spawn, to=NEXT) == [Spawn(members=(Member(2, 2),))]


def test_it_ends_ranks_that_were_lost_meanwhile_and_starts_others() -> None:
    history = orphaned(recovery=RESPAWN)
    history.depart(history.connection(1))
    history.quiesce()
    history.start()
    history.commands.clear()
    returns(history, 0, 1, 2, 3)
    assert history.sent(Message, to=NEXT) == [
        Kill(worker=1),
        adoption(0, 2, 3, given_up=(1,)),
        Spawn(members=(Member(1, 2),)),
    ]
    history.say(NEXT, WorkerExited(member=Member(1, 1), exit_code=-9))
    history.wait(1.0)
    assert history.sent(Spawn, to=NEXT) == [Spawn(members=(Member(1, 2),))], "it is started once"


def test_it_leaves_ranks_alone_that_another_agent_has_adopted() -> None:
    history = orphaned()
    history.say(NEXT + 1, HostHello(host="a host", slots=4, id="y"))
    history.commands.clear()
    returns(history, 0, 1, 2, 3)
    (order,) = history.sent(Message, to=NEXT)
    assert isinstance(order, Exit)
    assert (order.is_drained, order.exit_code) == (True, 0), "it waits for their end"
    assert dict(history.state.members.agents) == {NEXT + 1: "a host"}


def test_it_starts_none_in_place_of_workers_that_were_to_leave() -> None:
    history = training()
    history.say(NEXT, HostHello(host="another host", slots=2))
    for worker in (4, 5):
        history.come_back(worker)
    history.wait(0.1)
    history.say(NEXT, Drain())
    history.depart(NEXT)
    history.commands.clear()
    back = HostHello(host="another host", slots=2, resumes=NEXT, ranks=((4, 1), (5, 1)))
    history.say(NEXT + 1, back)
    assert history.sent(Message, to=NEXT + 1) == [adoption(4, 5)]
    history.commit()
    history.wait(0.1)
    drained = Exit(reason="drained", is_drained=True)
    assert history.sent(Exit, to=NEXT + 1) == [drained]
    history.depart(NEXT + 1)
    history.say(NEXT + 2, back.model_copy(update={"resumes": NEXT + 1, "ranks": ()}))
    assert history.sent(Message, to=NEXT + 2) == [drained], "it may not have had the first one"


# --- with another coordinator ----------------------------------------------------------------------------------------


def test_an_agent_waits_while_the_one_before_may_come_back() -> None:
    history = training()
    history.take_over()
    for worker in history.live():
        history.return_worker(worker)
    history.say(NEXT, HostHello(host="a host", slots=4))
    history.say(NEXT + 1, HostHello(host="another host", slots=1))
    assert [spawn.workers for spawn in history.sent(Spawn, to=NEXT + 1)] == [(4,)], "it waits for its own host only"
    history.wait(6.0)
    assert history.sent(Adopt, to=NEXT) == [adoption(0, 1, 2, 3)]
    assert not history.state.admission.waiting


def test_an_agent_that_waits_gets_other_workers_if_the_one_before_comes_back() -> None:
    history = training()
    history.take_over()
    for worker in history.live():
        history.return_worker(worker)
    history.say(NEXT, HostHello(host="a host", slots=2))
    history.return_agent()
    history.wait(0.1)
    assert history.sent(Adopt) == []
    assert history.sent(Spawn, to=NEXT) == [Spawn(members=(Member(4, 1), Member(5, 1)))]


def test_an_agent_that_waits_ends_at_once_if_it_is_to() -> None:
    history = training()
    history.take_over()
    for worker in history.live():
        history.return_worker(worker)
    history.say(NEXT, HostHello(host="a host", slots=4))
    history.say(NEXT, Drain())
    assert history.sent(Message, to=NEXT) == [Exit(reason="drained", is_drained=True)]
    history.depart(NEXT)
    history.wait(6.0)
    assert history.sent(Adopt) == []


def test_an_agent_that_waits_is_found_by_the_next_coordinator_or_forgotten() -> None:
    for comes_back in (True, False):
        history = training()
        history.take_over()
        for worker in history.live():
            history.return_worker(worker)
        history.say(NEXT, HostHello(host="a host", slots=4, id="x"))
        history.take_over()
        for worker in history.live():
            history.return_worker(worker)
        if comes_back:
            history.say(NEXT + 1, HostHello(host="a host", slots=4, id="x", resumes=NEXT))
        history.wait(6.0)
        assert history.sent(Adopt) == ([adoption(0, 1, 2, 3)] if comes_back else [])
        assert not history.state.admission.waiting


def test_a_worker_that_was_drained_is_not_started_by_the_next_agent_of_its_host() -> None:
    history = training()
    history.say(77, Drain(workers=(3,)))
    history.wait(0.1)
    history.consider(0, 1, 2)
    history.switch()
    history.commit()
    history.wait(0.1)
    assert history.state.members[3].lost
    history.depart(AGENT)
    history.commands.clear()
    history.say(NEXT, HostHello(host="a host", slots=4))
    (adopt,) = history.sent(Adopt, to=NEXT)
    assert adopt.ranks == adoption(0, 1, 2).ranks
    assert history.sent(Spawn) == []
    history.say(NEXT + 1, HostHello(host="another host", slots=1))
    assert history.sent(Spawn, to=NEXT + 1) == [Spawn(members=(Member(3, 2),))], "its number is free"


def test_an_order_to_adopt_that_was_lost_is_repeated() -> None:
    history = orphaned()
    history.say(NEXT, HostHello(host="a host", slots=4))
    history.take_over()
    history.commands.clear()
    history.return_agent(NEXT, ranks=[(0, 1), (1, 1)])
    assert history.sent(Adopt) == [adoption(2, 3)]


def test_an_agent_whose_first_connection_was_lost_early_is_recognised() -> None:
    history = History()
    history.say(AGENT, HostHello(host="a host", slots=4, id="x"))
    history.take_over()
    history.commands.clear()
    history.say(NEXT, HostHello(host="a host", slots=4, id="x", ranks=((0, 1), (1, 1))))
    assert history.sent(Refused) == []
    assert history.sent(Spawn, to=NEXT) == [Spawn(members=(Member(2, 1), Member(3, 1)))]
    assert dict(history.state.members.agents) == {NEXT: "a host"}


def test_an_agent_does_not_take_the_place_of_another_one() -> None:
    """Its connection has the number of one that a coordinator had before which the journal does not know."""
    history = History()
    history.say(AGENT, HostHello(host="a host", slots=4, id="x"))
    with refused(ControlError):
        history.say(NEXT, HostHello(host="a host", slots=4, id="y", resumes=AGENT))
    assert dict(history.state.members.agents) == {AGENT: "a host"}
    assert dict(history.state.members.agents) == {AGENT: "a host"}


def test_a_rank_whose_first_connection_was_lost_early_is_recognised() -> None:
    history = History()
    history.holds = True
    history.gather_some(2)
    history.take_over()
    history.return_agent()
    history.commands.clear()
    hello = Hello(member=Member(1, 1), host="10.0.0.1", process=process_of(1))
    history.say(77, hello)
    assert Welcome(77, 1) in history.commands, "it may lack that"
    assert history.state.members[1].connection == 77
    with refused(ControlError):
        history.say(78, hello.model_copy(update={"process": process_of(3)}))
