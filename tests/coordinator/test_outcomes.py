"""Outcomes of decisions: the steps and seconds that count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chameleon_ft.coordinator.state.incidents import Outcomes
from chameleon_ft.events.records import OutcomeRecord
from chameleon_ft.recovery.generation import GenerationSpec
from tests.coordinator.plans import a_plan


class Followed:
    """Outcomes, and a clock that passes with what happens."""

    def __init__(self) -> None:
        self.reported: list[OutcomeRecord] = []
        self.outcomes = Outcomes()
        self.now = 100.0

    def follow(self, after: tuple[Outcomes, OutcomeRecord | None]) -> None:
        self.outcomes, reported = after
        if reported is not None:
            self.reported.append(reported)

    def end(self) -> None:
        self.follow(self.outcomes.ended())

    def decide(self, generation: int = 2, *, after: float = 0.0, repeated: int = 0, predicted: bool = True) -> None:
        self.now += after
        self.follow(
            self.outcomes.decided(
                generation=generation,
                policy="repair",
                predicted_step_s=0.5 if predicted else None,
                predicted_stall_s=2.0 if predicted else None,
                repeated_steps=repeated,
                now=self.now,
            )
        )

    def resume(self, *, after: float) -> None:
        self.now += after
        self.outcomes = self.outcomes.resumed(self.now)

    def commit(self, *steps_s: float) -> None:
        for step_s in steps_s:
            self.now += step_s
            self.follow(self.outcomes.committed(step_s, self.now))


@pytest.fixture
def followed() -> Followed:
    """A run that has taken some steps before its first decision."""
    found = Followed()
    found.resume(after=5.0)
    found.commit(0.4, 0.4, 0.4)
    return found


def test_ten_steps_are_waited_for_and_the_first_is_left_out(followed: Followed) -> None:
    followed.decide(after=1.0)
    followed.resume(after=0.5)
    followed.commit(9.0, *[0.6] * 8)
    assert followed.reported == []
    followed.commit(0.6)
    (record,) = followed.reported
    assert (record.generation, record.policy, record.steps) == (2, "repair", 10)
    assert (record.predicted_step_s, record.measured_step_s) == (0.5, 0.6)
    assert record.predicted_stall_s == 2.0
    assert record.measured_stall_s == pytest.approx(1.5), "all the time since the last commit"
    assert record.step_error == pytest.approx(0.2)
    assert record.stall_error == pytest.approx(-0.25)
    followed.commit(*[0.6] * 20)
    followed.end()
    assert len(followed.reported) == 1


def test_a_loss_before_the_first_operation_is_measured_from_the_beginning() -> None:
    followed = Followed()
    followed.outcomes = replace(followed.outcomes, since=followed.now)
    followed.decide(after=3.0)
    followed.resume(after=0.5)
    followed.commit(0.6)
    followed.end()
    (record,) = followed.reported
    assert record.measured_stall_s == pytest.approx(3.5)


def test_where_it_ends_earlier_there_are_fewer_steps(followed: Followed) -> None:
    followed.decide(after=1.0)
    followed.resume(after=0.5)
    followed.commit(9.0)
    followed.decide(3, after=1.0)
    assert [(each.generation, each.steps, each.measured_step_s) for each in followed.reported] == [(2, 1, 9.0)]
    followed.resume(after=1.0)
    followed.commit(9.0, 0.5)
    followed.end()
    assert [(each.generation, each.steps, each.measured_step_s) for each in followed.reported[1:]] == [(3, 2, 0.5)]


def test_a_decision_that_is_overtaken_has_no_outcome_and_what_it_took_is_not_charged_to_the_next(
    followed: Followed,
) -> None:
    followed.decide(2, after=1.0)
    followed.decide(3, after=4.0)
    followed.resume(after=0.5)
    followed.commit(0.5)
    followed.end()
    (record,) = followed.reported
    assert record.generation == 3
    assert record.measured_stall_s == pytest.approx(4.5)


def test_going_on_once_more_does_not_change_the_stall(followed: Followed) -> None:
    followed.decide(after=1.0)
    followed.resume(after=0.5)
    followed.resume(after=7.0)
    followed.commit(0.5)
    followed.end()
    assert followed.reported[0].measured_stall_s == pytest.approx(1.5)


def test_steps_that_are_repeated_are_lost_too(followed: Followed) -> None:
    followed.decide(after=1.0, repeated=3)
    followed.resume(after=0.5)
    followed.commit(0.5)
    followed.end()
    assert followed.reported[0].measured_stall_s == pytest.approx(1.5 + 3 * 0.4)


def test_what_was_not_predicted_has_no_error(followed: Followed) -> None:
    followed.decide(after=1.0, predicted=False)
    followed.resume(after=0.5)
    followed.commit(0.5)
    followed.end()
    (record,) = followed.reported
    assert (record.predicted_step_s, record.predicted_stall_s) == (None, None)
    assert (record.step_error, record.stall_error) == (None, None)
    assert record.describe() == "step 500 ms, stall 1.500 s"


def test_before_the_first_decision_there_is_nothing_to_report(followed: Followed) -> None:
    followed.commit(*[0.4] * 20)
    followed.end()
    assert followed.reported == []


def test_the_cost_of_a_loss_in_the_step_after_another_is_over_the_predicted_step(followed: Followed) -> None:
    for generation, step in ((2, 3), (3, 4)):
        followed.now += 0.3
        followed.follow(
            followed.outcomes.decided(
                generation=generation,
                policy="reroute",
                predicted_step_s=0.5,
                predicted_stall_s=0.1,
                repeated_steps=0,
                is_salvaged=True,
                now=followed.now,
            )
        )
        followed.outcomes = followed.outcomes.hit(step, generation=generation)
        followed.resume(after=0.1)
        followed.now += 0.2
        followed.follow(followed.outcomes.committed(0.2, followed.now, is_rest=True))
        followed.outcomes, cost = followed.outcomes.cost(step, followed.now)
        assert cost is not None
        # Each interrupted step takes 0.6 s, of the first plan 0.4 s otherwise, of the second 0.5 s as predicted.
        usual_s = 0.4 if generation == 2 else 0.5
        assert cost.failure_cost_steps == pytest.approx(0.6 / usual_s - 1)
        assert cost.predicted_steps == pytest.approx(0.1 / usual_s)
    followed.commit(0.55)
    followed.end()
    (record,) = followed.reported
    assert record.measured_stall_s == pytest.approx(0.1)


def test_layers_that_move_make_an_interrupted_step_longer() -> None:
    outcomes = Outcomes()
    for number in range(5):
        outcomes, _ = outcomes.committed(2.0, 2.0 * number)
    outcomes, _ = outcomes.decided(
        generation=2,
        policy="reroute",
        predicted_step_s=3.0,
        predicted_stall_s=0.5,
        repeated_steps=0,
        is_salvaged=True,
        now=8.5,
    )
    hit = outcomes.hit(5, generation=2)

    def predicted(plan: GenerationSpec) -> float | None:
        _, cost = hit.migrating(plan, 9.0).cost(5, 11.0)
        assert cost is not None
        return cost.predicted_steps

    plan = replace(a_plan([0, 1], first_step=5), predicted_step_s=3.4)
    _, plain = hit.cost(5, 11.0)
    assert plain is not None
    assert plain.predicted_steps == pytest.approx(0.25)
    assert predicted(plan) == pytest.approx(0.45)
    for unpredicted in (None, 2.0):
        assert hit.migrating(replace(plan, predicted_step_s=unpredicted), 9.0) == hit
    assert outcomes.migrating(plan, 9.0) == outcomes, "no step is interrupted"
    # The vote would be at 8 + 2 + 0.5 + 0.4. The layers arrive before it, after it, and after the vote waits no longer.
    assert predicted(replace(plan, migration_s=1.8, hold_s=0.6)) == pytest.approx(0.45)
    assert predicted(replace(plan, migration_s=2.2, hold_s=0.6)) == pytest.approx(0.45 + 0.15)
    assert predicted(replace(plan, migration_s=9.0, hold_s=0.6)) == pytest.approx(0.45 + 0.3)
