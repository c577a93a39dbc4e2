"""Measures what the allocator hands out while something runs: the bytes held before, at the most and after.

On a CPU torch counts nothing by itself, but reports to its profiler every block that is taken and given back, those
inside kernels too. An accelerator's allocator keeps the figures, rounded up to its blocks.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from chameleon_ft.runtime.device import is_host_memory

_MARK = "phase "


class Held(NamedTuple):
    """Bytes that are held before, at the most during, and after a phase; only differences mean something."""

    before: int
    peak: int
    after: int


def held_in_phases(phases: Mapping[str, Callable[[], None]], device: torch.device) -> dict[str, Held]:
    """Run the phases in order and return the bytes that tensors on `device` hold in each.

    On a CPU no figure counts the blocks taken before the first phase, so no phase may give one of them back.
    """
    # Garbage is collected at any time, also garbage from before.
    collects = gc.isenabled()
    gc.disable()
    try:
        return _from_events(phases) if is_host_memory(device) else _from_statistics(phases, device)
    finally:
        if collects:
            gc.enable()


def _from_statistics(phases: Mapping[str, Callable[[], None]], device: torch.device) -> dict[str, Held]:
    found: dict[str, Held] = {}
    for name, run in phases.items():
        torch.accelerator.synchronize(device)
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        run()
        torch.accelerator.synchronize(device)
        peak, after = torch.accelerator.max_memory_allocated(device), torch.accelerator.memory_allocated(device)
        found[name] = Held(before, peak, after)
    return found


def _from_events(phases: Mapping[str, Callable[[], None]]) -> dict[str, Held]:
    # Torch loads its library for traces even if it is not used, and the library would write to the terminal.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with torch.autograd.profiler.profile(use_cpu=True, profile_memory=True, use_kineto=False) as profiler:
        for name, run in phases.items():
            with torch.autograd.profiler.record_function(_MARK + name):
                run()
    results: Any = profiler.kineto_results
    assert results is not None
    events = results.events()
    blocks = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    blocks.sort(key=itemgetter(0))  # and nothing else: what happens in the same nanosecond stays in order
    marks = {event.name(): event for event in events if event.name().startswith(_MARK)}
    found: dict[str, Held] = {}
    held = at = 0
    for name in phases:
        end_ns = marks[_MARK + name].end_ns()
        before = peak = held
        while at < len(blocks) and blocks[at][0] <= end_ns:
            held += blocks[at][1]
            peak = max(peak, held)
            at += 1
        found[name] = Held(before, peak, held)
    return found
