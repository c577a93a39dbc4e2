"""The failures that a run has recorded."""

from __future__ import annotations

from chameleon_ft.events.records import FailureRecord
from tests.harness import Ended


def the_failure(ended: Ended) -> FailureRecord:
    """The only failure of a run, its times in order."""
    (failure,) = ended.failures
    assert min(failure.stop_s, failure.decide_s, failure.regroup_s) >= 0
    assert failure.stall_s >= failure.stop_s + failure.decide_s + failure.regroup_s - 1e-6
    return failure
