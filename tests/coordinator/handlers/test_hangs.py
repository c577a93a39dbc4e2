"""Workers that hang and messages that fail, replayed through the state machine; and the evidence of hangs."""

from __future__ import annotations

from chameleon_ft.config import Timeouts
from chameleon_ft.coordinator.commands import Drop, SaveEvidence
from chameleon_ft.coordinator.state.state import Phase
from chameleon_ft.events.evidence import ENTRIES, activity_entry
from chameleon_ft.protocol.messages import HangEvidence, Hello, Kill, PeerFailed, Position, Probe, ProcessState
from chameleon_ft.protocol.parts import Member
from tests.coordinator.histories import AGENT, History
from tests.coordinator.situations import training


def test_a_stopped_process_is_found_by_a_probe() -> None:
    history = training()
    history.wait(0.5)
    probe = history.sent(Probe, to=AGENT)[-1].probe
    assert history.sent(Probe, to=21), "ranks are asked, too"
    history.tell(2, Position(probe=probe, doing="F3", waiting=True, since_s=60.0))
    history.say(AGENT, ProcessState(probe=probe, member=Member(1, 1), stopped=True))
    assert history.live() == (0, 1, 2, 3), "a debugger may have stopped it for a moment"
    history.wait(1.0)
    probe = history.sent(Probe, to=AGENT)[-1].probe
    history.say(AGENT, ProcessState(probe=probe, member=Member(1, 1), stopped=True))
    history.quiesce()
    history.start()
    assert history.failures == [(1, "watchdog", "hung: its process is stopped")]


def test_missing_heartbeats_of_a_worker_are_judged_by_its_agent() -> None:
    history = training()
    history.silence(history.connection(1))
    assert history.sent(Probe, to=AGENT)[-1] == Probe(probe=0, worker=1)
    history.say(AGENT, ProcessState(probe=0, member=Member(1, 1), stopped=False))
    history.commit()
    assert history.live() == (0, 1, 2, 3), "its process lives"
    history.say(AGENT, ProcessState(probe=0, member=Member(1, 1), stopped=True))
    history.silence(history.connection(1), 1.5)
    history.say(AGENT, ProcessState(probe=0, member=Member(1, 1), stopped=True))
    assert history.live() == (0, 1, 2, 3), "it has answered meanwhile"
    history.silence(history.connection(1), 2.0)
    history.say(AGENT, ProcessState(probe=0, member=Member(1, 1), stopped=True))
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
        history.say(20 * worker + 1, Hello(member=Member(worker, 0), host="10.0.0.1"))
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
    evidence = HangEvidence(member=Member(1, 1), process="state S", activity=ACTIVITY)
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
    history.wait(59.0)
    assert history.state.phase is Phase.STOPPING
    history.wait(2.0)
    history.start()
    assert history.failures == [(1, "child", "SIGKILL"), (3, "watchdog", "hung: it does not leave its operation")]


def test_a_coordinator_that_was_held_up_blames_no_worker() -> None:
    history = History()
    history.train(steps=0)
    history.wait(0.05)
    history.now += 100.0
    history.wait(7.0)
    assert history.sent(Probe) == [], "before the first step, some seconds are granted"
    history.wait(1.0)
    assert history.sent(Probe) != []


def test_the_worker_that_messages_fail_with_is_given_up() -> None:
    history = training()
    for worker in (0, 3):
        history.tell(worker, PeerFailed(generation=1, peer=2, error="reset"))
    history.quiesce()
    history.start()
    assert history.failures == [(2, "peer", "messages with it failed: reset")]
    assert history.members() == (0, 1, 3)
