"""The simulator: the runtime's plans, estimates and policies over months of failures, in seconds."""

from __future__ import annotations

from chameleon_ft.simulate.arrivals import Bursts, IncidentSizes, Poisson, Weibull
from chameleon_ft.simulate.formats import load_trace, load_trace_for, parse_trace, save_trace, trace_to_jsonl
from chameleon_ft.simulate.generators import MODELS, FaultModel, generate_trace
from chameleon_ft.simulate.repairs import Repairs, Stragglers
from chameleon_ft.simulate.spot import SpotModel
from chameleon_ft.simulate.statistics import TraceStatistics, trace_statistics
from chameleon_ft.simulate.trace import Event, Fault, Trace

__all__ = [
    "MODELS",
    "Bursts",
    "Event",
    "Fault",
    "FaultModel",
    "IncidentSizes",
    "Poisson",
    "Repairs",
    "SpotModel",
    "Stragglers",
    "Trace",
    "TraceStatistics",
    "Weibull",
    "generate_trace",
    "load_trace",
    "load_trace_for",
    "parse_trace",
    "save_trace",
    "trace_statistics",
    "trace_to_jsonl",
]
