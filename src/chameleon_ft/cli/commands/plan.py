"""`chameleon plan`: predict a step."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

from pydantic.dataclasses import dataclass

from chameleon_ft.cli.arguments import parse_arguments, take_job_arguments
from chameleon_ft.cli.output import Output, compile_kernels, require_places, tell_written, waiting, write_schedule
from chameleon_ft.cost.memory import program_memory
from chameleon_ft.cost.snapshots import SNAPSHOT_SHARE, SnapshotChoice, host_bytes
from chameleon_ft.errors import ConfigError
from chameleon_ft.plan import Plan
from chameleon_ft.quantities import data_size, duration, in_ranges, rate
from chameleon_ft.report.picture import Lane
from chameleon_ft.schedule import list_schedule
from chameleon_ft.session.plan_case import PlanCase, PlanRequest, plan_cases
from chameleon_ft.session.prediction import Prediction, Search, predict_layouts, predict_searched
from chameleon_ft.workload import is_recomputed

_DERIVED = (
    "derived costs grow with the micro-batch nearly in proportion to its samples; only profiles measured for each size "
    "show what larger ones save"
)
_MEMORY: Final = {
    "param_bytes": "of parameters",
    "gradient_bytes": "of gradients",
    "optimizer_bytes": "of optimizer state",
    "activation_bytes": "of activations",
    "weight_grad_bytes": "kept for weight gradients",
    "message_bytes": "of messages",
    "working_bytes": "of working memory",
    "sample_bytes": "of samples",
}
"""The fields of `MemoryUse` in words."""


@dataclass(frozen=True)
class PlanArguments(PlanRequest):
    """Predict a step: its time and that of every operation, the memory of every worker, and lower bounds.

    With CONFIG, for that run, by the profile that it names or --profile; without a profile, its layers are measured
    once on this machine, which takes some seconds; --job.NAME is an argument of the job's function. Without CONFIG,
    for a layout of a published --model on a known --device, or of a --profile. The exit code is 1 if the plan does
    not fit the memory of its workers.
    """

    picture: Path | None = None
    """Draw the schedule: .svg, .png or .pdf."""
    trace: Path | None = None
    """Write the schedule as a trace for ui.perfetto.dev."""
    json: bool = False
    """Print the prediction as JSON."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    arguments, of_job = take_job_arguments(arguments)
    given = parse_arguments(PlanArguments, arguments, command="plan", positional=["config"])
    require_places(picture=given.picture, trace=given.trace)
    cases = plan_cases(given, of_job)
    dead = _failed_workers(given.failed, len(cases[0].costs.cluster.workers))
    planner = _planner(given, cases)
    compile_kernels()
    with waiting("planning"):
        searched = planner != "layout"
        prediction = predict_searched(cases, dead, planner=planner) if searched else predict_layouts(cases, dead)
    write_schedule(
        given.picture,
        given.trace,
        title=prediction.title,
        plan=prediction.plan,
        pipelines=prediction.pipelines,
        lanes=[Lane.predicted(prediction.estimate)],
        lost=prediction.dead,
    )
    if given.json:
        print(json.dumps(prediction.to_json()))
    else:
        _show(prediction)
    tell_written(json=given.json, picture=given.picture, trace=given.trace)
    return 1 if prediction.missing_bytes else 0


def _planner(given: PlanArguments, cases: Sequence[PlanCase]) -> str:
    searched = cases[0].parallel is None
    if given.planner == "layout" and searched:
        raise ConfigError(f"--planner layout: --workers {given.workers} leaves the layout open; give --dp and --pp")
    planner = given.planner or ("chameleon" if searched else "layout")
    if len(cases) > 1:
        if given.failed:
            raise ConfigError(f"--failed {given.failed}: a run keeps its micro-batch size; give one")
        if planner not in ("layout", "chameleon") or (planner == "chameleon" and not searched):
            raise ConfigError(
                f"--planner {planner}: a micro-batch size is chosen for a layout of --dp and --pp or by a search with "
                "--workers; give one size, or --workers and no other planner"
            )
    return planner


def _failed_workers(text: str, workers: int) -> tuple[int, ...]:
    dead = set()
    for part in filter(None, text.split(",")):
        if not part.strip().isdecimal():
            raise ConfigError(f"--failed {text}: should be numbers of workers with commas between them, such as 5,9")
        if int(part) >= workers:
            raise ConfigError(f"--failed {text}: there is no worker {int(part)}; they are numbered 0 to {workers - 1}")
        dead.add(int(part))
    if len(dead) == workers:
        raise ConfigError(f"--failed {text}: leaves no worker")
    return tuple(sorted(dead))


