"""Directories of runs, written by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from chameleon_ft.config import Batch, Checkpoint, Parallel, Recovery, RunConfig, TrainConfig
from chameleon_ft.events.records import FailureRecord, StepRecord
from chameleon_ft.plan import Plan, data_pipeline_plan
from chameleon_ft.recovery.generation import CostsFrom, GenerationSpec
from chameleon_ft.schedule import CostModel, best_program
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.plans import write_generation
from tests.simulate.clusters import costs

PLAN = data_pipeline_plan(layer_costs=[1.0] * 6, dp=2, pp=1, micro_batches=24)
_RECORD = FailureRecord(
    worker=1,
    step=3,
    cause="SIGKILL",
    noticed_by="child",
    detect_s=0.1,
    stop_s=0.2,
    decide_s=0.3,
    regroup_s=0.4,
    stall_s=1.0,
    policy="reroute",
    action="",
    generation=2,
    resume_step=3,
)


def config(*, every: Literal["auto"] | int = 0, **recovery: Any) -> RunConfig:
    return TrainConfig(
        workers=2,
        parallel=Parallel(dp=2, pp=1),
        batch=Batch(micro_batches=24, micro_batch_size=1),
        checkpoint=Checkpoint(every=every),
        recovery=Recovery.model_validate(recovery),
    )


def started(time: float = 1000.0) -> dict[str, Any]:
    return {"time": time, "event": "started", "pipelines": [[0], [1]], "steps": 100}


def finished(time: float) -> dict[str, Any]:
    return {"time": time, "event": "finished", "status": "finished", "reason": "all steps are trained"}


def failure(time: float, **fields: Any) -> dict[str, Any]:
    return {"time": time, "event": "failure", **replace(_RECORD, **fields).values()}


def decision(generation: int, *, prepared: bool, lost: tuple[int, ...] = (1,)) -> dict[str, Any]:
    return {
        "time": 0.0,
        "event": "decision",
        "generation": generation,
        "search_s": 0.0,
        "prepared": prepared,
        "step": 3,
        "lost": list(lost),
        "live": 2 - len(lost),
        "plan": "2 pipelines of 1 stage",
        "rate": {"failures": 1, "worker_s": 0.0, "prior_failures": 1.0, "worker_mtbf_s": 1.0},
        "stall": {"repeat_s": 0.0, "detect_s": 0.0, "stop_s": 0.0, "decide_s": 0.0, "regroup_s": 0.0},
        "corrections": {"operations": 1.0, "step": 1.0, "transfer": 1.0, "slow": {}},
        "chosen": None,
        "horizon_s": 1.0,
        "candidates": [],
    }


def prepared(generation: int, *, losses: int, prepare_s: float) -> dict[str, Any]:
    return {"time": 0.0, "event": "prepared", "generation": generation, "losses": losses, "prepare_s": prepare_s}


def recorded(
    path: Path,
    events: Iterable[Mapping[str, Any]],
    *,
    steps_s: Mapping[int, Iterable[float]] | None = None,
    of: RunConfig | None = None,
    plans: Mapping[int, tuple[Plan, CostsFrom]] | None = None,
    model: CostModel | None = None,
) -> RunDirectory:
    """A run of two pipelines of one worker each, with these events and seconds of steps by generation."""
    run = RunDirectory.create(path, config() if of is None else of)
    run.plans.mkdir()
    known = costs(2) if model is None else model
    for generation, (plan, costs_from) in ({1: (PLAN, "profile")} if plans is None else plans).items():
        planned = GenerationSpec(
            generation=generation,
            first_step=0,
            plan=plan,
            program=best_program(plan, known).program,
            costs=known,
            costs_from=costs_from,
            policy="",
            action="",
        )
        write_generation(planned, run.plan_file(generation))
    run.events_file.write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    flat = [(generation, step_s) for generation, steps in (steps_s or {}).items() for step_s in steps]
    records = [_step(number, *each) for number, each in enumerate(flat)]
    run.metrics_file.write_text("".join(json.dumps(each.to_json()) + "\n" for each in records), encoding="utf-8")
    return run


def _step(step: int, generation: int, step_s: float) -> StepRecord:
    return StepRecord(
        step=step,
        loss=1.0,
        grad_norm=1.0,
        lr=1e-3,
        samples=24,
        tokens=24,
        step_s=step_s,
        workers=2,
        generation=generation,
        time=float(step),
    )
