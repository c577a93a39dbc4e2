"""Coordinators that are replaced while workers have a wrong state, or while a step is bad."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Literal

import pytest

from chameleon_ft.config import Health as HealthConfig
from chameleon_ft.coordinator.commands import DistrustCheckpoints
from chameleon_ft.coordinator.events import Decided, Interrupted
from chameleon_ft.coordinator.state.state import Phase
from chameleon_ft.protocol.messages import BadStep, StateDiffers, Stop
from tests.coordinator.histories import History, new_state
from tests.coordinator.plans import a_plan


def training(**changes: object) -> History:
    """A run that has taken three steps; before the last one, all holders agreed."""
    history = History(new_state(**changes))
    history.train(2)
    history.commit(checked=True)
    history.holds = True
    return history


def replaced(history: History) -> None:
    """Replace the coordinator, and have its peers come back."""
    history.commands.clear()
    history.take_over()
    history.return_agent()
    for worker in history.live():
        history.return_worker(worker, known=history.state.newest)


def differ(history: History) -> None:
    """Have a worker report that no majority of the holders has the same state."""
    checksums = ((1, ((0, 5), (1, 5), (2, 6), (3, 6))),)
    step, generation = history.state.committed, history.state.active_generation
    history.tell(0, StateDiffers(generation=generation, step=step, checksums=checksums))


def bad_step(history: History, *workers: int, again: bool = True) -> None:
    generation, step = history.state.active_generation, history.state.committed
    for worker in workers:
        history.tell(
            worker,
            BadStep(
                generation=generation,
                step=step,
                why="the loss is nan",
                is_bad_again=again,
                has_changed=False,
                origins=(),
            ),
        )


def return_to(history: History, load: int | Literal["initial"]) -> None:
    """Answer a question with a return to a checkpoint, or to fresh weights."""
    asked = history.questions.pop(0)
    plan = replace(a_plan(asked.members.live(), first_step=0 if load == "initial" else load), load=load)
    history.happen(Decided(at=history.at, question=asked.question, spec=plan))


def quiesce(history: History, *, loaded: Collection[int], generation: int) -> None:
    """Have all quiesce, of which some have begun a generation before."""
    for worker in history.live():
        history.quiesce(worker, placed=generation if worker in loaded else 1)


@pytest.mark.parametrize("phase", [Phase.STOPPING, Phase.DECIDING])
def test_all_still_return_to_a_checkpoint_from_before_the_disagreement(phase: Phase) -> None:
    history = training()
    differ(history)
    if phase is Phase.DECIDING:
        history.quiesce()
    assert history.state.phase is phase
    replaced(history)
    assert DistrustCheckpoints(after=2) in history.commands, "the one before may not have marked them"
    history.quiesce()
    (asked,) = history.questions
    assert asked.checkpoints.is_reread
    assert asked.health.disagreement is not None


@pytest.mark.parametrize("loaded", [(), (0, 3)])
@pytest.mark.parametrize("cause", ["disagreement", "bad step"])
def test_workers_that_have_not_got_the_order_to_load_a_checkpoint_get_it_again(
    loaded: tuple[int, ...], cause: str
) -> None:
    history = training(health=HealthConfig(on_bad_step="rollback"))
    if cause == "disagreement":
        differ(history)
    else:
        bad_step(history, 0, 1, 2, 3)
    history.quiesce()
    return_to(history, 2)
    generation = history.state.generation
    replaced(history)
    quiesce(history, loaded=loaded, generation=generation)
    (asked,) = history.questions
    assert asked.checkpoints.is_reread, "some have the state that was to be given up"
    return_to(history, 2)
    history.start()
    assert not history.state.checkpoints.is_reread
    assert history.state.health.agreed == 2


def test_workers_that_have_all_loaded_the_checkpoint_go_on_with_it() -> None:
    history = training()
    differ(history)
    history.quiesce()
    return_to(history, 2)
    generation = history.state.generation
    replaced(history)
    quiesce(history, loaded=history.live(), generation=generation)
    (asked,) = history.questions
    assert not asked.checkpoints.is_reread


def test_reports_of_a_bad_step_are_counted_across_coordinators() -> None:
    history = training(health=HealthConfig(on_bad_step="rollback"))
    bad_step(history, 0, 1)
    replaced(history)
    bad_step(history, 2)
    assert not history.sent(Stop)
    replaced(history)
    bad_step(history, 3)
    assert len(history.events("bad_step")) == 1
    assert history.state.health.skipped == {3}
    assert history.state.phase is Phase.STOPPING


def test_a_run_that_ends_by_a_bad_step_ends_with_another_coordinator() -> None:
    history = training(health=HealthConfig(on_bad_step="stop"))
    bad_step(history, 0, 1, 2, 3)
    replaced(history)
    history.finish()
    assert history.state.ended is not None
    assert history.state.ended[0] == "failed"
    assert history.state.ended[1].startswith("the loss is nan in step 3")


def test_an_end_by_a_bad_step_that_was_interrupted_is_not_the_reason_of_a_later_one() -> None:
    history = training(health=HealthConfig(on_bad_step="stop"))
    history.holds = False
    bad_step(history, 0, 1, 2, 3)
    history.reap(2)
    history.quiesce()
    history.start()
    bad_step(history, 0, 1, 3, again=False)
    history.commit()
    history.happen(Interrupted(at=history.at))
    history.finish()
    assert history.state.ended == ("interrupted", "interrupted by the user, with a checkpoint")


def test_a_bad_step_after_which_workers_switch_is_recorded_with_all_reports() -> None:
    history = training(steps=30)
    history.holds = False
    history.replace_lost()
    generation, number = history.state.generation, history.state.committed
    for worker in (0, 1, 2):
        report = BadStep(
            generation=generation,
            step=number,
            why="the loss is nan",
            is_bad_again=True,
            has_changed=False,
            origins=((worker, 0, 1, "data"),),
        )
        history.tell(worker, report)
        history.commit_by(worker, number, generation=generation, switch=True, skipped=True)
    (event,) = history.events("bad_step")
    assert [each["worker"] for each in event["origins"]] == [0, 1, 2]


@pytest.mark.parametrize("loaded", [(), (0, 3)])
def test_first_orders_that_only_some_workers_have_got_are_given_again(loaded: tuple[int, ...]) -> None:
    history = History()
    history.holds = True
    history.gather()
    return_to(history, "initial")
    assert history.state.phase is Phase.REGROUPING
    replaced(history)
    for worker in history.live():
        is_loaded = worker in loaded
        history.quiesce(worker, placed=1 if is_loaded else 0, layers=range(4) if is_loaded else ())
    (asked,) = history.questions
    assert asked.holds_nothing or asked.checkpoints.is_reread


def test_generations_that_coordinators_have_stopped_do_not_count_as_failed_messages() -> None:
    history = training()
    history.holds = False
    history.reap(1)
    history.quiesce()
    for _ in range(8):
        assert history.state.phase is Phase.REGROUPING
        replaced(history)
        history.quiesce()
    history.start()
    history.commit()
    assert history.state.committed == 4
