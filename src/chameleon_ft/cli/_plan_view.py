"""A prediction in a terminal."""

from __future__ import annotations

import math
from collections import Counter
from itertools import groupby

from rich import box
from rich.table import Table

from chameleon_ft.cli._plan_fit import Misfit
from chameleon_ft.cli._prediction import Prediction, Searched
from chameleon_ft.observe.terminal import output
from chameleon_ft.plan import Plan
from chameleon_ft.quantities import data_size, duration, in_ranges, rate
from chameleon_ft.workload import is_recomputed

__all__ = ["show"]


_DERIVED = (
    "derived costs grow with the micro-batch as its samples do; what larger ones save in time only profiles say that "
    "are measured for each size"
)


def show(prediction: Prediction) -> None:
    """Print it."""
    console, shape = output()
    console.print(prediction.title, style="bold", soft_wrap=True)
    console.print(_facts(prediction))
    if prediction.sizes and prediction.case.profile.source == "derived":
        console.print(_DERIVED, soft_wrap=True)
    console.print(_workers(prediction, shape))
    if prediction.searched is not None:
        console.print(_proof(prediction.searched), soft_wrap=True)
        console.print(_found(prediction.searched, shape, moves=prediction.before is not None, hosts=prediction.hosts))
    if prediction.misfit is not None:
        console.print(_describe_misfit(prediction.misfit), style="red", soft_wrap=True)


def _facts(prediction: Prediction) -> Table:
    estimate = prediction.estimate
    samples_per_s = prediction.costs.workload.samples / estimate.step_s
    facts = Table(box=None, show_header=False, pad_edge=True)
    facts.add_row("step", f"{duration(estimate.step_s)}, {rate(samples_per_s)} samples a second")
    facts.add_row(
        "", f"= {duration(estimate.program_s)} of operations + {duration(estimate.sync.exposed_s)} of gradient sync"
    )
    for number, own in enumerate(prediction.sizes):
        if own.step_s is not None:
            chosen = own.micro_batch_size == prediction.costs.workload.micro_batch_size
            what = duration(own.step_s) + (", chosen" if chosen else "")
        elif own.bound_s == math.inf:
            what = "does not fit into memory"
        else:
            what = f"not searched, takes at least {duration(own.bound_s)}"
        facts.add_row("" if number else "sizes", f"micro-batches of {own.micro_batch_size}: {what}")
    if prediction.dead and prediction.before is not None and prediction.before_step_s is not None:
        before_s = prediction.before_step_s
        live = len(prediction.before.workers) - len(prediction.dead)
        facts.add_row(
            "",
            f"{before_s / estimate.step_s:.1%} of the throughput before the loss ({duration(before_s)}, "
            f"{_backward(prediction.before)} backward), "
            f"with {live / len(prediction.before.workers):.1%} of the workers",
        )
    above = f"{max(0.0, estimate.gap):.1%} above it"
    facts.add_row("bound", f"{duration(estimate.bound_s)} for the operations of this plan in any order: {above}")
    facts.add_row("", f"{duration(prediction.total_work_bound_s)} if no live worker were ever idle")
    if prediction.plan.recompute:
        again = list(prediction.plan.recompute)
        which = f"workers {in_ranges(again)} recompute" if len(again) > 1 else f"worker {again[0]} recomputes"
        facts.add_row("memory", f"{which}, to save memory")
    facts.add_row("bubble", f"{estimate.bubble:.1%} of the workers' time is idle")
    return facts


def _proof(searched: Searched) -> str:
    result = searched.result
    above = f"{max(0.0, searched.gap):.1%} above {duration(result.bound_s)}"
    sizes = ", of any of these sizes," if result.sizes else ""
    return (
        f"{searched.planner}, in {duration(searched.search_s)}: {above}, "
        f"which no plan of the family {result.family}{sizes} can beat"
    )


def _found(searched: Searched, shape: box.Box, *, moves: bool, hosts: int) -> Table:
    """What the search has found, the best first; what each moves only if a plan is in force that it is moved from."""
    table = Table(box=shape)
    table.add_column("found")
    table.add_column("backward")
    for column in ("step", "pipelines of stages", *(("to move",) if moves else ()), "peak memory"):
        table.add_column(column, justify="right")
    if hosts > 1:
        table.add_column("loss of a host")
    for candidate in searched.candidates:
        found = candidate.found
        fatal = found.host_single_points_of_failure
        depths = Counter(len(hops) for hops in {route.hops for route in found.plan.routes})
        table.add_row(
            found.name,
            _backward(found.plan),
            duration(candidate.estimate.step_s),
            ", ".join(f"{count} of {depth}" for depth, count in sorted(depths.items())),
            *((data_size(found.moved_bytes),) if moves else ()),
            data_size(candidate.peak_bytes),
            *((f"fatal: {fatal} of {hosts}" if fatal else "survived",) if hosts > 1 else ()),
        )
    return table


