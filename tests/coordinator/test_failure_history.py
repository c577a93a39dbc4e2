"""Failures that a run has seen, for the next decision."""

from __future__ import annotations

import dataclasses

import pytest

from chameleon_ft.config import Recovery
from chameleon_ft.coordinator.state.incidents import FailureHistory
from tests.report.records import failure_record


def test_before_anything_has_failed_the_prior_holds() -> None:
    history = FailureHistory.before(Recovery(worker_mtbf_hours=10.0, prior_weight=2.0))
    history = history.live(4, 0.0)
    assert history.rate.horizon_s(4) == pytest.approx(36_000 / 4)
    assert history.phases(looked_up=True).total_s > 0


def test_failures_and_the_time_of_all_workers_count() -> None:
    history = FailureHistory.before(Recovery(worker_mtbf_hours=10.0, prior_weight=2.0))
    history = history.live(4, 100.0)
    history = history.failed("a", ["a", "b", "b"], 600.0)
    history = history.live(3, 610.0)
    history = history.failed("a", ["b", "b"], 1610.0)
    rate = history.rate
    assert (rate.failures, rate.host_failures, rate.worker_s) == (2, 0, 4 * 500.0 + 3 * 1010.0)


def test_workers_that_are_lost_with_their_host_are_one_failure() -> None:
    history = FailureHistory.before(Recovery(prior_weight=1.0, host_failure_fraction=0.5))
    history = history.live(6, 0.0)
    # Half of a host; the other half, long after; another host in whole.
    history = history.failed("a", ["a", "a", "b", "b", "b"], 10.0)
    history = history.failed("a", ["a", "b", "b", "b"], 11.0)
    assert (history.rate.failures, history.rate.host_failures) == (1, 0)
    history = history.failed("a", ["b", "b", "b"], 100.0)
    assert (history.rate.failures, history.rate.host_failures) == (2, 0)
    for number, left in enumerate((["b", "b"], ["b"], []), start=1):
        history = history.failed("b", left, 200.0 + number)
    assert (history.rate.failures, history.rate.host_failures) == (3, 1)
    assert history.rate.host_failure_fraction == 1.5 / 4
    # A worker that comes back there at once and is lost again has failed again.
    history = history.failed("b", [], 205.5)
    assert (history.rate.failures, history.rate.host_failures) == (4, 1)


def test_the_phases_of_the_next_stall_are_the_medians_of_those_that_were() -> None:
    history = FailureHistory.before(Recovery())
    for number, stop_s in enumerate((0.1, 0.2, 0.9)):
        record = failure_record(number, detect_s=None if number == 1 else 0.5)
        history = history.resumed(dataclasses.replace(record, stop_s=stop_s, regroup_s=1.0))
    phases = history.phases(looked_up=False)
    assert (phases.detect_s, phases.stop_s, phases.regroup_s) == (0.5, 0.2, 1.0)


def test_before_the_first_stall_more_workers_are_expected_to_regroup_more_slowly() -> None:
    history = FailureHistory.before(Recovery())
    expected = [history.live(workers, 1.0).phases(looked_up=False).regroup_s for workers in (0, 8, 32, 1000)]
    assert expected == pytest.approx([0.02, 0.044, 0.116, 0.2])


def test_a_search_teaches_nothing_about_the_time_of_a_look_up() -> None:
    history = FailureHistory.before(Recovery())
    unseen = history.phases(looked_up=True)
    assert history.phases(looked_up=False) == unseen
    for decide_s in (1.0, 1.2, 9.0):
        history = history.decided(looked_up=False, decide_s=decide_s, hand_out_s=decide_s / 10)
    assert history.phases(looked_up=False).decide_s == 1.2
    assert history.phases(looked_up=True) == unseen
    assert history.hand_out_s(looked_up=False) == 0.12
    assert history.hand_out_s(looked_up=True) == 0.12, "until one is known, it is taken to be that of the others"
    history = history.decided(looked_up=True, decide_s=0.01, hand_out_s=0.005)
    assert history.phases(looked_up=True).decide_s == 0.01
    assert (history.hand_out_s(looked_up=True), history.hand_out_s(looked_up=False)) == (0.005, 0.12)


def test_connections_are_predicted_by_those_of_earlier_generations() -> None:
    history, predicted = FailureHistory.before(Recovery()), list[float | None]()
    for generation, formed, seconds in ((1, 2, 0.3), (1, 4, 0.4), (2, 6, 0.9), (2, 0, 0.1), (3, 4, 0.5)):
        history, predicted_s = history.connected(generation, formed, seconds)
        predicted.append(predicted_s)
    assert predicted == pytest.approx([None, None, 0.5, 0.0, 0.6])
