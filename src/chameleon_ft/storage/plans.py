"""Files of plans: each generation of a run with its program and costs, and the plan that a run is to begin with."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.config import RunConfig
from chameleon_ft.errors import ChameleonError, ConfigError, PlanError, describe_invalid
from chameleon_ft.plan import Plan
from chameleon_ft.plan.layouts import disjoint_pipelines
from chameleon_ft.recovery.generation import CostsFrom, GenerationSpec, LaterPlan
from chameleon_ft.schedule import CostModel, Operation, OperationKind, Program
from chameleon_ft.storage.files import replace_file
from chameleon_ft.workload import Workload

_OPERATION = re.compile(r"([FBIW])(\d+)\.(\d+)")


def write_generation(spec: GenerationSpec, path: Path) -> None:
    """Write a JSON file, which `read_generation` reads, and its folder if there is none.

    It has the plan that is trained, without layers that are on their way, the program and the costs; and the plans and
    programs that follow as the batch grows.
    """
    cluster = spec.costs.cluster
    file = _File(
        generation=spec.generation,
        first_step=spec.first_step,
        plan=spec.trained_plan.to_json(),
        program=_texts(spec.program),
        later=tuple(
            _Later(first_step=each.first_step, plan=each.plan.to_json(), program=_texts(each.program))
            for each in spec.later
        ),
        workload=spec.costs.workload,
        workers=cluster.workers,
        intra_host=cluster.intra_host,
        inter_host=cluster.inter_host,
        slow_links=cluster.slow_links,
        costs_from=spec.costs_from,
    )
    path.parent.mkdir(exist_ok=True)
    replace_file(path, file.model_dump_json(indent=1) + "\n", mode=0o644)


def read_generation(path: Path) -> GenerationSpec:
    """Read a file that `write_generation` wrote. Raises ConfigError if it is damaged."""
    try:
        file = _File.model_validate_json(path.read_bytes())
        plan, program = _read(file)
        later = tuple(map(_later, file.later))
        cluster = Cluster(file.workers, file.intra_host, file.inter_host, file.slow_links)
        costs = CostModel(file.workload, cluster)
        _check(plan, program, costs)
        for each in later:
            _check(each.plan, each.program, costs.with_micro_batches(each.plan.micro_batches))
    except (OSError, ValidationError, ChameleonError, LookupError, ValueError, OverflowError) as error:
        why = describe_invalid(error) if isinstance(error, ValidationError) else error
        raise ConfigError(f"{path}: does not hold the plan of a generation: {why}") from None
    return GenerationSpec(
        generation=file.generation,
        first_step=file.first_step,
        plan=plan,
        program=program,
        costs=costs,
        costs_from=file.costs_from,
        later=later,
        policy="",
        action="",
    )


def read_generation_plans(folder: Path) -> dict[int, GenerationSpec]:
    """Read the plans of a run by generation, ascending; see `RunDirectory.plan_file`.

    Raises ConfigError if a file is damaged.
    """
    plans, damaged = readable_generation_plans(folder)
    if damaged:
        raise ConfigError(damaged[0])
    return plans


def readable_generation_plans(folder: Path) -> tuple[dict[int, GenerationSpec], list[str]]:
    """As `read_generation_plans`, but leave out damaged files; also return what is wrong with each."""
    plans: list[GenerationSpec] = []
    damaged: list[str] = []
    for path in folder.glob("generation-*.json"):
        try:
            plans.append(read_generation(path))
        except ConfigError as error:
            damaged.append(str(error))
    return {plan.generation: plan for plan in sorted(plans, key=lambda plan: plan.generation)}, damaged


def _check(plan: Plan, program: Program, costs: CostModel) -> None:
    """Raise ConfigError unless the parts of a file belong together."""
    workload = costs.workload
    layers, workers = plan.placement.num_layers, {worker.id for worker in costs.cluster.workers}
    if len(workload.layers) != layers or workload.micro_batches != len(plan.routes):
        raise ConfigError("its workload is not that of its plan")
    if not workers.issuperset((*plan.placement.ranges, *program.workers)):
        raise ConfigError("its cluster lacks workers of its plan")
    if len(program.records) != sum(
        len(route.hops) * 2 + sum(plan.splits(hop.worker) for hop in route.hops) for route in plan.routes
    ):
        raise ConfigError("its program does not have the operations of its plan")


class _Later(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, ser_json_inf_nan="constants")

    first_step: int
    plan: str
    program: Mapping[int, str]


class _File(_Later):
    format: Literal["chameleon-generation-1"] = "chameleon-generation-1"
    generation: int
    costs_from: CostsFrom
    later: tuple[_Later, ...] = ()
    workload: Workload
    workers: tuple[Worker, ...]
    intra_host: Link
    inter_host: Link
    slow_links: tuple[tuple[int, int, float], ...] = ()


def _texts(program: Program) -> dict[int, str]:
    return {worker: " ".join(map(str, program.of(worker))) for worker in program.workers}


def _read(file: _Later) -> tuple[Plan, Program]:
    plan = Plan.from_json(file.plan)
    return plan, Program({worker: tuple(_operations(text, plan)) for worker, text in file.program.items()})


def _later(file: _Later) -> LaterPlan:
    plan, program = _read(file)
    return LaterPlan(first_step=file.first_step, plan=plan, program=program, in_flight_limits={})


def _operations(text: str, plan: Plan) -> Iterable[Operation]:
    """Read a worker's operations from their `str`; the routes of the plan have their other fields."""
    for word in text.split():
        match = _OPERATION.fullmatch(word)
        if match is None:
            raise ConfigError(f"{word!r} is not an operation")
        kind, micro_batch, hop = match.groups()
        yield Operation.of(OperationKind(kind), plan.routes[int(micro_batch)], int(hop), plan.recompute)


