"""Records to test with."""

from __future__ import annotations

from chameleon_ft.events.records import FailureRecord, JoinRecord, OutcomeRecord, Started, StepRecord


def step_record(step: int, *, loss: float = 2.0, step_s: float = 0.5, samples: int = 16) -> StepRecord:
    return StepRecord(
        step=step,
        loss=loss,
        grad_norm=1.0,
        lr=1e-3,
        samples=samples,
        tokens=samples * 128,
        step_s=step_s,
        workers=4,
        generation=0,
        time=1e9 + step,
    )


def failure_record(step: int, *, worker: int = 3, detect_s: float | None = 0.01) -> FailureRecord:
    return FailureRecord(
        worker=worker,
        step=step,
        cause="SIGKILL",
        noticed_by="child",
        detect_s=detect_s,
        stop_s=0.02,
        decide_s=0.003,
        regroup_s=0.1,
        stall_s=0.123 + (detect_s or 0.0),
        policy="reroute",
        action="micro-batches 2, 3 of worker 3 go to worker 1",
        generation=1,
        resume_step=step,
    )


def outcome_record(*, steps: int = 10) -> OutcomeRecord:
    return OutcomeRecord(
        generation=2,
        policy="repartition",
        steps=steps,
        predicted_step_s=0.4,
        measured_step_s=0.41,
        predicted_stall_s=0.75,
        measured_stall_s=0.9,
    )


def run_info() -> Started:
    return Started(
        model="a [small] model",
        data="some text",
        run="runs/one",
        pipelines=((0, 1), (2, 3)),
        stages=("0-3", "4-7"),
        first_step=0,
        steps=20,
        generation=0,
    )


def join_record(step: int) -> JoinRecord:
    return JoinRecord(
        workers=(3,),
        spares=(),
        stop_s=0.02,
        decide_s=0.003,
        regroup_s=0.1,
        transfer_s=0.25,
        stall_s=0.373,
        policy="repartition",
        action="2 pipelines of 4 stages",
        generation=3,
        resume_step=step,
        moved_bytes=50_000_000,
        rounds=2,
    )
