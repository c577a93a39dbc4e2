"""The state of a run as its journal has it."""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import to_json

from chameleon_ft.coordinator.journal import PatchWriter, patched, read_parts
from chameleon_ft.coordinator.state.state import State


class JournaledState:
    """A state as a journal has it, from the differences between all states so far."""

    def __init__(self) -> None:
        self._writer = PatchWriter()
        self._last: State | None = None
        self._parts: dict[int, Any] = {}
        self._value: Any = None
        self.sizes: list[int] = []
        """Bytes of each difference."""

    def become(self, state: State) -> None:
        """Write and read the difference to the last state, and check that it leads to this one."""
        patch = self._writer.patch(state, self._last) or {}
        line = to_json({"state": patch, "parts": self._writer.new_parts()}, fallback=dict, inf_nan_mode="constants")
        written = json.loads(line)
        read_parts(written["parts"], self._parts)
        self._value = patched(self._value, written["state"], self._parts)
        assert State.from_json(json.dumps(self._value)) == state
        self._last = state
        self.sizes.append(len(line))