def _show(prediction: Prediction) -> None:
    out, search = Output(), prediction.search
    out.text(prediction.title, "bold")
    out.facts(_facts(prediction))
    if prediction.sizes and prediction.case.profile.source == "derived":
        out.text(_DERIVED)
    recompute = ("recompute",) if prediction.plan.recompute else ()
    left, right = ["workers", "layers", *recompute, "operations"], ["busy", "peak memory", "capacity"]
    out.show(out.table(_worker_rows(prediction), left=left, right=right))
    if search is not None:
        result = search.result
        sizes = ", of any of these sizes," if result.sizes else ""
        out.text(
            f"{search.planner}, in {duration(search.search_s)}: {max(0.0, search.gap):.1%} above "
            f"{duration(result.bound_s)}, which no plan of the family pipelines{sizes} can beat"
        )
        _show_candidates(out, prediction, search)
    if prediction.missing_bytes:
        out.text(_describe_misfit(prediction), "red")


def _facts(prediction: Prediction) -> Iterator[tuple[str, str]]:
    estimate, plan, size = prediction.estimate, prediction.plan, prediction.case.costs.workload.micro_batch_size
    yield "step", f"{duration(estimate.step_s)}, {rate(prediction.samples_per_s)} samples a second"
    yield "", f"= {duration(estimate.program_s)} of operations + {duration(estimate.sync.exposed_s)} of gradient sync"
    for number, (first_step, count, step_s) in enumerate(prediction.ramp()):
        speed = f"{duration(step_s)}, {rate(count * size / step_s)} samples a second"
        text = f"{count} micro-batches from step {first_step} on: {speed}"
        yield "" if number else "ramp", text
    for number, own in enumerate(prediction.sizes):
        if own.step_s is not None:
            text = duration(own.step_s) + (", chosen" if own.micro_batch_size == size else "")
        elif own.bound_s == math.inf:
            text = "does not fit into memory"
        else:
            text = f"not searched, takes at least {duration(own.bound_s)}"
        yield "" if number else "sizes", f"micro-batches of {own.micro_batch_size}: {text}"
    before, before_s = prediction.case.layout, prediction.before_step_s
    if prediction.dead and before is not None and before_s is not None:
        live = 1 - len(prediction.dead) / len(before.workers)
        yield (
            "",
            f"{before_s / estimate.step_s:.1%} of the throughput before the loss ({duration(before_s)}, "
            f"{_describe_backward(before)} backward), with {live:.1%} of the workers",
        )
    above = f"{max(0.0, estimate.gap):.1%} above it"
    yield "bound", f"{duration(estimate.bound_s)} for the operations of this plan in any order: {above}"
    yield "", f"{duration(prediction.total_work_bound_s)} if no live worker were ever idle"
    worker = max(estimate.memory, key=lambda each: (estimate.memory[each].peak_bytes, -each))
    peak = estimate.memory[worker].peak
    parts = ", ".join(f"{data_size(size)} {_MEMORY[name]}" for name in _MEMORY if (size := getattr(peak, name)))
    yield "memory", f"{data_size(peak.total_bytes)} at most, on worker {worker}: {parts}"
    if again := list(plan.recompute):
        which = f"workers {in_ranges(again)} recompute" if len(again) > 1 else f"worker {again[0]} recomputes"
        yield "", f"{which}, to save memory"
    snapshots = prediction.case.snapshots_of(plan)
    if snapshots is not None and snapshots.memory:
        yield from _snapshot_facts(snapshots, prediction.case)
    yield "bubble", f"{estimate.bubble:.1%} of the workers' time is idle"


def _snapshot_facts(snapshots: SnapshotChoice, case: PlanCase) -> Iterator[tuple[str, str]]:
    most = max(snapshots.memory.values(), key=lambda each: each.total_bytes)
    yield (
        "snapshots",
        f"{data_size(most.total_bytes)} of host memory for a worker at most: two, each of "
        f"{data_size(most.own_bytes)} of its own state and {data_size(most.backup_bytes)} of backups",
    )
    if snapshots.refusal:
        yield "", f"none are taken: {snapshots.refusal}"
    elif case.host_bytes is None and case.snapshots.every == "auto":
        max_bytes = max(host_bytes(snapshots.memory, case.hosts).values())
        yield "", f"taken if {data_size(max_bytes / SNAPSHOT_SHARE)} are available on the host that needs most"


def _describe_backward(plan: Plan) -> str:
    kind = "split" if plan.split_backward else "fused"
    if plan.fused_workers:
        kind += f", fused on {len(plan.fused_workers)} of {len(plan.workers)} workers"
    return f"{kind}, {len(plan.recompute)} recompute" if plan.recompute else kind


