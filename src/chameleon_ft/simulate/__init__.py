"""The simulator: the runtime's plans, estimates and policies over months of failures, in seconds."""

from __future__ import annotations

from chameleon_ft.simulate.accounting.account import ORACLE
from chameleon_ft.simulate.accounting.results import DecisionRecord, PolicyResult, Results, Throughput
from chameleon_ft.simulate.parameters import Parameters
from chameleon_ft.simulate.run import SIMULATED_POLICIES, Scene, Sweep, simulate, sweep
from chameleon_ft.simulate.traces.formats import load_trace, load_trace_for, parse_trace, save_trace, trace_to_jsonl
from chameleon_ft.simulate.traces.generators import (
    MODELS,
    Bursts,
    FaultModel,
    IncidentSizes,
    Poisson,
    Repairs,
    SpotModel,
    Stragglers,
    Weibull,
    generate_trace,
)
from chameleon_ft.simulate.traces.trace import Event, Fault, Trace, TraceStatistics, trace_statistics

__all__ = [
    "MODELS",
    "ORACLE",
    "SIMULATED_POLICIES",
    "Bursts",
    "DecisionRecord",
    "Event",
    "Fault",
    "FaultModel",
    "IncidentSizes",
    "Parameters",
    "Poisson",
    "PolicyResult",
    "Repairs",
    "Results",
    "Scene",
    "SpotModel",
    "Stragglers",
    "Sweep",
    "Throughput",
    "Trace",
    "TraceStatistics",
    "Weibull",
    "generate_trace",
    "load_trace",
    "load_trace_for",
    "parse_trace",
    "save_trace",
    "simulate",
    "sweep",
    "trace_statistics",
    "trace_to_jsonl",
]
