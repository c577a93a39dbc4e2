"""Records are converted to JSON and back, and the summary is derived from them."""

from __future__ import annotations

import json

import pytest

from chameleon_ft.errors import ConfigError
from chameleon_ft.events.lines import Record, parse_event, parse_step
from chameleon_ft.events.records import FailureRecord, StepRecord
from chameleon_ft.events.summary import Summary, summarize
from tests.golden import refused
from tests.report.records import failure_record, join_record, outcome_record, step_record


def summary(steps: list[StepRecord], failures: list[FailureRecord]) -> Summary:
    return summarize(steps, failures, samples_before=lambda step: 16 * step, status="finished", reason="done")


@pytest.mark.parametrize(
    "record",
    [step_record(3), failure_record(3), failure_record(3, detect_s=None), join_record(3), outcome_record()],
)
def test_a_record_comes_back_from_json(record: Record) -> None:
    line = json.dumps(record.to_json()).encode()
    assert (parse_step(line) if isinstance(record, StepRecord) else parse_event(line)) == record


def test_the_rate_is_written_and_derived() -> None:
    data = step_record(0).to_json()
    assert data["tokens_per_s"] == data["tokens"] / data["step_s"]


def test_an_outcome_has_its_errors_and_words() -> None:
    record = outcome_record()
    data = record.values()
    assert (data["step_error"], data["stall_error"]) == (pytest.approx(0.025), pytest.approx(0.2))
    assert record.describe() == ("step 410 ms (predicted 400 ms, +2.5%), stall 900 ms (predicted 750 ms, +20.0%)")
    result = summarize([], [record], samples_before=lambda step: 16 * step, status="finished", reason="done")
    assert result.to_json()["outcomes"] == [data]


def test_a_line_without_a_field_is_refused() -> None:
    with refused(ConfigError):
        parse_step(b'{"step": 1}')


def test_a_step_that_took_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="step_s"):
        step_record(0, step_s=0.0)


def test_a_run_without_failures() -> None:
    result = summary([step_record(step, loss=3.0 - step) for step in range(3)], [])
    assert (result.steps, result.final_loss, result.samples_seen) == (3, 1.0, 48)
    assert (result.samples_lost, result.samples_repeated) == (0, 0)
    assert (result.median_step_s_before, result.median_step_s_after) == (0.5, None)


def test_a_run_without_steps() -> None:
    result = summary([], [])
    assert (result.steps, result.final_loss, result.samples_seen, result.samples_lost) == (0, None, 0, 0)
    assert result.median_step_s_before is None


def test_step_times_before_and_after_leave_out_interrupted_steps() -> None:
    times = {0: 0.4, 1: 0.4, 2: 9.0, 3: 0.6, 4: 9.0, 5: 0.6}
    steps = [step_record(step, step_s=step_s) for step, step_s in times.items()]
    result = summary(steps, [failure_record(2), failure_record(4, worker=1)])
    assert (result.median_step_s_before, result.median_step_s_after) == (0.4, 0.6)
    assert [failure.worker for failure in result.failures] == [3, 1]


def test_repeated_steps_are_counted_once_and_reported() -> None:
    steps = [step_record(0), step_record(1), step_record(2), step_record(1, loss=1.5), step_record(2, loss=1.0)]
    result = summary(steps, [failure_record(2)])
    assert (result.steps, result.final_loss) == (3, 1.0)
    assert (result.samples_seen, result.samples_repeated, result.samples_lost) == (48, 32, 0)


def test_a_step_or_a_sample_that_is_missing_is_lost() -> None:
    result = summary([step_record(0), step_record(2, samples=15)], [])
    assert (result.samples_seen, result.samples_lost) == (31, 17)
