"""Whole histories of a run, replayed without sockets: the commands, and the final records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chameleon_ft.config import Recovery, Timeouts
from chameleon_ft.control.commands import (
    CompleteCheckpoint,
    Drop,
    Finish,
    LogFault,
    MeasureMigration,
    MeasureTransfer,
    SaveEvidence,
    Send,
    Task,
)
from chameleon_ft.control.events import (
    Considered,
    Decided,
    DecisionFailed,
    EndRequested,
    FaultsInjected,
    Interrupted,
)
from chameleon_ft.control.state.incident import Fault
from chameleon_ft.control.state.state import Phase, State
from chameleon_ft.control.state_machine import step
from chameleon_ft.control.wire.messages import (
    Begin,
    CheckpointSaved,
    Crashed,
    Discard,
    Drain,
    Exit,
    HangEvidence,
    Hello,
    HostHello,
    Inject,
    Kill,
    Message,
    PeerFailed,
    Position,
    Probe,
    ProcessState,
    Ready,
    Refused,
    Spawn,
    Started,
    Stop,
    Switch,
    WorkerExited,
)
from chameleon_ft.errors import ControlError
from chameleon_ft.observe import JoinRecord, StepRecord
from chameleon_ft.observe.evidence import ENTRIES, activity_entry
from chameleon_ft.quantities import duration
from tests.control.histories import AGENT, History, new_state
from tests.control.plans import a_plan

RESPAWNING = Recovery(respawn=True, respawn_delay_s=4.0, max_respawns=1)


def training(**changes: object) -> History:
    """A run that has taken three steps."""
    history = History(new_state(**changes))
    history.train()
    return history


# --- from the beginning to the end -----------------------------------------------------------------------------------


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


# --- losses ----------------------------------------------------------------------------------------------------------


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


# --- hangs, and messages that fail -----------------------------------------------------------------------------------


def test_a_stopped_process_is_found_by_a_probe() -> None:
    history = training()
    history.wait(0.5)
    probe = history.sent(Probe, to=AGENT)[-1].probe
    assert history.sent(Probe, to=21), "ranks are asked, too"
    history.tell(2, Position(probe=probe, doing="F3", waiting=True, since_s=60.0))
    history.say(AGENT, ProcessState(probe=probe, worker=1, incarnation=1, stopped=True))
    assert history.live() == (0, 1, 2, 3), "a debugger may have stopped it for a moment"
    history.wait(1.0)
    probe = history.sent(Probe, to=AGENT)[-1].probe
    history.say(AGENT, ProcessState(probe=probe, worker=1, incarnation=1, stopped=True))
    history.quiesce()
    history.start()
    assert history.failures == [(1, "watchdog", "hung: its process is stopped")]


def test_missing_heartbeats_of_a_worker_are_judged_by_its_agent() -> None:
    history = training()
    history.silence(history.connection(1))
    assert history.sent(Probe, to=AGENT)[-1] == Probe(probe=0, worker=1)
    history.say(AGENT, ProcessState(probe=0, worker=1, stopped=False))
    history.commit()
    assert history.live() == (0, 1, 2, 3), "its process lives"
    history.say(AGENT, ProcessState(probe=0, worker=1, stopped=True))
    history.silence(history.connection(1), 1.5)
    history.say(AGENT, ProcessState(probe=0, worker=1, stopped=True))
    assert history.live() == (0, 1, 2, 3), "it has answered meanwhile"
    history.silence(history.connection(1), 2.0)
    history.say(AGENT, ProcessState(probe=0, worker=1, stopped=True))
    history.quiesce()
    history.start()
    assert history.failures == [(1, "heartbeat", "no heartbeat, because its process is stopped")]


def test_no_worker_is_silent_for_ever() -> None:
    timeouts = Timeouts()
    history = training(timeouts=timeouts)
    history.silence(history.connection(1), timeouts.first_step_s - 1.0)
    assert history.live() == (0, 1, 2, 3)
    history.silence(history.connection(1), timeouts.first_step_s + 1.0)
    assert history.live() == (0, 2, 3)


def test_missing_heartbeats_count_once_the_agent_is_gone_too() -> None:
    history = training()
    history.silence(history.connection(1))
    assert Drop(AGENT) in history.silence(AGENT)
    assert history.live() == (0, 1, 2, 3), "it may be found lost by its own connection"
    history.silence(history.connection(1))
    assert history.live() == (0, 2, 3)


def test_a_worker_without_an_agent_may_be_silent_only_in_its_first_step() -> None:
    history = History()
    for worker in range(4):
        history.say(20 * worker + 1, Hello(worker=worker, host="10.0.0.1"))
    history.start()
    history.silence(history.connection(1))
    assert history.live() == (0, 1, 2, 3)
    history.commit()
    history.silence(history.connection(1))
    assert history.live() == (0, 2, 3)


def test_new_layers_make_a_first_step() -> None:
    history = History()
    history.moves_to = 3
    history.train(steps=0)
    assert not any(history.state.members[worker].has_stepped for worker in range(4))
    history.commit()
    assert all(history.state.members[worker].has_stepped for worker in range(4))
    history.reap(1)
    history.quiesce()
    history.start()
    assert all(history.state.members[worker].has_stepped for worker in (0, 2, 3)), "they run the layers that they ran"


def test_messages_that_all_wait_for_end_the_generation() -> None:
    history = training()
    history.wait(0.5)
    probe = history.sent(Probe, to=21)[-1].probe
    for worker in range(4):
        peer = 2 if worker != 2 else 0
        position = Position(probe=probe, doing="F1", waiting=True, since_s=61.0, for_message=True, peer=peer)
        history.tell(worker, position)
    history.wait(0.1)
    assert history.state.phase is Phase.STOPPING
    history.quiesce()
    history.start()
    ((worker, noticed_by, _),) = history.failures
    assert (worker, noticed_by) == (2, "peer")


# --- evidence of hangs -----------------------------------------------------------------------------------------------

ACTIVITY = "".join(
    [
        activity_entry(99.0, "F1").decode(),
        activity_entry().decode() * (ENTRIES - 1),
        'Current thread 0x1 (most recent call first):\n  File "/home/me/model.py", line 7 in forward\n',
    ]
)


def hung() -> History:
    """A run that has found worker 1 hung."""
    history = training()
    history.wait(0.5)
    history.tell(1, Position(probe=history.sent(Probe, to=21)[-1].probe, doing="F1", waiting=False, since_s=60.0))
    return history


def examined(history: History) -> None:
    evidence = HangEvidence(worker=1, process="state S", activity=ACTIVITY)
    commands = history.say(AGENT, evidence)
    assert SaveEvidence("worker-1-1.txt", f"state S\n\n{ACTIVITY}") in commands
    history.reap(1)


def test_a_hung_worker_is_examined_before_it_is_killed() -> None:
    history = hung()
    assert history.sent(Kill, to=AGENT) == [Kill(worker=1, is_hung=True)]
    examined(history)
    history.quiesce()
    history.start()
    cause = "hung: in F1 for 60.0 s, at /home/me/model.py:7 in forward"
    assert history.failures == [(1, "watchdog", cause)]
    (hang,) = history.events("hang")
    assert (hang["doing"], hang["since"], hang["place"]) == ("in F1", 99.0, "/home/me/model.py:7 in forward")
    assert "message" not in hang


def test_no_recovery_waits_for_the_evidence() -> None:
    history = hung()
    history.quiesce()
    history.start()
    assert history.failures == [(1, "watchdog", "hung: in F1 for 60.0 s")]
    examined(history)
    (hang,) = history.events("hang")
    assert hang["message"] == "worker 1 hung at /home/me/model.py:7 in forward; see incidents/worker-1-1.txt"


def test_a_worker_that_never_quiesces_is_given_up() -> None:
    timeouts = Timeouts()
    history = training(timeouts=timeouts)
    history.reap(1)
    history.quiesce(0, 2)
    history.wait(timeouts.collective_timeout_s - 1.0)
    assert history.state.phase is Phase.STOPPING
    history.wait(2.0)
    history.start()
    assert history.failures == [(1, "child", "SIGKILL"), (3, "watchdog", "hung: it does not leave its operation")]


def test_a_coordinator_that_was_held_up_blames_no_worker() -> None:
    history = History()
    history.train(steps=0)
    history.wait(0.05)
    history.now += 100.0
    history.wait(59.0)
    assert history.sent(Probe) == [], "before the first step, a minute is granted"
    history.wait(2.0)
    assert history.sent(Probe) != []


def test_the_worker_that_messages_fail_with_is_given_up() -> None:
    history = training()
    for worker in (0, 3):
        history.tell(worker, PeerFailed(generation=1, peer=2, error="reset"))
    history.quiesce()
    history.start()
    assert history.failures == [(2, "peer", "messages with it failed: reset")]
    assert history.members() == (0, 1, 3)


# --- newcomers -------------------------------------------------------------------------------------------------------


def lose_and_respawn(history: History, worker: int = 1) -> None:
    history.reap(worker)
    history.quiesce()
    history.start()
    history.wait(5.0)
    assert history.sent(Spawn)[-1] == Spawn(workers=(worker,), incarnations=(2,))


def come_back(history: History, worker: int = 1) -> None:
    """Lose a worker, have it come back, and wait until it is considered."""
    lose_and_respawn(history, worker)
    history.come_back(worker)
    history.wait(1.0)


def test_a_worker_comes_back_and_gets_a_place() -> None:
    history = training(recovery=RESPAWNING)
    come_back(history)
    assert history.events("respawn")[0]["incarnation"] == 2
    history.consider(0, 1, 2, 3)
    upcoming = history.state.next
    assert upcoming is not None
    assert (upcoming.number, sorted(upcoming.unprepared), upcoming.plan.first_step) == (3, [0, 1, 2, 3], 4)
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


def test_layers_move_in_a_generation_of_their_own() -> None:
    history = training(recovery=RESPAWNING)
    come_back(history)
    history.consider(0, 1, 2, 3, waves=1)
    before = history.state.active
    history.prepare()
    history.commit(switch=True)
    state = history.state
    assert state.active is not None
    assert state.next is not None
    assert (state.active.migration is not None, state.in_force) == (True, before)
    assert (state.generation, state.next.number) == (3, 4)
    history.start()
    assert history.records(JoinRecord) == [], "it has no operations yet"
    history.wait(200.0)
    history.commit()
    assert history.state.next == state.next, "a migration may take far longer than predicted"
    history.switch()
    assert history.state.in_force == before
    (record,) = history.records(JoinRecord)
    assert (record.workers, record.generation, record.moved_bytes, record.rounds) == ((1,), 4, 64, 0)
    assert record.migrate_s == pytest.approx(200.0)
    decisions = [index for index, command in enumerate(history.commands) if command is Task.RECORD_SCALE_UP]
    begun = [index for index, command in enumerate(history.commands) if command is Task.BEGIN_GENERATION]
    assert begun[0] < decisions[0] < begun[1], "the decision is that of the plan that it has found"


@pytest.mark.parametrize("placed", [2, 3])
def test_a_loss_cancels_a_migration(placed: int) -> None:
    history = training(recovery=RESPAWNING)
    come_back(history)
    history.consider(0, 1, 2, 3, waves=1)
    history.prepare()
    before = history.state.active
    history.commit(switch=True)
    history.start()
    history.holds = True
    history.reap(2)
    assert history.sent(Stop)[-1].generation == 5, "the next one had a number, too"
    history.quiesce(placed=placed)
    assert history.state.in_force == before, "shadow holders are not in it"
    assert (history.state.next, history.state.following) == (None, ())


@pytest.mark.parametrize("placed", [2, 3])
def test_a_loss_in_the_switch_finds_one_placement_in_force(placed: int) -> None:
    history = training(recovery=RESPAWNING)
    come_back(history)
    history.consider(0, 1, 2, 3)
    history.prepare()
    upcoming, before = history.state.next, history.state.active
    assert upcoming is not None
    history.holds = True
    history.reap(1)
    assert (history.state.phase, history.state.generation) == (Phase.STOPPING, 4), "it may have switched"
    history.quiesce(placed=placed)
    assert history.state.in_force == (before if placed == 2 else upcoming.plan)


def test_a_message_that_fails_before_its_worker_has_switched_counts() -> None:
    history = training(recovery=RESPAWNING)
    come_back(history)
    history.consider(0, 1, 2, 3)
    history.prepare()
    history.commit_by(0, history.state.committed, switch=True)
    assert history.state.generation == 3
    history.tell(3, PeerFailed(generation=2, peer=None, error="reset"))
    assert (history.state.phase, history.state.generation) == (Phase.STOPPING, 4)


@pytest.mark.parametrize("how", ["error", "orders", "time"])
def test_a_generation_that_cannot_be_prepared_is_given_up_and_tried_again_ever_later(how: str) -> None:
    timeouts = Timeouts(watchdog_min_s=6.0, collective_timeout_s=8.0, rendezvous_s=10.0)
    history = training(recovery=RESPAWNING, timeouts=timeouts)
    come_back(history)
    waits = []
    for attempt in range(1, 4):
        history.consider(0, 1, 2, 3)
        if how == "error":
            history.prepare(2, error="OSError: no port")
        elif how == "orders":
            history.orders_fail()
        else:
            history.prepare(0, 2)
            history.wait(history.state.settings.timeouts.rendezvous_s + 0.1)
        assert history.state.next is None
        assert len(history.events("discarded")) == attempt
        assert [message.generation for message in history.sent(Discard, to=1)] == list(range(3, 3 + attempt))
        since = history.now
        while not history.considerations:
            history.wait(0.05)
        waits.append(history.now - since)
    assert waits == sorted(waits)
    assert waits[2] > 3.5
    assert "no port" in history.events("discarded")[0]["message"] or how != "error"
    assert history.state.phase is Phase.TRAINING
    history.consider(0, 1, 2, 3)
    history.switch()
    assert (history.state.generation, history.state.scale_up.retries) == (6, 0)


def test_what_follows_a_migration_is_prepared_again_if_it_fails() -> None:
    history = training(recovery=RESPAWNING)
    come_back(history)
    history.consider(0, 1, 2, 3, waves=1)
    history.switch()
    history.prepare(0, error="OSError: no port")
    assert history.sent(Discard, to=1) == [Discard(generation=4)]
    history.wait(2.0)
    assert history.considerations == [], "there is nothing to decide anew"
    assert history.state.next is not None
    assert history.state.next.number == 5
    history.switch()
    assert history.members() == (0, 1, 2, 3)


def between_waves() -> History:
    """A run that has switched to the plan after the first of two waves, by which layers move to a worker."""
    history = training(recovery=RESPAWNING)
    come_back(history)
    history.consider(0, 1, 2, 3, waves=2)
    history.switch()
    history.wait(100.0)
    history.switch()
    assert history.state.active is not None
    assert (history.state.phase, history.state.generation, history.state.active.migration) == (Phase.TRAINING, 4, None)
    return history


def test_the_plans_of_all_waves_follow_one_after_the_other() -> None:
    history = between_waves()
    assert (history.state.next, len(history.state.following)) == (None, 2)
    assert history.records(JoinRecord) == []
    assert history.considerations == []
    history.wait(1.0)
    assert history.state.next is None, "some worker may still hold more"
    history.commit()
    history.wait(0.1)
    state = history.state
    assert state.active is not None
    assert state.next is not None
    assert state.active.migration is not None, "all workers have dropped layers: there is memory for others"
    assert (state.generation, state.next.number) == (4, 5)
    assert state.in_force == state.placed != state.active
    history.wait(49.9)
    history.switch()
    (record,) = history.records(JoinRecord)
    assert (record.workers, record.generation, record.waves, record.moved_bytes) == ((1,), 5, 2, 128)
    measured = [command for command in history.commands if isinstance(command, MeasureMigration)]
    assert sum(each.seconds for each in measured) == pytest.approx(record.migrate_s)
    assert [each.migration.total_bytes for each in measured] == [64, 64]
    assert record.migrate_s == pytest.approx(149.95), "the second wave begins with the tick that notes the commit"
    assert (history.state.next, history.state.following, history.state.migrated.waves) == (None, (), 0)


@pytest.mark.parametrize("after", range(4))
def test_a_loss_cancels_all_waves(after: int) -> None:
    history = training(recovery=RESPAWNING)
    come_back(history)
    history.consider(0, 1, 2, 3, waves=2)
    placed = [history.state.in_force]
    for _ in range(after):
        history.switch()
        placed.append(history.state.placed)
        history.commit()
        history.wait(0.1)
    history.holds = True
    history.reap(2)
    history.quiesce(placed=history.state.active_generation)
    assert (history.state.next, history.state.following, history.state.migrated.waves) == (None, (), 0)
    assert history.state.in_force == placed[-1], "of the last plan under which no layer moves"


@pytest.mark.parametrize("how", ["error", "time"])
def test_layers_that_do_not_arrive_are_dropped_and_it_is_decided_anew(how: str) -> None:
    short = {"heartbeat_timeout_s": 0.2, "watchdog_min_s": 0.4, "collective_timeout_s": 0.8, "rendezvous_s": 1.0}
    history = training(recovery=RESPAWNING, timeouts=Timeouts(**short))
    come_back(history)
    history.consider(0, 1, 2, 3, waves=1)
    for attempt in range(3):
        history.switch()
        migrating = history.state.active
        assert migrating is not None
        assert migrating.migration is not None
        assert history.state.next is not None
        if how == "error":
            history.prepare(1, error="no memory", cannot_migrate=True)
        else:
            history.prepare(0, 2)
            history.wait(5.0 * 2**attempt - 1.0)
            assert history.state.next is not None
            history.wait(1.1)
        errors = [each["error"] for each in history.events("discarded")]
        assert len(errors) == attempt + 1
        no_answer = f"no answer from 1, 3 within {duration(5.0 * 2**attempt)}, the limit for layers that move"
        assert errors[-1] == ("worker 1: no memory" if how == "error" else no_answer)
        assert history.state.scale_up.retries == attempt + 1
        history.wait(2.0**attempt + 0.1)
        history.switch()
        state = history.state
        assert state.active is not None
        assert (state.active.migration, state.following, state.next) == (None, (), None)
        assert state.active.plan.workers == (0, 2, 3), "the newcomer, a spare again, held nothing else"
        assert history.records(JoinRecord) == []
        assert history.state.scale_up.newcomers == {1}
        history.wait(2.0**attempt + 0.1)
        history.consider(0, 1, 2, 3, waves=1)


@pytest.mark.parametrize(("how", "is_prepared"), [("lost", False), ("lost", True), ("drained", False)])
def test_between_waves_another_course_is_looked_for_if_the_next_wave_cannot_come(how: str, is_prepared: bool) -> None:
    history = between_waves()
    active = history.state.active
    assert active is not None
    if how == "lost":  # it has dropped all that it held, and is a spare until the next wave
        plan = replace(active.plan, placement=active.plan.placement.without([1]))
        history.state = replace(history.state, active=replace(active, plan=plan))
        if is_prepared:
            history.commit()
            history.wait(0.1)
        history.reap(1)
    else:
        drain(history, 2)
    if how == "lost" and not is_prepared:
        assert history.state.following, "it is noticed when the next wave is to be prepared"
        history.commit()
        history.wait(0.1)
    assert (history.state.next, history.state.following) == (None, ())
    history.wait(12.0)
    staying = {"lost": (0, 2, 3), "drained": (0, 1, 3)}[how]
    assert history.considerations[-1].members.staying() == staying


def test_the_last_step_and_the_end_take_precedence_over_a_switch() -> None:
    history = training(recovery=RESPAWNING, steps=6)
    come_back(history)
    history.consider(0, 1, 2, 3)
    history.prepare()
    history.commit(switch=True, finish=True)
    assert history.state.generation == 2
    history.commit()
    history.commit(switch=True)
    assert history.state.generation == 2
    history.finish()
    assert history.state.ended == ("finished", "all steps are trained")


def test_a_run_that_is_told_to_end_does_not_switch_any_more() -> None:
    history = training(recovery=RESPAWNING)
    come_back(history)
    history.consider(0, 1, 2, 3)
    history.happen(Interrupted(at=history.at))
    history.prepare()
    assert history.sent(Switch) == []


def test_a_newcomer_without_a_place_stays_a_spare() -> None:
    history = training(recovery=RESPAWNING)
    come_back(history)
    history.consider()
    assert Task.RECORD_SCALE_UP in history.commands
    history.wait(20.0)
    assert history.considerations == [], "it is not considered again"
    assert history.state.next is None
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
    assert history.sent(Spawn)[-1].incarnations == (2,), "it was lost twice and may be once"
    assert history.events("blocklisted")[0]["worker"] == 1
    with pytest.raises(ControlError, match="was lost too often"):
        history.say(500, Hello(worker=1, host="h", incarnation=3))


def test_a_decision_on_newcomers_that_fails_leaves_them_spares() -> None:
    history = training(recovery=RESPAWNING)
    lose_and_respawn(history)
    history.come_back(1)
    history.wait(1.0)
    question = history.considerations.pop().scale_up.question
    history.happen(Considered(at=history.at, question=question, error="its process is gone"))
    assert history.events("decision_failed")[0]["workers"] == [1]
    history.wait(20.0)
    assert history.considerations == []
    assert history.state.phase is Phase.TRAINING


def test_a_generation_whose_newcomer_is_lost_meanwhile_is_given_up() -> None:
    history = training(recovery=RESPAWNING)
    come_back(history)
    history.consider(0, 1, 2, 3)
    history.prepare(0, 2, 3)
    history.reap(1)
    assert history.state.next is None
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
    plan = replace(a_plan((0, 2), first_step=3), is_hasty=True)
    history.happen(Decided(at=history.at, question=question.question, plan=plan))
    history.start()
    history.wait(1.0)
    assert history.considerations, "the newcomer is still to be considered"


# --- workers that are to leave ---------------------------------------------------------------------------------------


def drain(history: History, *workers: int, host: str | None = None, by: int = 2000) -> Message:
    """Ask for workers to leave; return the answer."""
    before = len(history.sent(Message, to=by))
    history.say(by, Drain(workers=workers, host=host))
    return history.sent(Message, to=by)[before]


def test_a_drained_worker_leaves_once_a_step_is_committed_without_it() -> None:
    history = training(recovery=RESPAWNING)
    assert drain(history, 1) == Drain(workers=(1,))
    assert 1 in history.live()
    history.wait(0.1)
    assert history.considerations, "there is nothing to wait for"
    assert history.considerations[0].members.staying() == (0, 2, 3)
    history.consider(0, 2, 3)
    upcoming = history.state.next
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
        history.tell(worker, Hello(worker=worker, host="10.0.0.7", incarnation=1))
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


@pytest.mark.parametrize("by", [AGENT + 1, 2000])
def test_workers_that_do_not_take_part_yet_leave_at_once(by: int) -> None:
    history = training(recovery=RESPAWNING)
    history.say(AGENT + 1, HostHello(host="node7 (10.0.0.7)", slots=3))
    for worker in (4, 5):
        history.tell(worker, Hello(worker=worker, host="10.0.0.7", incarnation=1))
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
        history.say(AGENT + 1, WorkerExited(worker=worker, exit_code=-9))
    history.depart(AGENT + 1)
    history.commit()
    history.wait(20.0)
    assert history.considerations == []
    assert history.failures == []
    assert (history.events("join_failed"), history.events("respawn"), history.events("host_lost")) == ([], [], [])
    with pytest.raises(ControlError, match="worker 6 is lost"):
        history.tell(6, Hello(worker=6, host="10.0.0.7", incarnation=1))


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
    history.say(AGENT + 1, WorkerExited(worker=5, exit_code=0))
    history.depart(AGENT + 1)
    history.wait(20.0)
    assert history.failures == []
    assert [event["host"] for event in history.events("host_drained")] == ["late"]
    assert history.events("host_lost") == []
    history.say(AGENT + 2, HostHello(host="later", slots=1))
    assert history.sent(Spawn, to=AGENT + 2) == [Spawn(workers=(4,), incarnations=(2,))], "its number is free"


def test_an_agent_whose_last_worker_is_lost_while_it_leaves_ends_too() -> None:
    history = train_with_second_host()
    assert drain(history, by=AGENT + 1) == Drain(workers=(4, 5))
    for worker in (4, 5):
        history.say(AGENT + 1, WorkerExited(worker=worker, exit_code=-9))
    history.quiesce()
    history.start()
    history.wait(0.1)
    assert history.sent(Exit, to=AGENT + 1) == [Exit(reason="drained", is_drained=True)]


def test_an_agent_whose_workers_are_lost_has_nothing_to_drain() -> None:
    history = train_with_second_host()
    for worker in (4, 5):
        history.say(AGENT + 1, WorkerExited(worker=worker, exit_code=-9))
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
        question = history.considerations.pop(0).scale_up.question
        history.happen(Considered(at=history.at, question=question, error="its process is gone"))
    else:
        history.consider()
    (event,) = history.events("drain_failed")
    assert event["workers"] == [1]
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
    history.tell(3, Hello(worker=3, host="10.0.0.3"))
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
    assert history.state.next is None
    history.wait(0.1)
    assert history.considerations[-1].members.staying() == (0, 1, 3)


def test_a_drain_waits_for_a_migration() -> None:
    history = training(recovery=RESPAWNING)
    come_back(history)
    history.consider(0, 1, 2, 3, waves=1)
    history.switch()
    drain(history, 2)
    assert history.state.next is not None
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


def test_the_end_is_told_to_workers_that_are_loading_and_a_stop_is_not() -> None:
    history = training(recovery=RESPAWNING)
    lose_and_respawn(history)
    history.join(1)
    history.reap(2)
    history.quiesce()
    assert history.sent(Stop, to=22) == []
    history.happen(EndRequested(at=history.at, status="interrupted", reason="enough"))
    assert history.sent(Exit, to=22) == [Exit(reason="enough", status="interrupted")]


# --- checkpoints -----------------------------------------------------------------------------------------------------


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
    history.happen(Decided(at=history.at, question=question.question, plan=plan))
    assert history.state.committed == 2
    history.tell(2, CheckpointSaved(generation=1, step=3, layers=(2, 3)))
    assert len(history.events("checkpoint")) == 1


# --- the state -------------------------------------------------------------------------------------------------------


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
    with pytest.raises(ControlError, match="a rank does not say 'exit'"):
        history.tell(1, Exit(reason="enough"))
    with pytest.raises(ControlError, match="from a peer that has not joined"):
        history.say(999, Ready())
    assert history.state is before


def test_the_same_event_leads_to_the_same_state() -> None:
    history = training()
    event = EndRequested(at=history.at, status="failed", reason="enough")
    assert step(history.state, event) == step(history.state, event)
