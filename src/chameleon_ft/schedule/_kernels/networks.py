"""The lower bound of a network, and the priorities of its routes."""

from __future__ import annotations

import math

import numpy as np

from chameleon_ft.schedule._kernels.jit import kernel
from chameleon_ft.schedule._records import Integers, Records


@kernel
def least_step_s(slots: Records, num_workers: int) -> float:
    """A lower bound of the step time in seconds; see `Network.lower_bound_s`. `slots` is `SLOT` by number."""
    before_s = np.full(num_workers, math.inf)
    after_s = np.full(num_workers, math.inf)
    work_s = np.zeros(num_workers)
    weight_s = np.zeros(num_workers)
    down_s = back_s = 0.0
    for slot in range(len(slots)):
        own = slots[slot]
        worker = own.worker
        if own.up < 0:
            down_s, back_s = 0.0, own.weight_s
        before_s[worker] = min(before_s[worker], down_s)
        after_s[worker] = min(after_s[worker], back_s + own.up_s)
        work_s[worker] += own.forward_s + own.backward_s
        weight_s[worker] += own.weight_s
        down_s += own.forward_s + own.down_s
        back_s += own.backward_s + own.up_s
    bound_s = 0.0
    for worker in range(num_workers):
        if before_s[worker] < math.inf:
            bound_s = max(bound_s, before_s[worker] + work_s[worker] + max(weight_s[worker], after_s[worker]))
    return bound_s


@kernel
def places_in_pipelines(slots: Records, ways: Integers, num_workers: int) -> Integers:
    """For each route, given by its first slot in `ways`, its place in its own pipeline; int64 [routes]."""
    load = np.zeros(num_workers, np.int64)
    place = np.empty(len(slots), np.int64)
    for slot in range(len(slots)):
        worker = slots[slot].worker
        place[slot] = load[worker]
        load[worker] += 1
    found = np.empty(len(ways), np.int64)
    for route in range(len(ways)):
        # A worker that takes over hops of other pipelines has more of them than its own pipeline's other workers. So
        # the least loaded worker on a route belongs to the micro-batch's own pipeline, and has its place in it.
        slot = home = ways[route]
        while not slots[slot].last:
            slot += 1
            if load[slots[slot].worker] < load[slots[home].worker]:
                home = slot
        found[route] = place[home]
    return found
