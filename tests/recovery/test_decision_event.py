"""The fields of a decision event."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from chameleon_ft.errors import NoHolderError
from chameleon_ft.recovery import decide
from tests.recovery.contexts import after, context, rate_of


def test_the_event_has_these_fields() -> None:
    now = after(context(dp=2, pp=2), 0)
    decision = decide(now, "chameleon", rate_of(1e6, now))
    record: dict[str, Any] = json.loads(json.dumps(decision.to_json()))
    assert set(record) == {"chosen", "horizon_s", "candidates"}
    assert record["chosen"] in [each["policy"] for each in record["candidates"]]
    for each in record["candidates"]:
        assert set(each) == {
            *(
                "policy",
                "step_s",
                "stall_s",
                "transfer_s",
                "migration_s",
                "waves",
                "bytes",
                "worker_single_points_of_failure",
                "host_single_points_of_failure",
                "fatal_share",
                "return_s",
                "shared_s",
                "samples",
                "feasible",
                "reason",
            )
        }
    alone = replace(after(now, 2), has_checkpoints=False)
    none = decide(alone, "chameleon", rate_of(1e6, alone)).to_json()
    assert none["chosen"] is None
    assert none["candidates"] == [
        {
            "policy": policy,
            "step_s": None,
            "stall_s": None,
            "transfer_s": None,
            "migration_s": 0.0,
            "waves": 0,
            "bytes": None,
            "worker_single_points_of_failure": 0,
            "host_single_points_of_failure": 0,
            "fatal_share": 0.0,
            "return_s": 0.0,
            "shared_s": 0.0,
            "samples": 0.0,
            "feasible": False,
            "reason": str(NoHolderError([0, 1])),
        }
        for policy in ("reroute", "repair", "repartition")
    ]


def test_what_deciding_took_is_predicted_as_it_was() -> None:
    now = after(context(dp=3, pp=2), 1)
    rate = rate_of(100.0, now)
    asked: list[int] = []

    def decide_s() -> float:
        asked.append(1)
        return 7.0

    found = decide(now, "chameleon", rate, decide_s=decide_s)
    assert asked == [1], "once, when all is scored"
    assert found.phases == replace(now.phases, decide_s=7.0)
    expected = decide(replace(now, phases=found.phases), "chameleon", rate)
    assert found.chosen == expected.chosen
    assert [each.stall_s for each in found.candidates] == pytest.approx([each.stall_s for each in expected.candidates])
    assert [each.samples for each in found.candidates] == pytest.approx([each.samples for each in expected.candidates])
