"""Strict reading of JSON: no member twice, no NaN or Infinity, no value of another type."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from chameleon_ft.errors import ConfigError


@contextmanager
def errors_at(place: str) -> Iterator[None]:
    """Raise errors of reading JSON as ConfigError with their place."""
    try:
        yield
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}: is not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError, ConfigError) as error:
        raise ConfigError(f"{place}: {error}") from None


def members(value: object, required: Iterable[str], optional: Iterable[str] | None = None) -> Mapping[str, Any]:
    """Return `value`, an object with the `required` members and, unless `optional` is None, no others than these two.

    Raises:
        ValueError: it is no object, or a member is missing or unknown.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{_shown(value)} must be an object with {', '.join(required)}")
    if missing := [name for name in required if name not in value]:
        raise ValueError(f"{missing[0]} is missing")
    if optional is not None and (unknown := sorted(set(value) - {*required, *optional})):
        raise ValueError(f"{unknown[0]!r} is unknown; known here: {', '.join([*required, *optional])}")
    return value


def number_in(data: Mapping[str, Any], name: str) -> float:
    """Return a member that is a number, 0 or more. Raises ValueError if it is not."""
    value = data[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} {_shown(value)} must be a number, 0 or more")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is too large") from None


def text_in(data: Mapping[str, Any], name: str) -> str:
    """Return a member that is text and not empty. Raises ValueError if it is not."""
    value = data[name]
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} {_shown(value)} must be text, and not empty")
    return value


def require_hosts(hosts: int, nodes: int | None, source: str) -> None:
    """Raise ConfigError if a trace that names all of its hosts is said to have been measured on other `nodes`."""
    if nodes not in (None, hosts):
        raise ConfigError(
            f"{source} names all of its hosts, {hosts}, so it is not of {nodes}: "
            f"take at most {hosts}, or generate a larger one"
        )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} is there twice")
    return found


def _no_number(constant: str) -> float:
    raise ValueError(f"{constant} is not a number")


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


JSON_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_number)
"""Raises ValueError for a member that is there twice, and for NaN and Infinity."""
