"""The formats of failure traces; see docs/traces.md."""

from __future__ import annotations

import re
from pathlib import Path

from chameleon_ft.errors import ConfigError
from chameleon_ft.simulate.traces.formats.infinitehbd import parse_infinitehbd
from chameleon_ft.simulate.traces.formats.jsonl import parse_jsonl, trace_to_jsonl
from chameleon_ft.simulate.traces.formats.membership import parse_membership
from chameleon_ft.simulate.traces.trace import Trace

__all__ = ["load_trace", "load_trace_for", "parse_trace", "save_trace", "trace_to_jsonl"]


def parse_trace(text: str, *, nodes: int | None = None, source: str = "the trace") -> Trace:
    """Return the trace that `text` is, in the format that its first line shows.

    Args:
        text: of a whole trace.
        nodes: how many nodes the trace was measured on, for a format that names only the nodes that failed; None if
            these are all.
        source: name of the text in messages.

    Raises:
        ConfigError: the text cannot be read; names the line or the list element, and the reason.
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


def load_trace(path: Path, *, nodes: int | None = None) -> Trace:
    """Read a trace in any of the formats; see `parse_trace`.

    Raises:
        ConfigError: the file cannot be read, or not as a trace.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"trace {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"trace {path}: is not UTF-8 text, at byte {error.start}") from None
    return parse_trace(text, nodes=nodes, source=f"trace {path}")


def load_trace_for(path: Path, *, hosts: int, workers_per_host: int, nodes: int | None = None) -> Trace:
    """Read a trace for a cluster of `hosts` hosts with `workers_per_host` workers on each.

    Of a trace with more hosts the first ones are taken. A trace that names only the nodes that failed, and fewer than
    `hosts`, counts as measured on `hosts` nodes unless `nodes` gives another number.

    Raises:
        ConfigError: the file cannot be read or has too few hosts; see `parse_trace` and `Trace.on_hosts`.
    """
    trace = load_trace(path, nodes=nodes)
    if nodes is None and trace.hosts < hosts:
        trace = load_trace(path, nodes=hosts)
    return trace.on_hosts(hosts, workers_per_host=workers_per_host)


def save_trace(trace: Trace, path: Path) -> None:
    """Write a trace in Chameleon's own format. Raises ConfigError if the file exists or cannot be written."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(trace_to_jsonl(trace))
    except FileExistsError:
        raise ConfigError(f"{path}: exists already; give another name for the trace") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