def _show_candidates(out: Output, prediction: Prediction, search: Search) -> None:
    """Print the candidates, best first; the bytes to move only if there is a plan in force to move them from."""
    moves = prediction.case.layout is not None
    hosts = len({host for worker, host in prediction.case.costs.cluster.hosts.items() if worker not in prediction.dead})
    rows = []
    for candidate in search.candidates:
        found = candidate.found
        fatal = found.host_single_points_of_failure
        depths = Counter(len(hops) for hops in {route.hops for route in found.plan.routes})
        peak_bytes = max(memory.peak_bytes for memory in candidate.estimate.memory.values())
        rows.append(
            (
                found.name,
                _describe_backward(found.plan),
                duration(candidate.estimate.step_s),
                ", ".join(f"{count} of {depth}" for depth, count in sorted(depths.items())),
                *((data_size(found.moved_bytes),) if moves else ()),
                data_size(peak_bytes),
                *((f"fatal: {fatal} of {hosts}" if fatal else "survived",) if hosts > 1 else ()),
            )
        )
    right = ["step", "pipelines of stages", *(["to move"] if moves else []), "peak memory"]
    last = ["loss of a host"] if hosts > 1 else []
    out.show(out.table(rows, left=["found", "backward"], right=right, last=last))


def _worker_rows(prediction: Prediction) -> Iterator[tuple[str, ...]]:
    """Yield a row for each group of workers with the same figures, by first layer; then the idle and the lost ones."""
    estimate, plan, cluster = prediction.estimate, prediction.plan, prediction.case.costs.cluster
    operations = Counter(timed.worker for timed in estimate.timeline.operations)
    rows = []
    for worker in plan.workers:
        capacity, held = cluster.worker(worker).memory_bytes, plan.placement.ranges_of(worker)
        row = (
            ", ".join(f"{part.start}-{part.stop - 1}" for part in held),
            *((_describe_recomputed(plan, worker),) if plan.recompute else ()),
            str(operations[worker]),
            f"{estimate.busy_s[worker] / estimate.program_s:.0%}" if estimate.program_s else "-",
            data_size(estimate.memory[worker].peak_bytes),
            "unknown" if capacity is None else data_size(capacity),
        )
        rows.append((held[0].start, row, worker))
    for (_, row), group in groupby(sorted(rows), key=lambda each: each[:2]):
        yield (in_ranges(worker for _, _, worker in group), *row)
    idle = set(cluster.hosts).difference(plan.workers, prediction.dead)
    for others, text in ((idle, "idle"), (prediction.dead, "lost")):
        if others:
            yield in_ranges(others), text


def _describe_recomputed(plan: Plan, worker: int) -> str:
    """Count the worker's layers that run again in the backward."""
    held = plan.placement.layers_of(worker)
    if (again := plan.recompute.get(worker)) is None:
        return ""
    in_full, selectively = (
        sum(layer in own and is_recomputed(layer, plan.placement.num_layers) for layer in held)
        for own in (again.full, again.selective)
    )
    if in_full and selectively:
        return f"{in_full} of {len(held)}, {selectively} selectively"
    if in_full or selectively:
        return f"{in_full or selectively} of {len(held)}{' selectively' if selectively else ''}"
    return ""


def _describe_misfit(prediction: Prediction) -> str:
    """Say by how much the plan does not fit, and which layouts of the same workers would."""
    case, missing_bytes = prediction.case, prediction.missing_bytes
    capacity = case.profile.memory_bytes
    assert capacity is not None
    worker, missing = max(missing_bytes.items(), key=lambda pair: pair[1])
    others = f", and {len(missing_bytes) - 1} others lack memory too" if len(missing_bytes) > 1 else ""
    text = f"does not fit: worker {worker} needs {data_size(missing)} more than its {data_size(capacity)}{others}"
    peaks = []
    for layout in case.layouts():
        plan = case.plan_of(layout)
        memory = program_memory(list_schedule(plan, case.costs), plan.placement, case.costs.workload)
        peaks.append((max(use.peak_bytes for use in memory.values()), layout))
    if fitting := [(peak, layout) for peak, layout in peaks if peak <= capacity]:
        fits = ", ".join(f"--dp {layout.dp} --pp {layout.pp} ({data_size(peak)})" for peak, layout in fitting)
        return f"{text}\nwhat would fit: {fits}"
    if not peaks:
        return text
    peak, nearest = min(peaks, key=lambda pair: pair[0])
    return (
        f"{text}\nno layout of these workers fits; the nearest is --dp {nearest.dp} --pp {nearest.pp}, which lacks "
        f"{data_size(peak - capacity)}; take more workers (--workers N says whether N would do), or save memory by "
        "--recompute full or a smaller --micro-batch-size"
    )
