"""Which format a trace is in."""

from __future__ import annotations

import re

from chameleon_ft.errors import ConfigError
from chameleon_ft.simulate.traces.formats.infinitehbd import parse_infinitehbd
from chameleon_ft.simulate.traces.formats.jsonl import parse_jsonl
from chameleon_ft.simulate.traces.formats.membership import parse_membership
from chameleon_ft.simulate.traces.trace import Trace

__all__ = ["parse_trace"]


def parse_trace(text: str, *, nodes: int | None = None, source: str = "the trace") -> Trace:
    """Return the trace that `text` is, in the format that its first line shows.

    `nodes` is how many nodes it was measured on, where it only names those that failed; without, they are all.
    `source` is what messages call the text.

    Raises ConfigError with the line or the list element that cannot be read, and why.
    """
    if nodes is not None and nodes < 1:
        raise ConfigError(f"{source}: it cannot have been measured on {nodes} nodes; give 1 or more")
    text = text.removeprefix("\ufeff")
    start = text.lstrip()[:200]
    if not start:
        raise ConfigError(f"{source} is empty; give a trace in one of the formats of docs/traces.md")
    if start.startswith("["):
        return parse_infinitehbd(text, nodes=nodes, source=source)
    if start.startswith("{"):
        return parse_jsonl(text, nodes=nodes, source=source)
    first = start.splitlines()[0]
    if re.search(r",\s*(add|remove)\s*,", first):
        return parse_membership(text, nodes=nodes, source=source)
    raise ConfigError(
        f"{source}, line 1: {first[:60]!r} begins none of the formats that are known: a JSON list of fault_start and "
        "fault_end, lines of `milliseconds,add|remove,node`, or Chameleon's own JSON lines; see docs/traces.md"
    )
