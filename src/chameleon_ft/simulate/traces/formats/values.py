"""Reading JSON strictly: no member twice, no number that is none, no value of another type."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from chameleon_ft.errors import ConfigError

__all__ = ["JSON_DECODER", "members", "number_in", "require_hosts", "text_in"]


def members(value: object, required: Iterable[str], optional: Iterable[str] | None = None) -> Mapping[str, Any]:
    """Return `value`, an object with the `required` members and, unless `optional` is None, no others than those.

    Raises ValueError that says what is missing or unknown.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{_shown(value)} must be an object with {', '.join(required)}")
    if missing := [name for name in required if name not in value]:
        raise ValueError(f"{missing[0]} is missing")
    if optional is not None and (unknown := sorted(set(value) - {*required, *optional})):
        raise ValueError(f"{unknown[0]!r} is unknown; known here: {', '.join([*required, *optional])}")
    return value


def number_in(data: Mapping[str, Any], name: str) -> float:
    """Return a member that is a number, 0 or more. Raises ValueError where it is not."""
    value = data[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} {_shown(value)} must be a number, 0 or more")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is too large") from None


def text_in(data: Mapping[str, Any], name: str) -> str:
    """Return a member that is text and not empty. Raises ValueError where it is not."""
    value = data[name]
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} {_shown(value)} must be text, and not empty")
    return value


def require_hosts(hosts: int, nodes: int | None, source: str) -> None:
    """Raise ConfigError where a trace that knows all of its hosts is said to have been measured on other `nodes`."""
    if nodes not in (None, hosts):
        raise ConfigError(
            f"{source} names all of its hosts, {hosts}, so it is not of {nodes}: "
            f"take at most {hosts}, or generate a larger one"
        )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name} is there twice")
        found[name] = value
    return found


def _no_number(constant: str) -> float:
    raise ValueError(f"{constant} is not a number")


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


JSON_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_number)
"""Raises ValueError where a member is there twice and for NaN and Infinity."""
