from __future__ import annotations

import pytest

from chameleon_ft.cost.step import estimate_rest
from chameleon_ft.errors import ProgramError
from chameleon_ft.recovery import complete_step
from chameleon_ft.recovery import salvage as salvaged_step
from chameleon_ft.recovery.salvage import salvage
from chameleon_ft.schedule import check_rest
from chameleon_ft.schedule.rest import rest_schedules
from tests.recovery.test_salvage import interrupted, survivors, two_pipelines


@pytest.mark.parametrize("refusals", [0, 1, 3, 100])
def test_the_fastest_program_that_passes_is_taken_and_no_slower_one_is_checked(
    refusals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, costs = two_pipelines(split_backward=True, dp=3)
    left, progress = survivors(costs, {0}), interrupted(plan, costs, 0.5, lost={0})
    every = sorted(
        estimate_rest(found.rest, scheduled, left).step_s
        for found in salvage(plan, progress, left)
        for scheduled in rest_schedules(found.rest, left, in_flight_limits={})
    )
    checked = []

    def check(*arguments: object) -> None:
        checked.append(arguments)
        if len(checked) <= refusals:
            raise ProgramError("refused")
        check_rest(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(salvaged_step, "check_rest", check)
    found = complete_step(plan, progress, left, {})
    assert len(checked) == min(refusals + 1, len(every))
    assert (None if found is None else found.rest_s) == (every[refusals] if refusals < len(every) else None)
