"""Hosts are examined before they are admitted."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from chameleon_ft.config import Preflight
from chameleon_ft.coordinator.handlers.membership import reason_against
from chameleon_ft.coordinator.state.settings import Devices
from chameleon_ft.coordinator.state.state import State
from chameleon_ft.errors import ControlError
from chameleon_ft.protocol.messages import Examine, HostExamined, HostHello, Refused, Spawn
from chameleon_ft.protocol.parts import HostReport
from tests.coordinator.histories import AGENT, History, new_state
from tests.golden import refused

NOW = 1e9
NEXT = AGENT + 1
VERSIONS = {"python": "3.11.7", "torch": "2.13.0+cpu", "chameleon": "0.1.0"}
FIT = HostReport(
    devices=("a device",),
    matmul_flops=1e14,
    copy_bytes_per_s=1e12,
    links=8,
    versions=(*VERSIONS.items(), ("driver", "550.1")),
    clock_s=NOW,
)


def judged(peers: int = 3, settings: Preflight | None = None, **changes: Any) -> str | None:
    """Judge a host that differs from the others by `changes`."""
    report = FIT.model_copy(update=changes)
    return reason_against(report, [FIT] * peers, settings=settings or Preflight(), versions=VERSIONS, now=NOW)


def test_a_host_like_the_others_is_admitted() -> None:
    assert judged() is None
    assert judged(peers=0) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"problem": "there is no device"}, "there is no device"),
        ({"free_memory": 0.3}, "only 30% of the memory of a device is free"),
        ({"versions": (("torch", "2.12.0+cu128"),)}, "torch is 2.12.0+cu128 here, and 2.13.0+cpu in the run"),
        ({"versions": (("python", "3.12.1"),)}, "python is 3.12.1 here"),
        ({"versions": (("driver", "535.2"),)}, "driver is 535.2 here, and 550.1 in the run"),
        ({"clock_s": NOW + 90}, "its clock is 90.* ahead of that of the coordinator"),
        ({"clock_s": NOW - 90}, "its clock is 90.* behind that of the coordinator"),
        ({"links": 7}, "7 InfiniBand ports are active, and 8 on the other hosts"),
        ({"matmul_flops": 0.4e14}, "matrix products have 40% of the usual speed"),
        ({"copy_bytes_per_s": 0.4e12}, "copies in memory have 40% of the usual speed"),
    ],
)
def test_a_host_that_is_not_fit_is_turned_away(changes: dict[str, Any], reason: str) -> None:
    found = judged(**changes)
    assert found is not None
    assert re.match(re.escape(reason).replace(r"\.\*", ".*"), found), found


@pytest.mark.parametrize(
    "changes",
    [
        {"versions": (("python", "3.11.9"), ("torch", "2.13.0+cu128"), ("something", "1"))},
        {"matmul_flops": 0.6e14},
        {"matmul_flops": 0.0, "copy_bytes_per_s": 0.0},
        {"links": 9},
        {"clock_s": NOW + 1},
    ],
)
def test_differences_that_do_no_harm_are_admitted(changes: dict[str, Any]) -> None:
    assert judged(**changes) is None


def test_settings_admit_more() -> None:
    assert judged(settings=Preflight(min_speed=0.0), matmul_flops=1.0) is None
    assert judged(settings=Preflight(same_versions=False), versions=(("torch", "1.0"),)) is None
    assert judged(settings=Preflight(min_free_memory=0.0), free_memory=0.1) is None
    assert judged(settings=Preflight(max_clock_error_s=100.0), clock_s=NOW + 90) is None


def test_one_slow_host_that_came_first_is_no_measure() -> None:
    slow = FIT.model_copy(update={"matmul_flops": 0.1e14})
    assert reason_against(FIT, [slow, FIT, FIT], settings=Preflight(), versions={}, now=NOW) is None


# --- in a run --------------------------------------------------------------------------------------------------------


def history(**changes: Any) -> History:
    """A history of a run whose workers need a device."""
    state: State = new_state(devices=Devices("cpu", "gloo", False), versions=VERSIONS, **changes)
    return History(state)


def report(found: History, **changes: Any) -> HostExamined:
    moment = {"clock_s": found.at.unix_s}
    return HostExamined(report=FIT.model_copy(update={**moment, **changes}))


def hello(host: str = "a host", slots: int = 4) -> HostHello:
    return HostHello(host=host, slots=slots, id=host, examines=True)


def test_a_host_starts_workers_once_it_is_admitted() -> None:
    found = history()
    found.say(AGENT, hello())
    order = Examine(device="cpu", backend="gloo", workers=4, share_devices=False, measures=True, request=AGENT)
    assert found.sent(Examine, to=AGENT) == [order]
    assert found.sent(Spawn) == []
    found.say(AGENT, report(found))
    assert [each.workers for each in found.sent(Spawn, to=AGENT)] == [(0, 1, 2, 3)]
    with refused(ControlError):
        found.say(AGENT, report(found))


def test_one_that_is_turned_away_is_told_why_and_training_goes_on() -> None:
    found = history()
    found.train()
    found.say(NEXT, hello("another"))
    found.say(NEXT, report(found, problem="it has no device"))
    assert [each.reason for each in found.sent(Refused, to=NEXT)] == ["another is not admitted: it has no device"]
    (event,) = found.events("host_refused")
    assert (event["host"], event["reason"]) == ("another", "it has no device")
    found.depart(NEXT)
    found.commit()
    assert found.state.generation == 1
    assert found.sent(Spawn, to=NEXT) == []


def test_speeds_are_not_measured_beside_workers_that_train() -> None:
    found = history()
    found.train()
    found.say(NEXT, hello())
    assert [each.measures for each in found.sent(Examine, to=NEXT)] == [False]


def test_an_agent_that_leaves_before_it_is_admitted_is_forgotten() -> None:
    found = history()
    found.say(AGENT, hello())
    found.depart(AGENT)
    assert found.state.admission.examining == {}
    found.say(NEXT, hello())
    found.say(NEXT, report(found))
    assert len(found.sent(Spawn, to=NEXT)) == 1


def test_one_that_was_being_examined_when_the_coordinator_was_lost_is_examined_again() -> None:
    found = history()
    found.say(AGENT, hello())
    found.take_over()
    found.say(NEXT, hello().model_copy(update={"resumes": AGENT}))
    assert [each.request for each in found.sent(Examine, to=NEXT)] == [NEXT]
    found.say(NEXT, report(found, clock_s=found.at.unix_s - 60).model_copy(update={"request": AGENT}))
    assert not found.sent(Spawn)
    assert not found.sent(Refused), "that was kept meanwhile, and its clock says nothing any more"
    found.say(NEXT, report(found).model_copy(update={"request": NEXT}))
    assert len(found.sent(Spawn, to=NEXT)) == 1


def test_a_report_that_has_waited_for_the_coordinator_says_nothing_of_a_clock_behind() -> None:
    found = history()
    found.say(AGENT, hello())
    found.wait(0.05)
    waiting = report(found)
    found.now += 60.0
    found.say(AGENT, waiting)
    assert not found.sent(Refused)
    assert len(found.sent(Spawn, to=AGENT)) == 1


@pytest.mark.parametrize("changes", [{"preflight": Preflight(enabled=False)}, {"devices": None}])
def test_without_preflight_a_host_joins_at_once(changes: dict[str, Any]) -> None:
    found = History(new_state(**{"devices": Devices("cpu", "gloo", False), **changes}))
    found.say(AGENT, hello())
    assert found.sent(Examine) == []
    assert len(found.sent(Spawn, to=AGENT)) == 1


def test_the_state_of_an_examination_is_in_the_journal() -> None:
    found = history()
    found.say(AGENT, hello())
    found.say(AGENT, report(found))
    found.say(NEXT, hello("another"))
    state = replace(found.state, quiesced={})
    assert State.from_json(state.to_json()) == state
