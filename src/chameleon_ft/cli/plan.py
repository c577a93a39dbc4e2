"""`chameleon plan`: what a step takes, predicted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Optional

import tyro

from chameleon_ft.cli._flags import optional_argument, parse_arguments
from chameleon_ft.cli._plan_case import Layout, PlanCase, case_of_config, case_of_preset
from chameleon_ft.cli._plan_fit import Misfit, find_misfit
from chameleon_ft.errors import ConfigError, NoHolderError
from chameleon_ft.estimate import StepEstimate, SyncTiming, cluster_bound_s, estimate_step
from chameleon_ft.observe.lanes import Lane
from chameleon_ft.plan import Plan
from chameleon_ft.recovery import reroute
from chameleon_ft.schedule import CostModel, best_program

__all__ = ["Prediction", "main"]


@dataclass(frozen=True)
class PlanArguments:
    """Predict what a step takes: its time and that of every operation, the memory of every worker, and lower bounds.

    For the run that CONFIG describes, by the profile that it names or --profile; or for a published --model on a known
    --device. Nothing is started. Exit code 1 where the plan does not fit into the memory of its workers.
    """

    config: Annotated[
        Optional[Path],  # noqa: UP045
        tyro.conf.Positional,
        optional_argument("[CONFIG]", "TOML file of a run, as for `chameleon train`."),
    ] = None
    profile: Annotated[
        Optional[Path],  # noqa: UP045
        optional_argument("PATH", "Profile of the model of CONFIG, instead of the one that it names."),
    ] = None
    model: Annotated[
        Optional[str],  # noqa: UP045
        optional_argument("NAME", "Published model, such as llama2-7b, or the path of a Hugging Face config.json."),
    ] = None
    device: Annotated[
        Optional[str],  # noqa: UP045
        optional_argument("NAME", "Device to derive costs for, such as h100-80g."),
    ] = None
    state: Annotated[str, tyro.conf.arg(help="Types of parameters, gradients and optimizer state, with --model.")] = (
        "bf16-master"
    )
    recompute: Annotated[str, tyro.conf.arg(help="What is computed twice to save memory, with --model.")] = "none"
    dp: Annotated[Optional[int], optional_argument("INT", "Pipelines.")] = None  # noqa: UP045
    pp: Annotated[Optional[int], optional_argument("INT", "Stages of a pipeline.")] = None  # noqa: UP045
    micro_batches: Annotated[
        Optional[int],  # noqa: UP045
        optional_argument(
            "INT", "Micro-batches of a step, over all pipelines; with --model 16 a pipeline if not given."
        ),
    ] = None
    micro_batch_size: Annotated[
        Optional[int],  # noqa: UP045
        optional_argument("INT", "Samples of a micro-batch."),
    ] = None
    split_backward: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        tyro.conf.arg(help="Run the halves of the backward apart, whatever CONFIG says."),
    ] = False
    workers_per_host: Annotated[int, tyro.conf.arg(help="Workers of a host; between hosts links are slower.")] = 8
    dead: Annotated[
        str, optional_argument("WORKER[,WORKER ...]", "Plan for the loss of these workers: their peers do their share.")
    ] = ""
    picture: Annotated[
        Optional[Path],  # noqa: UP045
        optional_argument("PATH", "Draw the schedule: .svg, .png or .pdf."),
    ] = None
    trace: Annotated[
        Optional[Path],  # noqa: UP045
        optional_argument("PATH", "Write the schedule as a trace for ui.perfetto.dev."),
    ] = None
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help="Print the prediction as JSON.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Everything that is said of a plan.

    Attributes:
        before: the plan before anything failed, and its estimate; the same as `plan` where nothing did.
        cluster_bound_s: seconds below which no plan of pipelines over these workers gets, whatever their depths.
    """

    case: PlanCase
    costs: CostModel
    dead: tuple[int, ...]
    before: Plan
    before_step_s: float
    plan: Plan
    estimate: StepEstimate
    cluster_bound_s: float
    misfit: Misfit | None

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        estimate = self.estimate
        return {
            "model": self.case.profile.name,
            "device": self.case.profile.fingerprint.device,
            "profile": self.case.profile.source,
            "plan": json.loads(self.plan.to_json()),
            "dead": list(self.dead),
            "step_s": estimate.step_s,
            "program_s": estimate.program_s,
            "sync_s": estimate.sync.exposed_s,
            "bound_s": estimate.bound_s,
            "gap": estimate.gap,
            "cluster_bound_s": self.cluster_bound_s,
            "bubble": estimate.bubble,
            "failure_free_step_s": self.before_step_s,
            "samples_per_s": self.costs.workload.samples / estimate.step_s,
            "peak_memory_bytes": {str(worker): memory.peak_bytes for worker, memory in estimate.memory.items()},
            "capacity_bytes": {
                str(worker): self.costs.cluster.worker(worker).memory_bytes for worker in self.plan.workers
            },
            "fits": self.misfit is None,
        }


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given = parse_arguments(PlanArguments, arguments, command="plan")
    prediction = _predict(_case(given), given.dead)
    pipelines = [tuple(hop.worker for hop in route.hops) for route in dict.fromkeys(prediction.before.routes)]
    pipelines = list(dict.fromkeys(pipelines))
    lanes = [Lane.predicted(prediction.estimate)]
    if given.picture is not None:
        from chameleon_ft.observe.picture import draw_schedule

        draw_schedule(given.picture, title=_title(prediction), plan=prediction.plan, pipelines=pipelines, lanes=lanes)
    if given.trace is not None:
        from chameleon_ft.observe.trace import write_trace

        write_trace(given.trace, plan=prediction.plan, pipelines=pipelines, lanes=lanes)
    if given.json:
        print(json.dumps(prediction.to_json()))
    else:
        from chameleon_ft.cli._plan_view import show

        show(prediction, title=_title(prediction))
    return 0 if prediction.misfit is None else 1


