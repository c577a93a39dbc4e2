"""Which worker is given up when messages fail although every worker is there."""

from __future__ import annotations

from chameleon_ft.coordinator.detectors.base import (
    AllQuiesced,
    Fatal,
    Finding,
    Lost,
    MessageFailed,
    Note,
    Signal,
    StepCommitted,
    StopRequested,
)
from chameleon_ft.coordinator.detectors.connection import PeerFailureDetector


class Reports:
    """A detector, and what is reported to it."""

    def __init__(self) -> None:
        self.detector = PeerFailureDetector()

    def tell(self, signal: Signal) -> tuple[Finding, ...]:
        self.detector, found = self.detector.observe(signal)
        return found

    def report(self, reporter: int, peer: int | None, error: str) -> None:
        assert not self.tell(MessageFailed(reporter, peer, error))

    def suspect(self) -> int | None:
        """The worker that is given up, if any; what was reported is noted in any case."""
        note, *found = self.tell(AllQuiesced(1, is_explained=False))
        assert isinstance(note, Note)
        if not found:
            return None
        (lost,) = found
        assert isinstance(lost, Lost)
        return lost.worker


def test_a_bad_worker_that_always_reports_first_is_found_out_after_one_mistake() -> None:
    reports = Reports()
    reports.report(0, 5, "reset")
    assert reports.suspect() == 5  # one word against another
    reports.report(0, 4, "reset")
    assert reports.suspect() == 0


def test_the_end_that_is_in_most_failed_messages_is_given_up() -> None:
    reports = Reports()
    for reporter, peer in [(0, 5), (1, 0), (2, 0)]:
        reports.report(reporter, peer, "reset")
    assert reports.suspect() == 0


def test_what_a_loss_explains_speaks_against_no_worker() -> None:
    reports = Reports()
    reports.report(0, 5, "reset")
    reports.tell(AllQuiesced(1, is_explained=True))
    assert reports.detector.reports == ()
    assert not reports.tell(AllQuiesced(1, is_explained=False))
    assert reports.detector.unexplained == 0


def test_messages_that_fail_because_the_generation_is_stopped_speak_against_no_worker() -> None:
    reports = Reports()
    reports.tell(StopRequested(0.0))
    reports.report(0, 5, "closed")
    reports.tell(StopRequested(1.0))
    reports.report(1, 5, "closed")
    assert not reports.tell(AllQuiesced(1, is_explained=False))
    reports.report(2, 4, "reset")
    reports.tell(StopRequested(2.0))
    reports.report(3, 4, "reset")
    assert reports.suspect() == 4


def test_a_committed_step_settles_everything() -> None:
    reports = Reports()
    reports.report(0, 5, "reset")
    reports.suspect()
    reports.report(1, None, "timeout")
    reports.suspect()
    reports.tell(StepCommitted(0.0, 1.0))
    assert reports.detector.unexplained == 0
    reports.report(0, 4, "reset")
    assert reports.suspect() == 4


def test_without_a_culprit_it_is_tried_again_three_times() -> None:
    reports = Reports()
    for _ in range(3):
        reports.report(0, None, "timeout")
        assert reports.suspect() is None
    reports.report(0, None, "timeout")
    _, fatal = reports.tell(AllQuiesced(4, is_explained=False))
    assert isinstance(fatal, Fatal)
    assert "messages failed 4 times in a row though no worker is lost, at last because timeout" in fatal.reason
