"""Differences between two states of a run, as JSON values.

A patch is one of

    [value]           the new value
    number            the part with this number
    {name: patch}     patches of fields or of the keys of a mapping, the others stay; null removes a key

Parts are large values that a state has in several places, and keeps when it moves them to another place: plans with
their owners and keepers, and what remains of a step. Each is written once, as the patch that makes it of nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import chain, repeat
from typing import Any, Final

from chameleon_ft.control.state.active_plan import ActivePlan
from chameleon_ft.plan import Plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.plan.rest import RestOfStep
from chameleon_ft.plan.shards import Sharding
from chameleon_ft.plan.snapshots import SnapshotLayout

_PARTS: Final = frozenset({ActivePlan, Plan, RestOfStep, Sharding, SnapshotLayout})
_KEPT: Final = 64  # parts that can be referred to; a state has fewer
_NOTHING: Final = object()  # where there was no value


class PatchWriter:
    """Makes patches, and numbers the parts that they refer to."""

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[int, object]] = {}  # id -> number, and the part, which must not be freed
        self._count = 0
        self._new: dict[int, Any] = {}

    def patch(self, value: object, before: object = _NOTHING) -> Any:
        """Return the patch that makes `value` of `before`; None if they are equal."""
        if value is before:
            return None
        kind = type(value)
        if kind in _PARTS:
            return None if value == before else self._number(value)
        if is_dataclass(kind) and (before is None or before is _NOTHING or type(before) is kind):
            return self._of_fields(kind, value, before)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            return self._of_keys(value, before)
        return None if value == before else [value]

    def new_parts(self) -> dict[int, Any]:
        """Return the parts that patches refer to for the first time since the last call, in the order to read them."""
        new, self._new = self._new, {}
        return new

    def _of_fields(self, kind: type, value: object, before: object) -> Any:
        names = _names(kind)
        if type(before) is not kind:
            return {name: self.patch(getattr(value, name)) for name in names}
        patches = ((name, self.patch(getattr(value, name), getattr(before, name))) for name in names)
        return {name: patch for name, patch in patches if patch is not None} or None

    def _of_keys(self, value: Mapping[Any, object], before: Mapping[Any, object]) -> Any:
        if (changed := _changed_keys(value, before)) is not None:
            patches = ((key, self.patch(value[key], before[key])) for key in changed)
            return {key: patch for key, patch in patches if patch is not None} or None
        keys, known = [*value], [*before]
        left = known if keys[: len(known)] == known else [key for key in known if key in value]
        if keys[: len(left)] != left:
            return [value]  # a patch does not change the order of keys
        olds = before.values() if left is known else [before[key] for key in left]
        pairs = zip(keys, value.values(), chain(olds, repeat(_NOTHING)), strict=False)
        # Most values of thousands are the same objects.
        patches = ((key, self.patch(own, old)) for key, own, old in pairs if own is not old)
        found: dict[Any, Any] = {key: patch for key, patch in patches if patch is not None}
        if len(left) < len(known):
            found |= dict.fromkeys(key for key in known if key not in value)
        return found or None

    def _number(self, part: object) -> int:
        known = self._numbers.get(id(part))
        if known is not None:
            return known[0]
        content = self._of_fields(type(part), part, _NOTHING)
        number = self._count = self._count + 1
        self._numbers[id(part)] = number, part
        while len(self._numbers) > _KEPT:
            del self._numbers[next(iter(self._numbers))]
        self._new[number] = content
        return number


def _changed_keys(value: Mapping[Any, object], before: Mapping[Any, object]) -> Collection[Any] | None:
    """Return the keys whose values may differ, if maps know that without a comparison."""
    if isinstance(value, FrozenMap) and isinstance(before, FrozenMap):
        return value.changed_since(before)
    return None


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def read_parts(new: Mapping[str, Any], parts: dict[int, Any]) -> None:
    """Add the parts of a line, as `PatchWriter.new_parts` returned them, to those of the lines before."""
    for number, content in new.items():
        parts[int(number)] = patched(None, content, parts)


def patched(value: Any, patch: Any, parts: Mapping[int, Any]) -> Any:
    """Apply a patch to a JSON value. Raises ValueError or KeyError for one that `PatchWriter` does not make."""
    match patch:
        case [new]:
            return new
        case int():
            return parts[patch]
        case dict():
            found = dict(value) if isinstance(value, dict) else {}
            for name, own in patch.items():
                if own is None:
                    del found[name]
                else:
                    found[name] = patched(found.get(name), own, parts)
            return found
    raise ValueError(f"not a difference of states: {str(patch)[:80]}")
