"""A coordinator of thousands of peers does not stand still for full garbage collections again and again."""

from __future__ import annotations

import gc

from chameleon_ft.launch.coordinator import run_coordinator
from chameleon_ft.observe import RunStatus


def test_full_collections_are_rare_and_leave_out_what_is_loaded() -> None:
    before = gc.get_threshold()
    found: list[int] = []

    async def coordinated() -> RunStatus:
        objects, younger, old = gc.get_threshold()
        found.extend([objects * younger * old, gc.get_freeze_count()])
        return "finished"

    gc.unfreeze()  # what tests/conftest.py has frozen
    try:
        assert run_coordinator(coordinated()) == 0
    finally:
        gc.set_threshold(*before)
    assert found[0] >= 10_000_000
    assert found[1] > 10_000
