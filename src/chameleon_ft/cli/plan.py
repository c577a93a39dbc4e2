"""`chameleon plan`: what a step takes, predicted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, Optional

import tyro

from chameleon_ft.cli._flags import Switch, optional_argument, parse_arguments, with_new_flags
from chameleon_ft.cli._plan_case import Layout, PlanCase, case_of_config, case_of_profile
from chameleon_ft.cli._plan_sizes import layouts_by_size
from chameleon_ft.cli._prediction import predict_layouts, predict_searched
from chameleon_ft.cli._presets import NO_PRESET, Preset, WorkersPerHost, profile_of
from chameleon_ft.cli._written import require_places, tell_written
from chameleon_ft.errors import ConfigError
from chameleon_ft.observe.lanes import Lane
from chameleon_ft.observe.picture import require_picture

__all__ = ["main"]

_NOTHING = "nothing to plan for: give a CONFIG, or a published --model and its --device, or a --profile"


@dataclass(frozen=True)
class PlanArguments:
    """Predict what a step takes: its time and that of every operation, the memory of every worker, and lower bounds.

    For the run that CONFIG describes, by the profile that it names or --profile; without one, its layers are measured
    on this machine, once, for some seconds. Or without CONFIG for a layout of a published --model on a known --device,
    or of a --profile. Exit code 1 where the plan does not fit into the memory of its workers.
    """

    config: Annotated[
        Optional[Path],  # noqa: UP045
        tyro.conf.Positional,
        optional_argument(
            "[CONFIG]", "TOML file of a run, as for `chameleon train`; or a job, as for `chameleon run`."
        ),
    ] = None
    profile: Annotated[
        tyro.conf.UseAppendAction[tuple[Path, ...]],
        optional_argument(
            "PATH",
            "Profile of the model of CONFIG; or without it, in place of --model and --device. Given once for each of "
            "several micro-batch sizes, the best of these is chosen.",
        ),
    ] = ()
    preset: Preset = NO_PRESET
    dp: Annotated[Optional[int], optional_argument("INT", "Pipelines.")] = None  # noqa: UP045
    pp: Annotated[Optional[int], optional_argument("INT", "Stages of a pipeline.")] = None  # noqa: UP045
    micro_batches: Annotated[
        Optional[int],  # noqa: UP045
        optional_argument(
            "INT", "Micro-batches of a step, over all pipelines; 16 for each of --dp without CONFIG if not given."
        ),
    ] = None
    global_batch_size: Annotated[
        Optional[int],  # noqa: UP045
        optional_argument("INT", "Samples of a step, in place of --micro-batches, which differ by micro-batch size."),
    ] = None
    split_backward: Annotated[
        Switch, optional_argument("", "Run the halves of the backward apart, whatever CONFIG says.")
    ] = False
    workers_per_host: WorkersPerHost = 8
    workers: Annotated[
        Optional[int],  # noqa: UP045
        optional_argument("INT", "Workers to search the best plan of, whatever its pipelines; not with --dp and --pp."),
    ] = None
    planner: Annotated[
        Optional[Literal["layout", "chameleon", "paper", "oobleck"]],  # noqa: UP045
        optional_argument(
            "{layout,chameleon,paper,oobleck}",
            "layout: equal pipelines, detours round failed workers, as with --policy reroute; chameleon: the best plan "
            "that a search finds, detours included; paper, oobleck: what the published planners choose, to compare "
            "with. By default the layout where there is one.",
        ),
    ] = None
    slow: Annotated[
        str, optional_argument("WORKER=SPEED[,...]", "Speed of workers that are slower or faster than 1.")
    ] = ""
    failed: Annotated[str, optional_argument("WORKER[,WORKER ...]", "Plan for the loss of these workers.")] = ""
    picture: Annotated[
        Optional[Path],  # noqa: UP045
        optional_argument("PATH", "Draw the schedule: .svg, .png or .pdf."),
    ] = None
    trace: Annotated[
        Optional[Path],  # noqa: UP045
        optional_argument("PATH", "Write the schedule as a trace for ui.perfetto.dev."),
    ] = None
    json: Annotated[Switch, optional_argument("", "Print the prediction as JSON.")] = False


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given = parse_arguments(
        PlanArguments, with_new_flags(arguments, {"--dead": "--failed"}, command="plan"), command="plan"
    )
    if given.picture is not None:
        require_picture(given.picture)
    require_places(picture=given.picture, trace=given.trace)
    cases = _cases(given)
    dead = _failed_workers(given.failed, cases[0])
    planner = _planner(given, cases)
    from chameleon_ft.cli._waiting import compile_kernels, waiting

    compile_kernels()
    with waiting("planning"):
        searched = planner != "layout"
        prediction = predict_searched(cases, dead, planner=planner) if searched else predict_layouts(cases, dead)
    lanes = [Lane.predicted(prediction.estimate)]
    if given.picture is not None:
        from chameleon_ft.observe.schedule_picture import draw_schedule

        draw_schedule(
            given.picture,
            title=prediction.title,
            plan=prediction.plan,
            pipelines=prediction.pipelines,
            lanes=lanes,
            lost=prediction.dead,
        )
    if given.trace is not None:
        from chameleon_ft.observe.trace import write_trace

        write_trace(given.trace, plan=prediction.plan, pipelines=prediction.pipelines, lanes=lanes)
    if given.json:
        print(json.dumps(prediction.to_json()))
    else:
        from chameleon_ft.cli._plan_view import show

        show(prediction)
    tell_written(json=given.json, picture=given.picture, trace=given.trace)
    return 0 if prediction.misfit is None else 1


def _cases(given: PlanArguments) -> list[PlanCase]:
    """The cases to predict, one for each micro-batch size to choose from."""
    sized = layouts_by_size(_layout(given), given.preset, given.profile, given.config, given.global_batch_size)
    return [_case(given, *each) for each in sized]


def _case(given: PlanArguments, layout: Layout, profile_file: Path | None) -> PlanCase:
    speeds = _speeds(given.slow)
    if given.config is not None:
        given.preset.refuse(
            f"{given.config} says what is trained; leave one of them out", but=("device", "micro_batch_size")
        )
        case = case_of_config(
            given.config,
            layout,
            profile=profile_file,
            device_name=given.preset.device,
            workers_per_host=given.workers_per_host,
            speeds=speeds,
        )
    else:
        preset = given.preset
        if preset.micro_batch_size is not None and profile_file is None:
            preset = replace(preset, micro_batch_size=str(layout.micro_batch_size))
        profile = profile_of(preset, profile_file, missing=_NOTHING)
        case = case_of_profile(profile, layout, workers_per_host=given.workers_per_host, speeds=speeds)
    for worker in speeds:
        _require_worker(worker, case, f"--slow {given.slow}")
    return case


def _layout(given: PlanArguments) -> Layout:
    for name in ("workers", "dp", "pp", "micro_batches", "global_batch_size"):
        if (value := getattr(given, name)) is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: should be 1 or more")
    if given.workers is not None and (given.dp is not None or given.pp is not None):
        raise ConfigError(f"--workers {given.workers}: searches for a layout, and --dp and --pp give one; choose")
    return Layout(
        workers=given.workers,
        dp=given.dp,
        pp=given.pp,
        micro_batches=given.micro_batches,
        split_backward=given.split_backward or None,
    )


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


def _failed_workers(text: str, case: PlanCase) -> tuple[int, ...]:
    dead = set()
    for part in filter(None, text.split(",")):
        if not part.strip().isdecimal():
            raise ConfigError(f"--failed {text}: should be numbers of workers with commas between them, such as 5,9")
        _require_worker(int(part), case, f"--failed {text}")
        dead.add(int(part))
    if len(dead) == len(case.hosts):
        raise ConfigError(f"--failed {text}: leaves no worker")
    return tuple(sorted(dead))


def _speeds(text: str) -> dict[int, float]:
    speeds: dict[int, float] = {}
    for part in filter(None, text.split(",")):
        worker, _, speed = part.partition("=")
        try:
            number, value = int(worker), float(speed)
        except ValueError:
            raise ConfigError(f"--slow {text}: should be WORKER=SPEED, such as 7=0.6, with commas between") from None
        if number in speeds:
            raise ConfigError(f"--slow {text}: names worker {number} twice; give it one speed")
        speeds[number] = value
    return speeds


def _require_worker(worker: int, case: PlanCase, where: str) -> None:
    if worker not in case.hosts:
        raise ConfigError(f"{where}: there is no worker {worker}; they are numbered 0 to {len(case.hosts) - 1}")
