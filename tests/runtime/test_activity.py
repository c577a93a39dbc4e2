"""The activity of a rank, as it tells the coordinator."""

from __future__ import annotations

from chameleon_ft.runtime.activity import Activity


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
