"""The activity of a rank, as it tells the coordinator."""

from __future__ import annotations

import os

from chameleon_ft.host.processes import read_in_progress
from chameleon_ft.worker.control_client import Activity


def test_what_a_rank_is_doing() -> None:
    activity = Activity()

    def state() -> tuple[str, bool, bool, int | None]:
        found = activity.position(1)
        assert found.since_s >= 0
        return found.doing, found.waiting, found.for_message, found.peer

    assert state() == ("starting", True, False, None)
    activity.begin("F3")
    assert state() == ("F3", False, False, None)
    with activity.waiting("F4 of worker 2", for_message=True, peer=2):
        assert state() == ("F4 of worker 2", True, True, 2)
    with activity.waiting("loading layers"):
        assert state() == ("loading layers", True, False, None)
    assert state() == ("F3", False, False, None)
    activity.idle("quiesced")
    assert state() == ("quiesced", True, False, None)
    with activity.waiting("sync", for_message=True, peer=3):
        with activity.waiting("parameters"):
            pass
        assert state() == ("sync", True, True, 3), "a wait that ends leaves the one around it"
    assert state() == ("quiesced", True, False, None)


def test_a_read_is_seen_from_outside_the_process() -> None:
    activity = Activity()
    activity.publish()
    activity.begin("F3")
    assert read_in_progress(os.getpid()) == ""
    with activity.waiting("reading sample 7", is_reading=True):
        assert activity.position(1).is_reading
        assert read_in_progress(os.getpid()) == "reading sample 7"
    assert not activity.position(1).is_reading
    assert read_in_progress(os.getpid()) == ""
