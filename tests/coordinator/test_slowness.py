"""Slow workers: how they are noticed by their operations, and what the coordinator does about them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.config import Recovery
from chameleon_ft.coordinator.detectors.base import Fenced, Finding, OperationsMeasured, Recovered, Slow
from chameleon_ft.coordinator.detectors.slowness import SlownessDetector
from chameleon_ft.coordinator.events import Considered
from chameleon_ft.events.records import JoinRecord
from tests.coordinator.histories import History, new_state

Speeds = Callable[[int, int], float]
"""The speed of a worker in a step."""


class Watch:
    """A detector of slowness, and what it has found: (number of the step that was trained last, finding)."""

    def __init__(self, workers: int = 8, *, groups: Mapping[int, int | None] | None = None) -> None:
        self.detector = SlownessDetector()
        self.workers = list(range(workers))
        self.groups = groups or {}
        self.step = -1
        self.found: list[tuple[int, Finding]] = []
        self.noise = random.Random(0)

    def train(
        self,
        steps: int,
        speed: Speeds = lambda worker, step: 1.0,
        *,
        sigma: float = 0.0,
        usual: Callable[[int], float] = lambda step: 1.0,
    ) -> list[Finding]:
        """Train steps in which operations take `usual` times as long; return what is found meanwhile."""
        before = len(self.found)
        for _ in range(steps):
            self.step += 1
            for worker in self.workers:
                ratio = usual(self.step) / speed(worker, self.step) * self.noise.lognormvariate(0.0, sigma)
                signal = OperationsMeasured(worker, 1, self.step, ratio, self.groups.get(worker))
                self.detector, found = self.detector.observe(signal)
                self.found += [(self.step - 1, each) for each in found]
        return [each for _, each in self.found[before:]]


def slow_from(worker: int, factor: float, *, first: int = 0, until: int = 1_000_000) -> Speeds:
    return lambda each, step: factor if each == worker and first <= step < until else 1.0


# --- detection -------------------------------------------------------------------------------------------------------


@given(
    factor=st.floats(0.1, 0.9),
    first=st.integers(0, 30),
    workers=st.integers(2, 12),
    sigma=st.sampled_from([0.0, 0.005]),
)
def test_a_slow_worker_is_noticed_within_ten_steps(factor: float, first: int, workers: int, sigma: float) -> None:
    watch = Watch(workers)
    watch.train(first + 11, slow_from(1, factor, first=first), sigma=sigma)
    ((at, slow),) = watch.found
    assert isinstance(slow, Slow)
    assert slow.worker == 1
    assert slow.speed == pytest.approx(factor, abs=0.02)
    assert abs(slow.since_step - first) <= 1
    assert at - first < 10
    assert watch.detector.speeds == {1: slow.speed}


@given(at=st.integers(0, 40), length=st.integers(1, 4), factor=st.floats(0.01, 1.0))
def test_some_slow_steps_are_not_a_slow_worker(at: int, length: int, factor: float) -> None:
    watch = Watch()
    assert not watch.train(60, slow_from(3, factor, first=at, until=at + length), sigma=0.01)


@given(lengths=st.lists(st.floats(0.1, 100.0), min_size=40, max_size=40))
def test_what_makes_all_slow_alike_makes_no_worker_slow(lengths: list[float]) -> None:
    """Sequences of other lengths, a busy host."""
    assert not Watch().train(40, usual=lambda step: lengths[step], sigma=0.01)


@pytest.mark.parametrize("sigma", [0.01, 0.03, 0.1, 0.3])
def test_noise_is_measured_and_no_slowness(sigma: float) -> None:
    """A fixed threshold would raise alarms at the larger of these."""
    watch = Watch(12)
    assert len([each for each in watch.train(400, sigma=sigma) if isinstance(each, Slow)]) <= 1


def test_two_slow_workers_are_both_noticed_with_their_speeds() -> None:
    watch = Watch()
    watch.train(12, lambda worker, step: {2: 0.5, 5: 0.8}.get(worker, 1.0))
    assert watch.detector.speeds == {2: 0.5, 5: 0.8}


def test_a_worker_that_gets_even_slower_is_reported_again() -> None:
    watch = Watch()
    watch.train(12, slow_from(3, 0.8))
    assert watch.train(12, slow_from(3, 0.4)) == [Slow(3, 0.4, 12)]
    assert watch.train(12, slow_from(3, 0.6)) == [Slow(3, 0.6, 24)]


def test_a_worker_that_recovers_is_noticed_too() -> None:
    watch = Watch(2)
    watch.train(20, slow_from(1, 0.5))
    assert watch.train(20) == [Recovered(1, is_trial=False)], "the other is not slow instead"
    assert watch.detector.speeds == {}


def test_recoveries_of_a_worker_that_is_slow_again_and_again_are_believed_later_and_later() -> None:
    watch = Watch()
    watch.train(600, lambda worker, step: 0.5 if worker == 3 and step // 15 % 2 else 1.0)
    recovered = [at for at, each in watch.found if isinstance(each, Recovered)]
    assert len(recovered) == 2, "the third has to last longer than any fast spell"
    assert watch.detector.speeds == {3: 0.5}
    watch.train(100)
    assert watch.detector.speeds == {}


def test_a_worker_that_was_slow_long_ago_begins_anew() -> None:
    watch = Watch()
    for _ in range(4):
        watch.train(20, slow_from(3, 0.5))
        watch.train(200)
    assert {at % 220 for at, each in watch.found if isinstance(each, Recovered)} == {24}


def test_a_slow_worker_out_of_the_plan_is_tried_again_each_time_later() -> None:
    watch = Watch()
    waits = []
    for _ in range(3):
        watch.workers = list(range(8))
        watch.train(12, slow_from(3, 0.5))
        assert watch.detector.speeds == {3: 0.5}
        watch.workers.remove(3)
        since = watch.step
        while watch.detector.speeds:
            watch.train(1)
        assert watch.found[-1][1] == Recovered(3, is_trial=True)
        waits.append(watch.step - since)
        watch.train(100)  # it takes a while until it is in the plan
    assert waits[1] == pytest.approx(2 * waits[0], abs=2)
    assert waits[2] == pytest.approx(4 * waits[0], abs=4)


def test_only_workers_of_a_group_are_compared() -> None:
    """Without a profile, costs do not tell layers apart."""
    watch = Watch(6, groups={worker: worker % 2 for worker in range(6)})
    odd = [worker for worker in range(6) if worker % 2]
    assert not watch.train(20, lambda worker, step: 0.3 if worker in odd else 1.0)
    assert watch.train(10, lambda worker, step: 0.1 if worker == 3 else 0.3 if worker in odd else 1.0) == [
        Slow(3, 0.33, 20)
    ]
    alone = Watch(2, groups={0: 0, 1: 1})
    assert not alone.train(20, slow_from(1, 0.5))


def test_nothing_is_known_of_a_worker_that_is_fenced() -> None:
    watch = Watch()
    watch.train(12, slow_from(3, 0.5))
    watch.detector, found = watch.detector.observe(Fenced(3))
    assert not found
    assert watch.detector.speeds == {}
    assert not watch.train(12)


def test_late_reports_are_left_out() -> None:
    watch = Watch()
    watch.train(12)
    late = OperationsMeasured(3, 1, 5, 100.0, None)
    assert watch.detector.observe(late) == (watch.detector, ())
    # After a return to a checkpoint, steps are counted anew.
    watch.detector, _ = watch.detector.observe(OperationsMeasured(3, 2, 5, 1.0, None))
    assert watch.detector.at == (2, 5)


# --- what the coordinator does about them ----------------------------------------------------------------------------


def trained(speeds: Mapping[int, float]) -> History:
    """Train until the workers with these speeds have been noticed."""
    history = History(new_state(steps=1000))
    history.train(steps=10)
    slow_down(history, speeds)
    return history


def slow_down(history: History, speeds: Mapping[int, float], steps: int = 10) -> None:
    """Change the speeds of workers, and go on."""
    history.speeds |= speeds
    for _ in range(steps):
        history.commit()
    history.wait(0.1)


def test_a_slow_worker_is_reported_and_another_plan_considered_at_once() -> None:
    history = trained({2: 0.5})
    (event,) = history.events("slow")
    assert (event["worker"], event["speed"], event["since_step"]) == (2, 0.5, 10)
    assert event["message"].startswith("worker 2 computes at 0.50 of the speed of others since step 10; a step takes ")
    (asked,) = history.considerations
    assert asked.scale_up.asked_speeds == {2: 0.5}
    history.wait(30.0)
    assert len(history.considerations) == 1, "one question is enough"


def test_all_switch_to_the_plan_for_a_slow_worker_and_back_when_it_has_recovered() -> None:
    history = trained({2: 0.5})
    history.consider(0, 1, 2)
    history.switch()
    assert history.members() == (0, 1, 2)
    assert len(history.records(JoinRecord)) == 1
    history.wait(30.0)
    assert not history.considerations, "the plan in force is for these speeds"
    slow_down(history, {2: 1.0})
    (event,) = history.events("recovered")
    assert (event["worker"], event["is_trial"]) == (2, False)
    (asked,) = history.considerations
    assert (asked.scale_up.speeds, asked.scale_up.asked_speeds) == ({2: 0.5}, {})


def test_if_the_plan_stays_as_it_is_that_is_said_once() -> None:
    history = trained({2: 0.9})
    history.consider()
    (event,) = history.events("stay")
    assert event["slow"] == (2,)
    assert history.events("decision")
    slow_down(history, {}, steps=30)
    assert not history.considerations


def test_a_decision_that_fails_is_recorded_and_not_made_again() -> None:
    history = trained({2: 0.5})
    asked = history.considerations.pop()
    history.happen(Considered(at=history.at, question=asked.scale_up.question, error="no memory"))
    (event,) = history.events("decision_failed")
    assert event["message"] == "the plan stays as it is: the decision on slow workers and links failed: no memory"
    history.wait(30.0)
    assert not history.considerations


def test_a_worker_that_becomes_slow_while_a_plan_is_prepared_is_considered_after_the_switch() -> None:
    history = trained({2: 0.5})
    history.consider(0, 1, 2)
    slow_down(history, {1: 0.5})
    assert not history.considerations
    history.switch()
    history.wait(0.1)
    (asked,) = history.considerations
    assert asked.scale_up.asked_speeds == {1: 0.5, 2: 0.5}


def test_a_plan_that_cannot_be_prepared_is_looked_for_again() -> None:
    history = trained({2: 0.5})
    history.consider(0, 1, 2)
    history.prepare(1, error="no port")
    history.wait(2.0)
    assert len(history.considerations) == 1


def test_a_slow_worker_that_is_lost_is_forgotten() -> None:
    history = History(new_state(steps=1000, recovery=Recovery(respawn=True, respawn_delay_s=0.1)))
    history.train(steps=10)
    slow_down(history, {2: 0.5})
    history.consider()
    history.depart(history.connection(2))
    history.reap(2)
    history.quiesce()
    history.start()
    history.wait(0.5)
    assert history.state.detectors.slowness.speeds == {}
    assert not history.considerations
    history.come_back(2)
    history.wait(1.0)
    (asked,) = history.considerations
    assert asked.scale_up.asked_speeds == {}
