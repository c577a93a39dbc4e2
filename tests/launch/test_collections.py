"""A coordinator of thousands of peers does not stand still for full garbage collections again and again."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

import pytest

from chameleon_ft.errors import DeposedError
from chameleon_ft.launch import coordinator


def test_full_collections_are_rare_and_leave_out_what_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every coordinator, whichever process it runs in: that of `chameleon train` is a child of its launcher."""
    before = gc.get_threshold()
    found: list[int] = []

    async def claim(*_: object) -> None:
        objects, younger, old = gc.get_threshold()
        found.extend([objects * younger * old, gc.get_freeze_count()])
        raise DeposedError(1)

    monkeypatch.setattr(coordinator, "_claim", claim)
    start: Any = SimpleNamespace(config=None, run=None)
    control: Any = SimpleNamespace(address="127.0.0.1:1")
    unused: Any = None
    gc.unfreeze()  # what tests/conftest.py has frozen
    try:
        with pytest.raises(DeposedError):
            asyncio.run(
                coordinator.serve_run(start, control, listener=unused, view=unused, beside=unused, processes=unused)
            )
    finally:
        gc.set_threshold(*before)
    assert found[0] >= 10_000_000
    assert found[1] > 10_000
