"""The formats of failure traces: text in, `Trace` out. See docs/traces.md."""

from __future__ import annotations

from chameleon_ft.simulate.traces.formats.files import load_trace, load_trace_for, save_trace
from chameleon_ft.simulate.traces.formats.jsonl import trace_to_jsonl
from chameleon_ft.simulate.traces.formats.parse import parse_trace

__all__ = ["load_trace", "load_trace_for", "parse_trace", "save_trace", "trace_to_jsonl"]
