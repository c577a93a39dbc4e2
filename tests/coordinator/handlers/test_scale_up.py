"""Workers that join a run, replayed through the state machine."""

from __future__ import annotations

from chameleon_ft.coordinator.events import Decided
from chameleon_ft.coordinator.state.state import Phase
from chameleon_ft.errors import ControlError
from chameleon_ft.events.records import JoinRecord, StepRecord
from chameleon_ft.protocol.messages import Begin, Crashed, Discard, Hello, Spawn, Stop, Switch
from chameleon_ft.protocol.parts import Member
from tests.coordinator.plans import a_plan
from tests.coordinator.situations import RESPAWNING, come_back, lose_and_respawn, training
from tests.golden import refused


def test_a_worker_comes_back_and_gets_a_place() -> None:
    history = training(recovery=RESPAWNING)
    come_back(history)
    assert history.events("respawn")[0]["incarnation"] == 2
    history.consider(0, 1, 2, 3)
    upcoming = history.state.switches.next
    assert upcoming is not None
    assert (upcoming.number, sorted(upcoming.unprepared), upcoming.spec.first_step) == (3, [0, 1, 2, 3], 4)
    history.prepare(0, 1, 2)
    history.commit()
    assert history.sent(Switch) == []
    history.prepare(3)
    assert [worker for worker in range(4) if history.sent(Switch, to=history.connection(worker))] == [0, 2, 3]
    history.commit()
    assert history.state.generation == 2, "this step has voted before all had heard of it"
    history.commit(switch=True)
    assert (history.state.phase, history.state.generation) == (Phase.REGROUPING, 3)
    assert history.sent(Begin) == history.sent(Begin, to=22) == [Begin(generation=3, first_step=6)]
    assert history.sent(Stop)[-1].generation == 2, "no worker was stopped"
    history.start()
    (record,) = history.records(JoinRecord)
    assert (record.workers, record.spares, record.generation, record.resume_step) == ((1,), (), 3, 6)
    assert (record.stop_s, record.decide_s) == (0.0, 0.0)
    assert len(history.failures) == 1
    history.commit()
    assert history.records(StepRecord)[-1].workers == 4


def test_a_newcomer_without_a_place_stays_a_spare() -> None:
    history = training(recovery=RESPAWNING)
    come_back(history)
    history.consider()
    assert history.events("decision")[-1]["generation"] == history.state.generation
    history.wait(20.0)
    assert history.considerations == [], "it is not considered again"
    assert history.state.switches.next is None
    history.reap(1)
    assert history.records(JoinRecord) == []
    assert len(history.failures) == 2
    assert history.state.phase is Phase.TRAINING


def test_a_worker_that_joins_during_an_incident_is_held_back() -> None:
    history = training(recovery=RESPAWNING)
    lose_and_respawn(history)
    history.reap(2)
    history.come_back(1)
    assert history.state.phase is Phase.STOPPING
    assert 1 not in history.live()
    assert history.sent(Stop, to=22) == []
    history.quiesce()
    assert history.launched == (0, 3)
    history.start()
    history.wait(0.1)
    assert 1 in history.live()


def test_the_crash_of_a_newcomer_before_it_is_ready_changes_nothing() -> None:
    history = training(recovery=RESPAWNING)
    lose_and_respawn(history)
    history.join(1)
    history.tell(1, Crashed(error="OSError: no such device"))
    assert history.state.phase is Phase.TRAINING
    (event,) = history.events("join_failed")
    assert (event["worker"], event["incarnation"], event["cause"]) == (1, 2, "OSError: no such device")
    history.reap(1, 1)
    history.wait(60.0)
    assert history.sent(Spawn)[-1].members == (Member(1, 2),), "it was lost twice and may be once"
    assert history.events("blocklisted")[0]["worker"] == 1
    with refused(ControlError):
        history.say(500, Hello(member=Member(1, 3), host="h"))


def test_a_decision_on_newcomers_that_fails_leaves_them_spares() -> None:
    history = training(recovery=RESPAWNING)
    lose_and_respawn(history)
    history.come_back(1)
    history.wait(1.0)
    history.fail_to_consider()
    assert history.events("decision_failed")[0]["workers"] == (1,)
    history.wait(20.0)
    assert history.considerations == []
    assert history.state.phase is Phase.TRAINING


def test_a_generation_whose_newcomer_is_lost_meanwhile_is_given_up() -> None:
    history = training(recovery=RESPAWNING)
    come_back(history)
    history.consider(0, 1, 2, 3)
    history.prepare(0, 2, 3)
    history.reap(1)
    assert history.state.switches.next is None
    assert history.sent(Discard, to=1) == [Discard(generation=3)]
    assert history.state.phase is Phase.TRAINING
    history.wait(20.0)
    assert history.considerations == []
    assert history.sent(Switch) == []


def test_a_loss_while_a_generation_is_prepared_does_not_end_the_search_for_a_better_plan() -> None:
    history = training(recovery=RESPAWNING)
    come_back(history)
    history.consider(0, 1, 2, 3)
    history.prepare(0, 1, 2)
    history.holds = True
    history.reap(3)
    assert (history.state.phase, history.state.generation) == (Phase.STOPPING, 4)
    history.quiesce(placed=2)
    (question,) = history.questions
    spec = a_plan((0, 2), first_step=3)
    history.happen(Decided(at=history.at, question=question.question, spec=spec, is_provisional=True))
    history.start()
    history.wait(1.0)
    assert history.considerations, "the newcomer is still to be considered"
