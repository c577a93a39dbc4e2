"""Traces on disk."""

from __future__ import annotations

from pathlib import Path

from chameleon_ft.errors import ConfigError
from chameleon_ft.simulate.traces.formats.jsonl import trace_to_jsonl
from chameleon_ft.simulate.traces.formats.parse import parse_trace
from chameleon_ft.simulate.traces.trace import Trace

__all__ = ["load_trace", "load_trace_for", "save_trace"]


def load_trace(path: Path, *, nodes: int | None = None) -> Trace:
    """Read a trace in any of the formats; see `parse_trace`.

    Raises ConfigError where the file cannot be read, or not as a trace.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"trace {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"trace {path}: is not UTF-8 text, at byte {error.start}") from None
    return parse_trace(text, nodes=nodes, source=f"trace {path}")


def load_trace_for(path: Path, *, hosts: int, workers_per_host: int, nodes: int | None = None) -> Trace:
    """Read what a trace does to a cluster of `hosts` hosts with `workers_per_host` workers on each.

    A trace of more hosts is read for the first of them. One that only names the nodes that failed, and fewer than
    `hosts`, is taken to have been measured on `hosts` nodes unless `nodes` says on how many it was.

    Raises ConfigError where the file cannot be read or has too few hosts; see `parse_trace` and `Trace.on_hosts`.
    """
    trace = load_trace(path, nodes=nodes)
    if nodes is None and trace.hosts < hosts:
        trace = load_trace(path, nodes=hosts)
    return trace.on_hosts(hosts, workers_per_host=workers_per_host)


def save_trace(trace: Trace, path: Path) -> None:
    """Write a trace in Chameleon's own format. Raises ConfigError where the file is there or cannot be written."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(trace_to_jsonl(trace))
    except FileExistsError:
        raise ConfigError(f"{path}: exists already; give another name for the trace") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
