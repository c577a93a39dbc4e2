"""Does a worker hold as much as predicted? Peak memory of plans of models, predicted and counted on a CPU.

Predicted: the replay of each worker's program with the bytes of a measured profile, layer by layer. Counted: that
worker's own executor, layers, gradients, optimizer and commit, in this process, without peers, and every allocation and
free of torch's allocator meanwhile. Workers with equal work on the same layers are counted once. A plan has to fit at
any later time, so both count the optimizer's state of all parameters, also of experts that have had no token.

Drawn plans have snapshots, too, in host memory. Of these the blocks are counted that a worker keeps: of its own state
after these steps, and the backups, as long as the longest block in them. Headers of blocks are not predicted, so the
bars are for all memory of a worker, as on a CPU.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import torch

from benchmarks._common import ROOT, Bar, Report, base_config, new_folder, report_arguments
from benchmarks._neighbours import progress
from benchmarks._worker_memory import Alone, peak_of_allocator, peak_of_storages
from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.config import Batch, Parallel, RunConfig
from chameleon_ft.cost.memory import program_memory
from chameleon_ft.cost.snapshots import part_bytes, snapshot_memory
from chameleon_ft.job.job import Job
from chameleon_ft.job.reference import load_job
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, RecomputedLayers, Route, data_pipeline_plan
from chameleon_ft.plan.shards import Sharding, shard_optimizer
from chameleon_ft.plan.snapshots import Part, lay_out_snapshot
from chameleon_ft.recovery import reroute
from chameleon_ft.schedule import CostModel, best_program, check_program
from chameleon_ft.session.configuration import prepare_data_of
from chameleon_ft.trees import Boundary
from chameleon_ft.worker.inspection import inspect_job
from chameleon_ft.worker.profiling.layers import ModelOnDevice, ResidentLayers, sized_layer
from chameleon_ft.worker.snapshots import PackedState
from chameleon_ft.workload import LayerCost, Workload

_MEAN_ERROR: Final = 0.02
_UNDERESTIMATE: Final = 0.01
_LINK: Final = Link(1e-4, 1e9)
_WORKERS: Final = 16
_CPU: Final = torch.device("cpu")
_PrecisionName: TypeAlias = Literal["fp32", "bf16"]
# Share of its layers that each worker recomputes, the lowest first, and whether it does so selectively.
_RECOMPUTED: Final = {
    "": (0.0, False),
    ", lower half recomputed": (0.5, False),
    ", recomputed": (1.0, False),
    ", recomputed selectively": (1.0, True),
}


@dataclass(frozen=True, slots=True)
class Model:
    """A job with the bytes of its layers."""

    name: str
    job: Job
    config: RunConfig
    boundaries: tuple[Boundary, ...]
    layers: tuple[LayerCost, ...]
    device: torch.device = _CPU
    owners: int | None = None
    snapshots: int | None = None  # parts that share a backup; None: there are none

    def costs(self, plan: Plan) -> CostModel:
        workload = Workload(self.layers, plan.micro_batches, self.config.batch.micro_batch_size, owners=self.owners)
        return CostModel(workload, Cluster(tuple(Worker(w, "host") for w in range(_WORKERS)), _LINK, _LINK))

    def pipelines(self, dp: int, pp: int, micro_batches: int, *, skew: float = 0.0) -> Plan:
        """Return symmetric pipelines; with `skew` later layers cost more, so that stages get unequal ranges."""
        costs = [cost * (1 + skew * layer) for layer, cost in enumerate(self.job.relative_costs)]
        return data_pipeline_plan(layer_costs=costs, dp=dp, pp=pp, micro_batches=micro_batches)

    def without(self, plan: Plan, lost: Sequence[int]) -> Plan:
        return reroute(plan, lost, self.costs(plan))


@dataclass(frozen=True, slots=True)
class Counted:
    """One worker of a plan, or several with equal work.

    Attributes:
        snapshots: (predicted, counted) bytes of two snapshots on each of these workers.
    """

    model: str
    plan: str
    workers: tuple[int, ...]
    predicted: int
    counted: int
    storages: int | None
    snapshots: tuple[tuple[int, int], ...] = ()

    @property
    def error(self) -> float:
        """Relative error of the prediction, predicted / counted - 1."""
        return self.predicted / self.counted - 1

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "plan": self.plan,
            "workers": list(self.workers),
            "predicted_bytes": self.predicted,
            "counted_bytes": self.counted,
            "storage_bytes": self.storages,
            "error": self.error,
            "snapshots_bytes": self.snapshots,
        }


def main() -> int:
    given = _arguments()
    folder = new_folder(given.out)
    torch.set_num_threads(1)
    found: list[Counted] = []
    cases = _all_cases(given.config, folder) if given.drawn is None else _drawn(given.drawn, given.config, folder)
    for model, name, plan in cases:
        progress(f"{model.name}: {name}")
        found += count(model, name, plan, storages=given.storages)
    return _report(found).emit(folder, as_json=given.json)


def _arguments() -> argparse.Namespace:
    parser = report_arguments(__doc__, name="memory")
    parser.add_argument(
        "--config", type=Path, default=ROOT / "examples" / "quickstart.toml", help="the Llama and its batch (TOML)"
    )
    parser.add_argument(
        "--drawn", type=int, help="draw so many plans, with precision, redundancy and snapshots; default: all plans"
    )
    parser.add_argument("--storages", action="store_true", help="count the storages of tensors too")
    return parser.parse_args()


def _all_cases(path: Path, folder: Path) -> Iterator[tuple[Model, str, Plan]]:
    for model in (_llama(path, folder, "fp32"), _llama(path, folder, "bf16"), _own_model("fp32")):
        for name, plan in _plans(model):
            yield model, name, plan


def _drawn(number: int, path: Path, folder: Path) -> Iterator[tuple[Model, str, Plan]]:
    """Draw plans of three models, in both precisions, with some or all owners of slices, and with snapshots or none."""
    rng = random.Random(number)
    precisions: tuple[_PrecisionName, ...] = ("fp32", "bf16")
    models = [
        model for each in precisions for model in (_llama(path, folder, each), _own_model(each), _idle_experts(each))
    ]
    for index in range(number):
        model = replace(rng.choice(models), owners=rng.choice((1, 2, 3, None)))
        name, plan = rng.choice(list(_plans(model)))
        model = replace(model, snapshots=random.Random(f"snapshots {number}, {index}").choice((None, 1, 1, 2, 3)))
        kept = {None: "no snapshots", 1: "copies"}.get(model.snapshots, f"parity of {model.snapshots}")
        yield model, f"{name}, redundancy {'all' if model.owners is None else model.owners}, {kept}", plan


def _llama(path: Path, folder: Path, precision: _PrecisionName) -> Model:
    config = base_config(path, stamped=False).model_copy(update={"output_dir": folder, "precision": precision})
    prepare_data_of(config)
    return measured_model(_named("Llama", precision), config)


def _own_model(precision: _PrecisionName) -> Model:
    return _model_of("pictures", ROOT / "examples" / "own_model.py", 16, precision)


def _idle_experts(precision: _PrecisionName) -> Model:
    return _model_of("idle experts", ROOT / "benchmarks" / "_experts_job.py", 4, precision)


def _model_of(name: str, job: Path, micro_batch_size: int, precision: _PrecisionName) -> Model:
    batch = Batch(micro_batches=8, micro_batch_size=micro_batch_size)
    parallel = Parallel(dp=2, pp=2)
    config = RunConfig(job=str(job), workers=4, parallel=parallel, batch=batch, precision=precision)
    return measured_model(_named(name, precision), config)


def _named(model: str, precision: _PrecisionName) -> str:
    return model if precision == "fp32" else f"{model} in {precision}"


def measured_model(name: str, config: RunConfig, device: torch.device = _CPU) -> Model:
    """Return the job of `config` with the bytes of its layers on `device`."""
    job = load_job(config.job, config)
    progress(f"{name}: bytes of {job.num_layers} layers")
    model = ModelOnDevice(job, config, device)
    layers = []
    for layer, cost in enumerate(job.relative_costs):
        sized = sized_layer(ResidentLayers(model, LayerRange(layer, layer + 1)))
        # Times determine only the order of operations, so those of the shape serve.
        layers.append(replace(sized, forward_s=cost, input_grad_s=cost, weight_grad_s=cost))
    return Model(name, job, config, model.boundaries, tuple(layers), device)


def _plans(model: Model) -> Iterator[tuple[str, Plan]]:
    for how, (part, selectively) in _RECOMPUTED.items():
        if selectively and all(layer.selective_bytes is None for layer in model.layers):
            continue
        for split in (False, True):
            kind = "split" if split else "fused"
            for name, plan in _fused_plans(model):
                recompute = {
                    worker: _lowest(plan.placement, worker, part, selectively=selectively)
                    for worker in plan.workers
                    if part
                }
                yield f"{name}, {kind}{how}", Plan(plan.placement, plan.routes, split, recompute)


def _lowest(placement: Placement, worker: int, part: float, *, selectively: bool) -> RecomputedLayers:
    """Return this share of the layers that `worker` holds."""
    held = placement.layers_of(worker)
    stop = held[math.ceil(part * len(held)) - 1] + 1
    return RecomputedLayers(held[0], stop, stop - held[0] if selectively else 0)


def _fused_plans(model: Model) -> Iterator[tuple[str, Plan]]:
    deepest = model.job.num_layers
    yield "4 x 1", model.pipelines(4, 1, 16)
    yield "4 x 2", model.pipelines(4, 2, 16)
    yield "2 x 4", model.pipelines(2, 4, 16)
    yield f"1 x {deepest}", model.pipelines(1, deepest, 16)
    yield "2 x 3, later layers heavier", model.pipelines(2, 3, 12, skew=1.0)
    yield "depths 2 and 3", _unequal_depths(model, 12)
    yield "3 x 2, one lost", model.without(model.pipelines(3, 2, 12), [3])
    yield "4 x 2, two lost", model.without(model.pipelines(4, 2, 16), [2, 5])
    yield "4 x 4, three lost", model.without(model.pipelines(4, 4, 16), [1, 6, 15])
    yield "hops in pieces", _in_pieces(model, 8)


def _unequal_depths(model: Model, micro_batches: int) -> Plan:
    shallow, deep = (model.pipelines(1, pp, 1).routes[0].hops for pp in (2, 3))
    deep = tuple(Hop(hop.worker + len(shallow), hop.layers) for hop in deep)
    pipelines = (shallow, deep)
    return Plan(
        Placement(model.job.num_layers, {hop.worker: (hop.layers,) for hops in pipelines for hop in hops}),
        tuple(Route(m, pipelines[m % 2]) for m in range(micro_batches)),
    )


def _in_pieces(model: Model, micro_batches: int) -> Plan:
    """Return a plan with a worker of two ranges, consecutive hops on one worker, and detours within a range."""
    last = model.job.num_layers
    placement = Placement(
        last, {0: (LayerRange(0, 2), LayerRange(4, last)), 1: (LayerRange(1, 5),), 2: (LayerRange(0, last),)}
    )

    def route(m: int, *hops: tuple[int, int, int]) -> Route:
        return Route(m, tuple(Hop(worker, LayerRange(start, stop)) for worker, start, stop in hops))

    ways: tuple[Callable[[int], Route], ...] = (
        lambda m: route(m, (0, 0, 2), (1, 2, 4), (0, 4, last)),
        lambda m: route(m, (2, 0, 3), (2, 3, last)),
        lambda m: route(m, (0, 0, 1), (1, 1, 3), (1, 3, 5), (2, 5, last)),
        lambda m: route(m, (2, 0, 1), (2, 1, 2), (1, 2, 4), (0, 4, 5), (0, 5, last)),
    )
    return Plan(placement, tuple(ways[m % len(ways)](m) for m in range(micro_batches)))


def count(model: Model, name: str, plan: Plan, *, storages: bool = False) -> Iterator[Counted]:
    """Yield the predicted and the counted peak of each worker of a plan, equal ones once."""
    costs = model.costs(plan)
    program = best_program(plan, costs).program
    check_program(program, plan)
    predicted = program_memory(program, plan.placement, costs.workload)
    batch = model.config.batch.model_copy(update={"micro_batches": plan.micro_batches})
    hosts = dict.fromkeys(plan.workers, "host")
    sharding = None if model.owners is None else shard_optimizer(plan.placement, hosts, model.owners)
    alike: dict[object, list[Alone]] = {}
    for worker in plan.workers:
        alone = Alone(
            job=model.job,
            batch=batch,
            boundaries=model.boundaries,
            placement=plan.placement,
            worker=worker,
            operations=program.of(worker),
            sharding=sharding,
            device=model.device,
        )
        alike.setdefault(alone.likeness(), []).append(alone)
    kept = _snapshots_of(model, plan, sharding, alike.values()) if model.snapshots is not None else {}
    for same in alike.values():
        yield Counted(
            model.name,
            name,
            tuple(alone.worker for alone in same),
            predicted[same[0].worker].peak_bytes,
            peak_of_allocator(same[0]),
            peak_of_storages(same[0]) if storages else None,
            tuple(kept[alone.worker] for alone in same if alone.worker in kept),
        )


def _snapshots_of(
    model: Model, plan: Plan, sharding: Sharding | None, alike: Iterable[Sequence[Alone]]
) -> dict[int, tuple[int, int]]:
    """Return the predicted and the counted bytes of two snapshots on each worker."""
    assert model.snapshots is not None
    # As in a run, which knows from the job what moves: buffers that are not saved do not.
    workload = inspect_job(model.config).completed(model.costs(plan)).workload
    hosts = {worker: f"host{worker}" for worker in plan.workers}
    layout = lay_out_snapshot(plan.placement, hosts, sharding, group=model.snapshots, weight=part_bytes(workload))
    shares, blocks = layout.shares(), dict[Part, int]()
    for same in alike:
        held = same[0].train()
        for alone in same:  # which hold the same
            for part in shares[alone.worker].kept:
                if part not in blocks:
                    units = (part.start, part.stop)
                    state = held.state_of_slice(part.layer, units) if part.stop else held.state_of(part.layer)
                    blocks[part] = PackedState(state).num_bytes
    counted = dict.fromkeys(plan.workers, 0)
    for part, keepers in layout.keepers:
        for keeper in keepers:
            counted[keeper] += 2 * blocks[part]
    for backup in layout.backups:
        counted[backup.worker] += 2 * max(blocks[part] for part in backup.parts)
    predicted = snapshot_memory(layout, workload)
    return {worker: (each.total_bytes, counted[worker]) for worker, each in predicted.items()}


def _report(found: Sequence[Counted]) -> Report:
    by_plan: dict[tuple[str, str], list[Counted]] = {}
    for each in found:
        by_plan.setdefault((each.model, each.plan), []).append(each)
    # Every worker counts, also those equal to another one.
    errors = [each.error for each in found for _ in each.workers]
    with_snapshots = [
        (each.predicted + predicted) / (each.counted + counted) - 1
        for each in found
        for predicted, counted in each.snapshots
    ]
    of_snapshots = [predicted / counted - 1 for each in found for predicted, counted in each.snapshots]
    name = "with snapshots"
    snapshot_bars = (
        (
            Bar(name=f"mean error {name}", value=statistics.fmean(map(abs, with_snapshots)), limit=_MEAN_ERROR),
            Bar(name=f"largest underestimate {name}", value=max(0.0, -min(with_snapshots)), limit=_UNDERESTIMATE),
        )
        if with_snapshots
        else ()
    )
    return Report(
        benchmark="memory",
        columns=("model", "plan", "workers", "counted", "peak, MB", "mean error", "worst error"),
        rows=tuple(
            (
                model,
                plan,
                str(sum(len(each.workers) for each in rows)),
                str(len(rows)),
                f"{max(each.counted for each in rows) / 1e6:.2f}",
                f"{statistics.fmean(abs(each.error) for each in rows for _ in each.workers):.2%}",
                f"{max((each.error for each in rows), key=abs):+.2%}",
            )
            for (model, plan), rows in by_plan.items()
        ),
        bars=(
            Bar(name="mean error of the peak", value=statistics.fmean(map(abs, errors)), limit=_MEAN_ERROR),
            Bar(name="largest underestimate", value=max(0.0, -min(errors)), limit=_UNDERESTIMATE),
            *snapshot_bars,
        ),
        results={
            "plans": len(by_plan),
            "workers": len(errors),
            "mean_error": statistics.fmean(map(abs, errors)),
            "largest_overestimate": max(errors),
            "largest_underestimate": -min(errors),
            "mean_error_of_snapshots": statistics.fmean(map(abs, of_snapshots)) if of_snapshots else None,
            "largest_underestimate_of_snapshots": -min(of_snapshots) if of_snapshots else None,
            "counted": [each.to_json() for each in found],
        },
    )


if __name__ == "__main__":
    raise SystemExit(main())
