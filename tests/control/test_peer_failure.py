from __future__ import annotations

from chameleon_ft.control.detectors.peer_failure import Suspicion


def test_a_bad_worker_that_always_reports_first_is_found_out_after_one_mistake() -> None:
    suspicion = Suspicion()
    suspicion.report(0, 5, "reset")
    assert suspicion.suspect() == 5  # one word against another
    suspicion.report(0, 4, "reset")
    assert suspicion.suspect() == 0


def test_the_end_that_is_in_most_failed_messages_is_given_up() -> None:
    suspicion = Suspicion()
    for reporter, peer in [(0, 5), (1, 0), (2, 0)]:
        suspicion.report(reporter, peer, "reset")
    assert suspicion.suspect() == 0


def test_what_a_loss_explains_speaks_against_nobody() -> None:
    suspicion = Suspicion()
    suspicion.report(0, 5, "reset")
    suspicion.dismiss()
    assert suspicion.reports == []
    assert suspicion.suspect() is None
    assert suspicion.unexplained == 1


def test_a_committed_step_settles_everything() -> None:
    suspicion = Suspicion()
    suspicion.report(0, 5, "reset")
    suspicion.suspect()
    suspicion.report(1, None, "timeout")
    suspicion.suspect()
    suspicion.settle()
    assert suspicion.unexplained == 0
    suspicion.report(0, 4, "reset")
    assert suspicion.suspect() == 4