def _case(given: PlanArguments) -> PlanCase:
    if given.workers_per_host < 1:
        raise ConfigError(f"--workers-per-host {given.workers_per_host}: should be 1 or more")
    layout = Layout(
        dp=given.dp,
        pp=given.pp,
        micro_batches=given.micro_batches,
        micro_batch_size=given.micro_batch_size,
        split_backward=given.split_backward or None,
    )
    if given.config is not None:
        if given.model is not None:
            raise ConfigError(f"--model {given.model}: {given.config} says what is trained; leave one of them out")
        return case_of_config(
            given.config,
            layout,
            profile=given.profile,
            device_name=given.device,
            workers_per_host=given.workers_per_host,
        )
    if given.model is None:
        raise ConfigError("nothing to plan for: give a CONFIG, or a published --model and its --device")
    if given.profile is not None:
        raise ConfigError(f"--profile {given.profile}: is for a CONFIG; costs of --model are derived from --device")
    return case_of_preset(
        given.model,
        layout,
        device_name=given.device,
        state=given.state,
        recompute=given.recompute,
        workers_per_host=given.workers_per_host,
    )


def _predict(case: PlanCase, dead_text: str) -> Prediction:
    costs, before = case.costs, case.layout()
    dead = _dead_workers(dead_text, before)
    if len(dead) == len(before.workers):
        raise ConfigError(f"--dead {dead_text}: leaves no worker")
    plan = before
    if dead:
        try:
            plan = reroute(before, dead, costs, ceiling=case.ceiling)
        except NoHolderError as error:
            raise ConfigError(
                f"--dead {dead_text}: {error}; a run goes back to its newest checkpoint then, in the largest layout "
                "that is left: plan that one by --dp and --pp"
            ) from None
    estimate = _estimate(plan, case, costs)
    live = CostModel(costs.workload, costs.cluster.without(dead))
    return Prediction(
        case=case,
        costs=costs,
        dead=dead,
        before=before,
        before_step_s=_estimate(before, case, costs).step_s if dead else estimate.step_s,
        plan=plan,
        estimate=estimate,
        cluster_bound_s=cluster_bound_s(live, split_backward=plan.split_backward),
        misfit=find_misfit(estimate, case, costs),
    )


def _estimate(plan: Plan, case: PlanCase, costs: CostModel) -> StepEstimate:
    program = best_program(plan, costs, ceiling=case.ceiling).program
    return estimate_step(plan, program, costs, timing=SyncTiming.AFTER_PROGRAM)


def _dead_workers(text: str, plan: Plan) -> tuple[int, ...]:
    dead = []
    for part in filter(None, text.split(",")):
        if not part.strip().isdecimal():
            raise ConfigError(f"--dead {text}: should be numbers of workers with commas between them, such as 5,9")
        worker = int(part)
        if worker not in plan.workers:
            raise ConfigError(f"--dead {text}: there is no worker {worker}; they are numbered 0 to {max(plan.workers)}")
        dead.append(worker)
    return tuple(sorted(set(dead)))


def _title(prediction: Prediction) -> str:
    parallel, batch = prediction.case.config.parallel, prediction.case.config.batch
    profile = prediction.case.profile
    lost = f", without worker{'s' if len(prediction.dead) > 1 else ''} {', '.join(map(str, prediction.dead))}"
    return (
        f"{profile.name} on {profile.fingerprint.device} ({profile.source}), {parallel.dp} x {parallel.pp} workers, "
        f"{batch.micro_batches} micro-batches of {batch.micro_batch_size}{lost if prediction.dead else ''}"
    )
