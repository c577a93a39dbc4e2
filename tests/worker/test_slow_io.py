"""A rank that waits for the disk says so."""

from __future__ import annotations

import queue
import threading

from chameleon_ft.protocol.messages import SlowIO
from chameleon_ft.worker.control_client import Activity, SlowIOReporter


def test_who_waits_long_says_so_again_and_again_until_it_is_over() -> None:
    told: queue.Queue[SlowIO] = queue.Queue()
    activity = Activity()
    activity.begin("F3")
    with SlowIOReporter(activity, told.put, first_s=0.001).waiting("loading layers", generation=4):
        assert activity.position(1).doing == "loading layers"
        said = [told.get() for _ in range(3)]
    assert activity.position(1).doing == "F3"
    assert said == [SlowIO(generation=4, doing="loading layers", since_s=0.001 * factor) for factor in (1, 2, 4)]
    for thread in threading.enumerate():
        if thread.name == "disk waits":
            thread.join()


def test_who_is_quick_says_nothing() -> None:
    told: queue.Queue[SlowIO] = queue.Queue()
    with SlowIOReporter(Activity(), told.put, first_s=3600.0).waiting("loading layers", generation=4):
        tellers = [thread for thread in threading.enumerate() if thread.name == "disk waits"]
    for thread in tellers:
        thread.join()
    assert told.empty()
