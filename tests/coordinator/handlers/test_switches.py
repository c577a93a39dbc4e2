"""Switches to another generation during training, replayed through the state machine: migrations and waves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chameleon_ft.config import Timeouts
from chameleon_ft.coordinator.commands import MeasureMigration, Record, Task
from chameleon_ft.coordinator.events import Interrupted
from chameleon_ft.coordinator.state.state import Phase
from chameleon_ft.events.decisions import DecisionEvent
from chameleon_ft.events.records import JoinRecord
from chameleon_ft.protocol.messages import Discard, PeerFailed, Stop, Switch
from chameleon_ft.quantities import duration
from tests.coordinator.histories import History
from tests.coordinator.situations import RESPAWNING, come_back, drain, training


def test_layers_move_in_a_generation_of_their_own() -> None:
    history = training(recovery=RESPAWNING)
    come_back(history)
    history.consider(0, 1, 2, 3, waves=1)
    before = history.state.active
    history.prepare()
    history.commit(switch=True)
    state = history.state
    assert state.active is not None
    assert state.switches.next is not None
    assert (state.active.migration is not None, state.in_force) == (True, before)
    assert (state.generation, state.switches.next.number) == (3, 4)
    history.start()
    assert history.records(JoinRecord) == [], "it has no operations yet"
    history.wait(200.0)
    history.commit()
    assert history.state.switches.next is not None, "a migration may take far longer than predicted"
    assert history.state.switches.next.number == 4
    history.switch()
    assert history.state.in_force == before
    (record,) = history.records(JoinRecord)
    assert (record.workers, record.generation, record.moved_bytes, record.rounds) == ((1,), 4, 64, 0)
    assert record.migrate_s == pytest.approx(200.0)
    decisions = [
        index
        for index, command in enumerate(history.commands)
        if isinstance(command, Record) and isinstance(command.record, DecisionEvent)
    ]
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
    assert (history.state.switches.next, history.state.switches.following) == (None, ())


@pytest.mark.parametrize("placed", [2, 3])
def test_a_loss_in_the_switch_finds_one_placement_in_force(placed: int) -> None:
    history = training(recovery=RESPAWNING)
    come_back(history)
    history.consider(0, 1, 2, 3)
    history.prepare()
    upcoming, before = history.state.switches.next, history.state.active
    assert upcoming is not None
    history.holds = True
    history.reap(1)
    assert (history.state.phase, history.state.generation) == (Phase.STOPPING, 4), "it may have switched"
    history.quiesce(placed=placed)
    assert history.state.in_force == (before if placed == 2 else upcoming.spec)


def test_a_message_that_fails_before_its_worker_has_switched_counts() -> None:
    history = training(recovery=RESPAWNING)
    come_back(history)
    history.consider(0, 1, 2, 3)
    history.prepare()
    history.commit_by(0, history.state.committed, switch=True)
    assert history.state.generation == 3
    history.tell(3, PeerFailed(generation=2, peer=None, error="reset"))
    assert (history.state.phase, history.state.generation) == (Phase.STOPPING, 4)


@pytest.mark.parametrize("how", ["error", "time"])
def test_a_generation_that_cannot_be_prepared_is_given_up_and_tried_again_ever_later(how: str) -> None:
    timeouts = Timeouts(watchdog_min_s=6.0, collective_timeout_s=8.0, rendezvous_s=10.0)
    history = training(recovery=RESPAWNING, timeouts=timeouts)
    come_back(history)
    waits = []
    for attempt in range(1, 4):
        history.consider(0, 1, 2, 3)
        if how == "error":
            history.prepare(2, error="OSError: no port")
        else:
            history.prepare(0, 2)
            history.wait(history.state.settings.timeouts.rendezvous_s + 0.1)
        assert history.state.switches.next is None
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
    assert history.state.switches.next is not None
    assert history.state.switches.next.number == 5
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
    assert (history.state.switches.next, len(history.state.switches.following)) == (None, 2)
    assert history.records(JoinRecord) == []
    assert history.considerations == []
    history.wait(1.0)
    assert history.state.switches.next is None, "some worker may still hold more"
    history.commit()
    history.wait(0.1)
    state = history.state
    assert state.active is not None
    assert state.switches.next is not None
    assert state.active.migration is not None, "all workers have dropped layers: there is memory for others"
    assert (state.generation, state.switches.next.number) == (4, 5)
    assert state.in_force == state.placed != state.active
    history.wait(49.9)
    history.switch()
    (record,) = history.records(JoinRecord)
    assert (record.workers, record.generation, record.waves, record.moved_bytes) == ((1,), 5, 2, 128)
    measured = [command for command in history.commands if isinstance(command, MeasureMigration)]
    assert sum(each.seconds for each in measured) == pytest.approx(record.migrate_s)
    assert [each.migration.total_bytes for each in measured] == [64, 64]
    assert record.migrate_s == pytest.approx(149.95), "the second wave begins with the tick that notes the commit"
    switches = history.state.switches
    assert (switches.next, switches.following, switches.migrated.waves) == (None, (), 0)


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
    switches = history.state.switches
    assert (switches.next, switches.following, switches.migrated.waves) == (None, (), 0)
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
        assert history.state.switches.next is not None
        if how == "error":
            history.prepare(1, error="no memory", cannot_migrate=True)
        else:
            history.prepare(0, 2)
            history.wait(5.0 * 2**attempt - 1.0)
            assert history.state.switches.next is not None
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
        assert (state.active.migration, state.switches.following, state.switches.next) == (None, (), None)
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
        assert history.state.switches.following, "it is noticed when the next wave is to be prepared"
        history.commit()
        history.wait(0.1)
    assert (history.state.switches.next, history.state.switches.following) == (None, ())
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