def _backward(plan: Plan) -> str:
    kind = "split" if plan.split_backward else "fused"
    if plan.fused_workers:
        kind += f", fused on {len(plan.fused_workers)} of {len(plan.workers)} workers"
    return f"{kind}, {len(plan.recompute)} recompute" if plan.recompute else kind


def _workers(prediction: Prediction, shape: box.Box) -> Table:
    table = Table(box=shape)
    for column in ("workers", "layers", *(("recompute",) if prediction.plan.recompute else ()), "operations"):
        table.add_column(column)
    for column in ("busy", "peak memory", "capacity"):
        table.add_column(column, justify="right")
    for row, workers in _alike(prediction):
        table.add_row(in_ranges(workers), *row)
    for others, what in ((prediction.idle, "idle"), (prediction.dead, "lost")):
        if others:
            table.add_row(in_ranges(others), what)
    return table


def _alike(prediction: Prediction) -> list[tuple[tuple[str, ...], list[int]]]:
    """What the table says of each worker, and the workers of whom it says the same."""
    estimate = prediction.estimate
    operations: dict[int, int] = {}
    for timed in estimate.timeline.operations:
        operations[timed.worker] = operations.get(timed.worker, 0) + 1
    rows: list[tuple[tuple[str, ...], int]] = []
    for worker in prediction.plan.workers:
        capacity = prediction.costs.cluster.worker(worker).memory_bytes
        memory = estimate.memory[worker].peak_bytes
        row = (
            ", ".join(f"{part.start}-{part.stop - 1}" for part in prediction.plan.placement.ranges_of(worker)),
            *((_recomputed(prediction.plan, worker),) if prediction.plan.recompute else ()),
            str(operations.get(worker, 0)),
            f"{estimate.busy_s[worker] / estimate.program_s:.0%}" if estimate.program_s else "-",
            data_size(memory),
            "unknown" if capacity is None else data_size(capacity),
        )
        rows.append((row, worker))
    rows.sort(key=lambda pair: (_first_layer(pair[0][0]), pair))
    return [(row, [worker for _, worker in same]) for row, same in groupby(rows, key=lambda pair: pair[0])]


def _recomputed(plan: Plan, worker: int) -> str:
    """How many of the worker's layers are run again in the backward."""
    held = [layer for layers in plan.placement.ranges_of(worker) for layer in layers]
    if (again := plan.recompute.get(worker)) is None:
        return ""
    in_full, selectively = (
        sum(layer in own and is_recomputed(layer, plan.placement.num_layers) for layer in held)
        for own in (again.full, again.selective)
    )
    if in_full and selectively:
        return f"{in_full} of {len(held)}, {selectively} selectively"
    return (
        f"{in_full or selectively} of {len(held)}{' selectively' if selectively else ''}"
        if in_full or selectively
        else ""
    )


def _first_layer(layers: str) -> int:
    return int(layers.partition("-")[0])


def _describe_misfit(misfit: Misfit) -> str:
    worker, missing = max(misfit.missing_bytes.items(), key=lambda pair: pair[1])
    lines = [
        f"does not fit: worker {worker} needs {data_size(missing)} more than its {data_size(misfit.capacity_bytes)}"
        + (f", and {len(misfit.missing_bytes) - 1} others lack memory too" if len(misfit.missing_bytes) > 1 else "")
    ]
    if misfit.fitting:
        fits = ", ".join(f"--dp {fit.dp} --pp {fit.pp} ({data_size(fit.peak_bytes)})" for fit in misfit.fitting)
        lines.append(f"what would fit: {fits}")
    elif misfit.layouts:
        least = misfit.layouts[0]
        lines.append(
            f"no layout of these workers fits; the nearest is --dp {least.dp} --pp {least.pp}, which lacks "
            f"{data_size(least.peak_bytes - misfit.capacity_bytes)}; take more workers (--workers N says whether N "
            "would do), or save memory by --recompute full or a smaller --micro-batch-size"
        )
    return "\n".join(lines)
