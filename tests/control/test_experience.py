"""What a run has seen of failures, for the next decision."""

from __future__ import annotations

import dataclasses

import pytest

from chameleon_ft.config import Recovery
from chameleon_ft.control.experience import Experience
from tests.observe.records import failure_record


def test_before_anything_has_failed_the_prior_holds() -> None:
    experience = Experience(Recovery(worker_mtbf_hours=10.0, prior_weight=2.0))
    experience.live(4, 0.0)
    assert experience.rate.horizon_s(4) == pytest.approx(36_000 / 4)
    assert experience.phases.total_s > 0


def test_failures_and_the_time_of_all_workers_count() -> None:
    experience = Experience(Recovery(worker_mtbf_hours=10.0, prior_weight=2.0))
    experience.live(4, 100.0)
    experience.failed(3, 600.0)
    experience.live(3, 610.0)
    experience.failed(2, 1610.0)
    rate = experience.rate
    assert (rate.failures, rate.worker_s) == (2, 4 * 500.0 + 3 * 1010.0)


def test_the_phases_of_the_next_stall_are_the_medians_of_those_that_were() -> None:
    experience = Experience(Recovery())
    for number, stop_s in enumerate((0.1, 0.2, 0.9)):
        record = failure_record(number, detect_s=None if number == 1 else 0.5)
        experience.resumed(dataclasses.replace(record, stop_s=stop_s, regroup_s=1.0))
    phases = experience.phases
    assert (phases.detect_s, phases.stop_s, phases.decide_s, phases.regroup_s) == (0.5, 0.2, 0.003, 1.0)
