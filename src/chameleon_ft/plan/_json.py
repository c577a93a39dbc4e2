"""Checks of the JSON form of a plan, each of which raises PlanError with the place of the fault."""

from __future__ import annotations

import json
from typing import Final

from chameleon_ft.errors import PlanError

FORMAT: Final = "chameleon-plan/1"
_REQUIRED: Final = frozenset({"format", "num_layers", "placement", "routes", "split_backward"})
_OPTIONAL: Final = frozenset({"recompute", "fused_workers"})
# Of a worker id: Python refuses to read integers of thousands of digits.
_MAX_DIGITS: Final = 18


def fields_of(text: str) -> dict[str, object]:
    """Return the fields of a plan's JSON document."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"a plan must be JSON: {error}") from error
    if not isinstance(document, dict):
        raise PlanError(f"a plan must be a JSON object; got {document!r:.60}")
    if (found := document.get("format")) != FORMAT:
        raise PlanError(f'a plan must have "format" {FORMAT!r}; got {found!r}')
    if document.keys() - _OPTIONAL != _REQUIRED:
        raise PlanError(f"a plan must have the fields {sorted(_REQUIRED)}; got {sorted(document)}")
    if not isinstance(split := document["split_backward"], bool):
        raise PlanError(f"split_backward of a plan must be true or false; got {split!r}")
    return document


def by_worker(value: object, where: str) -> dict[int, object]:
    """Return an object's items by worker id."""
    if not isinstance(value, dict):
        raise PlanError(f"{where} must be a JSON object; got {value!r:.60}")
    found: dict[int, object] = {}
    for key, item in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= _MAX_DIGITS) or int(key) in found:
            raise PlanError(f"{where} must map worker ids to ranges; got the worker {key!r}")
        found[int(key)] = item
    return found


def array(value: object, where: str) -> list[object]:
    if not isinstance(value, list):
        raise PlanError(f"{where} must be a list; got {value!r:.60}")
    return value


def integer(value: object, where: str) -> int:
    # JSON's true is an int to Python.
    if not isinstance(value, int) or isinstance(value, bool):
        raise PlanError(f"{where} must be an integer; got {value!r:.60}")
    return value


def integers(value: object, count: int, where: str) -> list[int]:
    """Return a list of this many integers."""
    items = array(value, where)
    if len(items) != count:
        raise PlanError(f"{where} must hold lists of {count} integers; got {value!r:.60}")
    return [integer(item, where) for item in items]