def read_start_plan(config: RunConfig) -> Plan | None:
    """Read the plan that `config` names; None if it names none.

    Raises:
        ConfigError: it cannot be read, or has other micro-batches, or workers that the run lacks.
    """
    if config.plan is None:
        return None
    try:
        text = config.plan.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"plan {config.plan}: cannot be read: {error}") from None
    inner, size = _inner(text)
    try:
        plan = Plan.from_json(inner)
    except PlanError as error:
        raise ConfigError(f"plan {config.plan}: {error}") from None
    batch = config.batch
    if plan.micro_batches != batch.micro_batches or size not in (None, batch.micro_batch_size):
        of_size, own_size = ("", "") if size is None else (f" of {size}", f" of {batch.micro_batch_size}")
        raise ConfigError(
            f"plan {config.plan}: is of {plan.micro_batches} micro-batches{of_size}, and [batch] says "
            f"{batch.micro_batches}{own_size}; set batch.micro_batches and batch.micro_batch_size as the plan has them"
        )
    least, pipelines = batch.micro_batches_at(0), len(disjoint_pipelines(plan))
    if least < pipelines:
        raise ConfigError(
            f"plan {config.plan}: has {pipelines} pipelines, and batch.ramp begins with {least} micro-batches, so that "
            f"some would have none; begin with {pipelines} at least"
        )
    if (most := max(plan.workers)) >= config.workers:
        raise ConfigError(
            f"plan {config.plan}: needs worker {most}, and workers = {config.workers}, numbered from 0; "
            f"take at least {most + 1}"
        )
    return plan


def _inner(text: str) -> tuple[str, int | None]:
    """Return the plan, which may be a part of the output of `chameleon plan --json`, and the micro-batch size."""
    try:
        document = json.loads(text)
    except ValueError:
        return text, None
    if not (isinstance(document, dict) and "plan" in document):
        return text, None
    return json.dumps(document["plan"]), document.get("micro_batch_size")
