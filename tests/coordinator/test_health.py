"""Holders of layers with different states: which of them are lost, and when all return to a checkpoint."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.config import Health as HealthConfig
from chameleon_ft.config import Recovery
from chameleon_ft.coordinator.commands import CompleteCheckpoint, DistrustCheckpoints
from chameleon_ft.coordinator.events import Decided
from chameleon_ft.coordinator.state.checkpoints import Health
from chameleon_ft.coordinator.state.state import Phase
from chameleon_ft.plan import LayerRange, Placement
from chameleon_ft.protocol.messages import BadStep, CheckpointSaved, Finish, PeerFailed, StateDiffers
from tests.coordinator.histories import History, new_state
from tests.coordinator.plans import a_plan


def differs(history: History, checksums: dict[int, int], *, layer: int = 1) -> StateDiffers:
    found = ((layer, tuple(checksums.items())),)
    return StateDiffers(generation=history.state.active_generation, step=history.state.committed, checksums=found)


def training(**changes: object) -> History:
    """A run that has taken three steps; before the last one, all holders agreed."""
    history = History(new_state(**changes))
    history.train(2)
    history.commit(checked=True)
    return history


def return_to(history: History, step: int) -> None:
    """Answer a question with a return to a checkpoint."""
    asked = history.questions.pop(0)
    plan = replace(a_plan(asked.members.live(), first_step=step), load=step)
    history.happen(Decided(at=history.at, question=asked.question, spec=plan))
    history.start()


def test_the_worker_that_differs_from_a_majority_is_lost() -> None:
    history = training(recovery=Recovery(respawn=True))
    report = differs(history, {0: 5, 1: 5, 2: 6, 3: 5})
    for worker in (1, 3, 0, 2):
        history.tell(worker, report)
    history.quiesce()
    history.start()
    cause = "its state of layer 1 after 3 updates differs from that of its peers"
    assert history.failures == [(2, "checksum", cause)]
    assert history.launched == (0, 1, 3)
    assert DistrustCheckpoints(after=2) in history.commands
    assert not history.state.checkpoints.is_reread, "the others go on with the state that they have"
    history.wait(6.0)
    assert 2 in history.state.respawns.deaths


def test_a_checkpoint_that_workers_are_still_writing_does_not_count() -> None:
    history = training()
    history.tell(0, CheckpointSaved(generation=1, step=2, layers=(0, 1)))
    history.tell(1, differs(history, {0: 5, 1: 5, 2: 6, 3: 5}))
    history.tell(1, CheckpointSaved(generation=1, step=2, layers=(2, 3)))
    assert not any(isinstance(command, CompleteCheckpoint) for command in history.commands)


def test_without_a_majority_all_return_to_a_checkpoint() -> None:
    history = training()
    history.holds = True
    history.tell(0, differs(history, {0: 5, 1: 5, 2: 6, 3: 6}))
    history.tell(3, PeerFailed(generation=1, peer=2, error="closed"))
    history.quiesce()
    assert not history.failures, "no worker is to blame for the messages that failed"
    (event,) = history.events("state_differs")
    assert "differs between workers 0, 1, 2, 3; all return to a snapshot or checkpoint" in event["message"]
    assert history.state.checkpoints.is_reread
    return_to(history, 2)
    assert history.state.health.agreed == 2
    assert history.state.health.disagreement is None
    assert not history.state.checkpoints.is_reread


def test_a_report_may_come_after_the_generation_was_stopped() -> None:
    history = training()
    history.holds = True
    history.tell(3, PeerFailed(generation=1, peer=2, error="closed"))
    assert history.state.phase is Phase.STOPPING
    history.quiesce(3)
    history.tell(2, differs(history, {2: 5, 3: 6}))
    history.quiesce(0, 1, 2)
    assert not history.failures
    assert history.state.checkpoints.is_reread


@pytest.mark.parametrize("agree_between", [False, True])
def test_a_second_disagreement_ends_the_run_unless_they_have_agreed_since(agree_between: bool) -> None:
    history = training()
    history.holds = True
    history.tell(0, differs(history, {0: 5, 1: 6}))
    history.quiesce()
    return_to(history, 2)
    if agree_between:
        history.commit(checked=True)
        assert history.state.health.agreed == 2
    history.commit()
    history.tell(0, differs(history, {1: 5, 2: 6}))
    if agree_between:
        assert history.state.phase is Phase.STOPPING
    else:
        assert history.state.ended is not None
        assert "again after a return to a checkpoint" in history.state.ended[1]
        assert "resume without worker 1" in history.state.ended[1]


def test_the_run_ends_if_configured_so() -> None:
    history = training(health=HealthConfig(on_disagreement="stop"))
    history.tell(0, differs(history, {0: 5, 1: 6}))
    assert history.state.ended is not None
    status, reason = history.state.ended
    assert status == "failed"
    assert reason.startswith("the state of layer 1 after 3 updates differs between workers 0, 1: ")
    assert DistrustCheckpoints(after=2) in history.commands
    (event,) = history.events("state_differs")
    assert event["message"].endswith("; the run ends"), "no worker returns to a checkpoint"


def test_a_worker_that_got_its_copy_from_another_makes_no_majority() -> None:
    history = training(workers=3, recovery=Recovery(respawn=True, respawn_delay_s=1.0))
    history.reap(1)
    history.quiesce()
    history.start()
    history.commit(checked=True)
    history.wait(1.5)
    history.come_back(1)
    history.wait(1.0)
    history.consider(0, 1, 2)
    history.switch()
    history.holds = True
    history.tell(0, differs(history, {0: 5, 1: 6, 2: 6}))
    assert not history.state.members[0].lost
    assert history.state.checkpoints.is_reread, "worker 1 has a copy from worker 0 or 2"


def test_a_newcomer_that_differs_from_the_only_witness_is_at_fault() -> None:
    health = Health().loaded(0, Placement(2, {each: (LayerRange(0, 2),) for each in range(2)})).without(1)
    assert health.differs(4, {0: {0: 5, 1: 6}}).odd == {1: (0,)}
    both = health.differs(4, {0: {0: 5, 1: 6, 2: 6}})
    assert (both.odd, both.undecided) == ({}, {0: (0, 1, 2)}), "they may have a copy from before the witness changed"


def test_a_lost_worker_is_no_witness_any_more() -> None:
    health = Health().loaded(0, Placement(2, {each: (LayerRange(0, 2),) for each in range(3)}))
    assert health.without(1).witnesses == {0: (0, 2), 1: (0, 2)}


@given(st.integers(1, 8), st.data())
def test_no_sound_worker_is_lost_while_most_witnesses_are_sound(layers: int, data: st.DataObject) -> None:
    workers = data.draw(st.integers(2, 7))
    placement = Placement(layers, {each: (LayerRange(0, layers),) for each in range(workers)})
    health = Health().loaded(0, placement)
    corrupt = data.draw(st.sets(st.integers(0, workers - 1), max_size=(workers - 1) // 2))
    checksums = {
        layer: {each: data.draw(st.integers(2, 4)) if each in corrupt else 1 for each in range(workers)}
        for layer in range(layers)
        if corrupt
    }
    found = health.differs(3, {layer: each for layer, each in checksums.items() if len(set(each.values())) > 1})
    assert set(found.odd) == corrupt
    if workers >= 3:
        assert not found.undecided


@given(st.dictionaries(st.integers(0, 5), st.integers(1, 3), min_size=2), st.sets(st.integers(0, 5)))
def test_whoever_is_lost_differs_from_more_than_half_of_the_witnesses(
    checksums: dict[int, int], witnesses: set[int]
) -> None:
    health = Health(witnesses={0: tuple(sorted(witnesses))})
    found = health.differs(3, {0: checksums})
    votes = Counter(checksums[each] for each in witnesses if each in checksums)
    for worker in found.odd:
        most, count = votes.most_common(1)[0]
        assert checksums[worker] != most
        newcomers = Counter(checksums[each] for each in checksums if each not in witnesses)
        assert 2 * count > sum(votes.values())
        assert count >= 2 or set(newcomers.values()) == {1}
    if not found.odd and len(set(checksums.values())) > 1:
        assert found.doubted == set(checksums)


# --- bad steps -------------------------------------------------------------------------------------------------------


def bad_step(
    history: History, *, again: bool, changed: bool = False, at: tuple[int, int, int, str] | None = None
) -> BadStep:
    return BadStep(
        generation=history.state.active_generation,
        step=history.state.committed,
        why="the loss is nan",
        is_bad_again=again,
        has_changed=changed,
        origins=() if at is None else (at,),
    )


def test_a_step_that_is_good_when_it_is_repeated_names_the_workers_that_have_changed() -> None:
    history = training()
    for worker in range(4):
        history.tell(worker, bad_step(history, again=False, changed=worker == 2))
    history.commit()
    (event,) = history.events("bad_step")
    assert event["changed"] == (2,)
    assert event["message"] == (
        "the loss is nan in step 3, but not when it was computed again, so the hardware is at fault: the contribution "
        "of worker 2 differed"
    )
    assert not history.state.health.reports


def test_workers_may_report_the_next_bad_step_before_others_have_reported_this_one() -> None:
    history = training()
    place = (5, 0, 2, "backward")
    first, second = (bad_step(history, again=True).model_copy(update={"step": step}) for step in (3, 4))
    origins = {"origins": (place,)}
    for worker, report in ((0, first), (0, second), (1, first), (3, second.model_copy(update=origins))):
        history.tell(worker, report)
    assert not history.events("bad_step")
    history.tell(2, first.model_copy(update=origins))
    history.tell(3, first)
    history.tell(1, second)
    history.tell(2, second)
    assert [event["step"] for event in history.events("bad_step")] == [3, 4], "each is told once"
    assert [[each["worker"] for each in event["origins"]] for event in history.events("bad_step")] == [[2], [3]]
    assert not history.state.health.reports
    assert not history.state.health.reporting


def test_the_first_place_is_named_data_before_operations() -> None:
    history = training()
    places = {0: (5, 0, 2, "backward"), 1: (3, 0, 1, "data"), 2: (4, 1, 3, "forward"), 3: (4, 3, 4, "forward")}
    for worker, place in places.items():
        history.tell(worker, bad_step(history, again=True, at=place))
    (event,) = history.events("bad_step")
    assert [each["worker"] for each in event["origins"]] == [1, 2, 3, 0]
    assert event["message"] == (
        "the loss is nan in step 3, also when it was computed again, first in the data of micro-batch 3 in layers 0-0 "
        "on worker 1, the forward of micro-batch 4 in layers 1-2 on worker 2, the forward of micro-batch 4 in layers "
        "3-3 on worker 3 and 1 more place; its samples are left out"
    )


def test_all_return_to_a_checkpoint_once_all_have_reported_and_skip_the_step() -> None:
    history = training(health=HealthConfig(on_bad_step="rollback"))
    history.holds = True
    for worker in range(3):
        history.tell(worker, bad_step(history, again=True))
        assert history.state.phase is Phase.TRAINING, "some worker still computes the step"
    history.tell(3, bad_step(history, again=True))
    assert history.state.health.skipped == {3}
    history.quiesce()
    assert history.state.checkpoints.is_reread
    return_to(history, 2)
    history.commit()
    assert history.state.health.skipped == {3}


def test_a_worker_lost_in_a_bad_step_leaves_the_report_of_the_others() -> None:
    history = training(health=HealthConfig(on_bad_step="rollback"))
    history.tell(0, bad_step(history, again=True))
    history.reap(2)
    history.quiesce()
    assert len(history.events("bad_step")) == 1
    assert not history.state.health.reports
    history.start()
    for worker in (0, 1, 3):
        history.tell(worker, bad_step(history, again=True))
    assert history.state.health.skipped == {3}, "it was bad again"


def test_reports_of_all_survivors_count_also_if_a_worker_was_lost_in_the_bad_step() -> None:
    history = training(health=HealthConfig(on_bad_step="rollback"))
    report = bad_step(history, again=True)
    history.tell(0, report)
    history.reap(2)
    history.tell(3, report)
    history.tell(1, report)
    history.holds = True
    history.quiesce()
    assert len(history.events("bad_step")) == 1
    assert history.state.health.skipped == {3}
    assert history.questions.pop().checkpoints.is_reread


def test_the_run_ends_as_failed_once_the_checkpoint_is_written() -> None:
    history = training(health=HealthConfig(on_bad_step="stop"))
    for worker in range(4):
        history.tell(worker, bad_step(history, again=True))
    assert history.state.phase is Phase.TRAINING
    history.finish()
    assert history.state.ended is not None
    assert history.state.ended[0] == "failed"
    assert "the run ends, with a checkpoint of the state before it; to leave its samples out" in history.state.ended[1]


def test_five_bad_steps_in_a_row_end_the_run() -> None:
    history = training(steps=30)
    for _ in range(4):
        history.commit(skipped=True)
    history.commit()
    for _ in range(4):
        history.commit(skipped=True)
    assert not history.sent(Finish)
    history.commit(skipped=True)
    assert len(history.sent(Finish)) == 4
    history.finish()
    assert history.state.ended is not None
    assert history.state.ended[1].startswith("5 steps in a row were bad, at last step 12: ")
