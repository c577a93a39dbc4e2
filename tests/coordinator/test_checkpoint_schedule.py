"""When checkpoints are written if the run chooses that itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.config import Checkpoint, Recovery
from chameleon_ft.coordinator.commands import CompleteCheckpoint, DistrustCheckpoints, MarkDamaged
from chameleon_ft.coordinator.events import Decided
from chameleon_ft.coordinator.state.checkpoints import Checkpoints, CheckpointSchedule
from chameleon_ft.coordinator.state.state import Phase, State
from chameleon_ft.protocol.messages import (
    BeginCheckpoint,
    CheckpointSaved,
    CheckpointUnreadable,
    Refused,
    SaveCheckpoint,
    Stop,
)
from chameleon_ft.recovery.checkpoints import daly_interval_s
from tests.coordinator.histories import History, new_state
from tests.coordinator.plans import LAYERS, a_plan

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.floats(0.01, 10.0)),
        st.tuples(st.just("begin"), st.floats(0.01, 10.0)),
        st.tuples(st.sampled_from(["complete", "failed"]), st.floats(0.0, 1.0)),
        st.tuples(st.sampled_from(["loss", "return"]), st.just(0.0)),
    ),
    max_size=40,
)


@given(events=EVENTS)
def test_one_request_at_a_time_and_no_work_is_forgotten(events: list[tuple[str, float]]) -> None:
    schedule, step, unsaved_s, since_begun_s = CheckpointSchedule(), 0, 0.0, 0.0
    for kind, seconds in events:
        begun = None
        if kind in ("step", "begin"):
            step += 1
            begun = step if kind == "begin" and schedule.is_requested else None
            schedule = schedule.committed(seconds, usual_s=1.0, begun=begun)
            unsaved_s, since_begun_s = unsaved_s + seconds, since_begun_s + seconds
            if begun is not None:
                since_begun_s = 0.0
            if schedule.cost_s is not None and schedule.interval_s is None:
                schedule = replace(schedule, interval_s=5.0)
            if schedule.is_due:
                before = schedule.request
                schedule = schedule.requested()
                assert schedule.request == before + 1
                assert not schedule.is_due, "only one at a time"
        elif kind in ("complete", "failed") and schedule.writing is not None:
            schedule = schedule.ended(schedule.writing, copy_s=seconds, is_complete=kind == "complete")
            assert schedule.cost_s is not None
            assert schedule.cost_s >= seconds
            if kind == "complete":
                unsaved_s = since_begun_s
        elif kind == "loss":
            if schedule.writing is not None:
                since_begun_s = unsaved_s
            schedule = schedule.interrupted()
            assert not schedule.is_requested
        elif kind == "return":
            schedule, unsaved_s, since_begun_s = schedule.returned(), 0.0, 0.0
        assert schedule.unsaved_s == pytest.approx(unsaved_s)
        assert schedule.since_s == pytest.approx(since_begun_s)
        assert schedule.since_s <= schedule.unsaved_s + 1e-9
        # Each request is answered or given up before long: none is due only while one waits, or is too early.
        if schedule.interval_s is not None and schedule.since_s >= schedule.interval_s:
            assert schedule.is_due or schedule.is_requested


def training(**changes: object) -> History:
    """Return a run whose first worker has begun; every = "auto" unless `changes` say otherwise."""
    history = History(new_state(steps=100_000, **changes))
    history.gather()
    history.start()
    return history


def save(history: History, step: int, *, copy_s: float, error: str | None = None) -> None:
    layers = tuple(range(LAYERS))
    message = CheckpointSaved(
        generation=history.state.generation, step=step, layers=layers, copy_s=copy_s, write_s=9.0, error=error
    )
    history.tell(0, message)


def requests(history: History) -> list[int]:
    """Return the requests that worker 0 has got."""
    return [message.request for message in history.sent(BeginCheckpoint, to=history.state.members[0].connection)]


def test_the_first_is_requested_at_once_and_the_next_after_dalys_interval() -> None:
    history = training(recovery=Recovery(worker_mtbf_hours=1.0))
    assert requests(history) == []
    history.commit()
    assert requests(history) == [1]
    assert len(history.sent(BeginCheckpoint)) == 4, "all workers are told"
    history.commit()  # some worker did not know it yet
    history.commit(checkpoint=True)
    history.commit()
    save(history, 3, copy_s=0.02)
    assert [each for each in history.commands if isinstance(each, CompleteCheckpoint)] == [
        CompleteCheckpoint(3, agreed=0)
    ]
    history.commit()
    interval_s = history.state.checkpoints.schedule.interval_s
    assert interval_s is not None
    # Most returns follow a failure of the coordinator's machine, which fails once in an hour; others come on top.
    assert daly_interval_s(0.02, 1_000.0) < interval_s <= daly_interval_s(0.02, 3_600.0)
    while history.state.checkpoints.schedule.since_s + 0.1 < interval_s:
        history.commit()
        assert requests(history) == [1]
    history.commit()
    assert requests(history) == [1, 2]


def test_a_run_that_loses_more_writes_more() -> None:
    interval_s = []
    for hours in (5_000.0, 50.0, 0.5):
        history = training(recovery=Recovery(worker_mtbf_hours=hours))
        history.commit()
        history.commit(checkpoint=True)
        save(history, 2, copy_s=0.5)
        history.commit()
        interval_s.append(history.state.checkpoints.schedule.interval_s or 0.0)
    assert interval_s == sorted(interval_s, reverse=True)
    assert interval_s[0] > 10 * interval_s[2] > 0


def test_the_restart_policy_counts_every_loss() -> None:
    intervals_s = {}
    for policy in ("restart", "chameleon"):
        history = training(recovery=Recovery(policy=policy))
        history.commit()
        history.commit(checkpoint=True)
        save(history, 2, copy_s=0.5)
        history.commit()
        intervals_s[policy] = history.state.checkpoints.schedule.interval_s or 0.0
    assert intervals_s["restart"] < intervals_s["chameleon"]


def test_after_a_loss_an_unfinished_checkpoint_is_requested_anew() -> None:
    history = training()
    history.commit()
    history.commit(checkpoint=True)
    history.tell(0, CheckpointSaved(generation=1, step=2, layers=(0, 1), copy_s=0.1))
    history.reap(1)
    history.quiesce()
    history.start()
    history.commit()
    assert requests(history) == [1, 2]


def test_one_that_cannot_be_written_is_tried_again_after_the_interval_only() -> None:
    history = training()
    history.commit()
    history.commit(checkpoint=True)
    save(history, 2, copy_s=0.5, error="OSError: disk full")
    for _ in range(20):
        history.commit()
    assert requests(history) == [1]


def test_one_that_is_still_written_when_the_next_is_due_is_reported() -> None:
    history = training(recovery=Recovery(worker_mtbf_hours=1e-6))
    history.commit()
    history.commit(checkpoint=True)
    save(history, 2, copy_s=1e-6)
    while requests(history) == [1]:
        history.commit()
    history.commit(checkpoint=True)
    writing = history.state.checkpoints.schedule.writing
    while requests(history) == [1, 2]:
        history.commit()
    (event,) = history.events("checkpoint_late")
    assert event["step"] == writing
    for _ in range(20):
        history.commit()
    assert len(history.events("checkpoint_late")) == 1


@pytest.mark.parametrize("every", [0, 7])
def test_nothing_is_requested_if_the_user_has_chosen(every: int) -> None:
    history = training(checkpoint=Checkpoint(every=every))
    for _ in range(20):
        history.commit()
    assert requests(history) == []


COMMAND = 5000  # its connection


@pytest.mark.parametrize("every", [0, 7, "auto"])
def test_a_user_gets_a_checkpoint_whatever_the_interval(every: int | Literal["auto"]) -> None:
    history = training(checkpoint=Checkpoint(every=every), recovery=Recovery(worker_mtbf_hours=1e6))
    if every == "auto":  # the first one measures the cost
        history.commit()
        history.commit(checkpoint=True)
        save(history, 2, copy_s=1.0)
    history.commit()
    before, committed = len(requests(history)), history.state.committed
    history.say(COMMAND, SaveCheckpoint())
    assert history.sent(SaveCheckpoint, to=COMMAND) == [SaveCheckpoint(committed=committed)]
    assert len(requests(history)) == before + 1
    history.say(COMMAND, SaveCheckpoint())
    history.commit()
    assert len(requests(history)) == before + 1, "one is enough for all who ask before it begins"
    history.commit(checkpoint=True)
    save(history, history.state.committed, copy_s=1.0)
    for _ in range(3):
        history.commit()
    assert len(requests(history)) == before + 1
    history.say(COMMAND, SaveCheckpoint())
    assert len(requests(history)) == before + 2


@pytest.mark.parametrize("every", [0, "auto"])
def test_what_a_user_has_asked_for_is_not_forgotten_in_a_recovery(every: int | Literal["auto"]) -> None:
    history = training(checkpoint=Checkpoint(every=every))
    history.commit()
    history.say(COMMAND, SaveCheckpoint())
    before = len(requests(history))
    history.reap(1)
    history.say(COMMAND, SaveCheckpoint())
    assert len(requests(history)) == before, "none trains"
    history.quiesce()
    history.start()
    history.commit()
    assert len(requests(history)) == before + 1
    assert State.from_json(history.state.to_json()) == history.state


def test_a_user_waits_for_no_checkpoint_that_has_failed_before() -> None:
    history = training(checkpoint=Checkpoint(every=0))
    history.commit(checkpoint=True)
    failed = history.state.committed
    history.tell(0, CheckpointSaved(generation=1, step=failed, layers=(0, 1), error="OSError: disk full"))
    history.say(COMMAND, SaveCheckpoint())
    history.commit()
    history.say(COMMAND, SaveCheckpoint())
    assert history.sent(SaveCheckpoint, to=COMMAND) == [SaveCheckpoint(committed=failed + 1)] * 2


def test_after_a_return_to_a_checkpoint_no_later_one_has_failed() -> None:
    events = Checkpoints().not_written(7, "disk full")
    assert events.without_parts_before(3).failed == {7: "disk full"}
    assert events.loaded(3).failed == {}


def test_before_training_there_is_nothing_to_save() -> None:
    history = History(new_state())
    history.say(COMMAND, SaveCheckpoint())
    assert [refused.reason for refused in history.sent(Refused, to=COMMAND)] == [
        "the run has not begun; wait until it trains"
    ]


@pytest.mark.parametrize(
    ("every", "steps", "workers_per_host", "warned"),
    [(0, 100_000, None, 1), (0, 20, None, 0), (5, 100_000, None, 0), ("auto", 100_000, None, 0), (0, 100_000, 2, 0)],
)
def test_a_long_run_without_checkpoints_is_warned_about(
    every: int, steps: int, workers_per_host: int | None, warned: int
) -> None:
    state = new_state(steps=steps, checkpoint=Checkpoint(every=every), workers_per_host=workers_per_host)
    history = History(state)
    history.gather()
    history.start()
    for _ in range(6):
        history.commit()
    events = history.events("no_checkpoints")
    assert len(events) == warned
    assert all("all work is lost if the machine of the coordinator fails" in event["message"] for event in events)


# --- checkpoints that cannot be read ---------------------------------------------------------------------------------


def test_a_newer_checkpoint_loses_its_mark_also_if_the_first_step_from_an_older_one_is_interrupted() -> None:
    history = training()
    history.holds = True
    history.reap(3)
    history.quiesce()
    question = history.questions.pop()
    plan = replace(a_plan([0, 1, 2], first_step=2), load=2)
    history.happen(Decided(at=history.at, question=question.question, spec=plan))
    history.start()
    history.holds = False
    history.reap(2)
    history.quiesce(placed=history.state.active_generation)
    history.start()
    assert history.state.checkpoints.loads < history.state.generation
    assert DistrustCheckpoints(after=2) not in history.commands
    history.commit()
    assert DistrustCheckpoints(after=2) in history.commands


@pytest.mark.parametrize("is_damaged", [True, False])
def test_all_workers_stop_if_one_cannot_read_the_checkpoint(is_damaged: bool) -> None:
    history = training()
    history.commit()
    history.holds = True
    for worker in (1, 2, 3):
        history.reap(worker)
    history.quiesce()
    question = history.questions[-1]
    plan = replace(a_plan([0], first_step=4), load=4)
    history.happen(Decided(at=history.at, question=question.question, spec=plan))
    generation = history.state.generation
    stops = len(history.sent(Stop))
    unreadable = CheckpointUnreadable(generation=generation, step=4, error="layer 1: a file", is_damaged=is_damaged)
    history.tell(0, unreadable)
    assert len(history.sent(Stop)) == stops + 1
    assert (MarkDamaged(4) in history.commands) == is_damaged
    (event,) = history.events("checkpoint_unreadable")
    assert event["message"] == "that of step 4 cannot be read and is not used again: worker 0: layer 1: a file"
    assert dict(history.state.checkpoints.unreadable) == {4: "worker 0: layer 1: a file"}
    history.tell(0, unreadable)
    assert len(history.events("checkpoint_unreadable")) == 1, "that generation is over"
    history.quiesce()
    assert history.state.phase is Phase.DECIDING
    assert history.state.checkpoints.is_reread
    question = history.questions[-1]
    history.happen(Decided(at=history.at, question=question.question, spec=replace(a_plan([0], first_step=2), load=2)))
    assert history.state.committed == 2
    history.start()
    assert DistrustCheckpoints(after=2) not in history.commands
    history.commit()
    assert DistrustCheckpoints(after=2) in history.commands, "that of step 4 is to be written again"
    assert not history.state.checkpoints.is_reread


def test_a_checkpoint_that_is_written_again_can_be_read_again() -> None:
    history = training()
    state = history.state
    history.state = replace(state, checkpoints=replace(state.checkpoints, unreadable={1: "a file is missing"}))
    history.commit()
    save(history, 1, copy_s=0.0)
    assert CompleteCheckpoint(1, agreed=history.state.health.agreed) in history.commands
    assert not history.state.checkpoints.unreadable
