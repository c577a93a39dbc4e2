"""The simulator: the runtime's plans, estimates and policies over months of failures, in seconds."""

from __future__ import annotations

from chameleon_ft.simulate.parameters import Parameters
from chameleon_ft.simulate.run import simulate
from chameleon_ft.simulate.traces.formats import load_trace, load_trace_for, save_trace
from chameleon_ft.simulate.traces.generators import MODELS, generate_trace
from chameleon_ft.simulate.traces.trace import Trace, TraceStatistics, trace_statistics

__all__ = [
    "MODELS",
    "Parameters",
    "Trace",
    "TraceStatistics",
    "generate_trace",
    "load_trace",
    "load_trace_for",
    "save_trace",
    "simulate",
    "trace_statistics",
]
