"""`chameleon simulate`: what each policy makes of months of failures."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal, Optional

import tyro

from chameleon_ft.cli._flags import Switch, optional_argument, parse_arguments
from chameleon_ft.cli._presets import NO_PRESET, Preset, WorkersPerHost, hosts_of, profile_of
from chameleon_ft.cli._simulate_case import (
    TraceChoice,
    assumed,
    chosen_policies,
    chosen_sweep,
    names_only_failing,
    trace_of,
)
from chameleon_ft.cli._simulate_run import RunCase, run_case
from chameleon_ft.cli._written import require_places, tell_written
from chameleon_ft.errors import ConfigError, PlanError
from chameleon_ft.observe.picture import require_picture
from chameleon_ft.plan import Plan
from chameleon_ft.quantities import duration
from chameleon_ft.simulate import save_trace, trace_statistics
from chameleon_ft.simulate.accounting.results import Results
from chameleon_ft.simulate.parameters import Parameters
from chameleon_ft.simulate.run import simulate
from chameleon_ft.simulate.sweep import Scene, sweep

__all__ = ["main"]

_NOTHING = "nothing to simulate: give a published --model and its --device, or a --profile"
_PER_WORKER = 4  # micro-batches of a step, by default
_BESIDE_A_RUN = ("run", "preset", "policies", "assume", "picture", "save_trace", "json")


@dataclass(frozen=True)
class SimulateArguments:
    """Let policies live through months of failures: what each trains, and where the time goes.

    For a published --model on a known --device or a --profile, on a cluster of --workers, over a failure --trace or one
    that is drawn by --generate. Nothing is started. The same arguments give the same results. With --sweep, at several
    failure rates, cluster sizes, memories, bandwidths or batches. With --run, through what happened in a run that was
    made.
    """

    workers: Annotated[
        Optional[int],  # noqa: UP045
        optional_argument("INT", "Workers of the cluster: whole hosts."),
    ] = None
    run: Annotated[
        Optional[Path],  # noqa: UP045
        optional_argument(
            "PATH", "Directory of a run, for what was trained, on whom, from which plan, and its losses."
        ),
    ] = None
    preset: Preset = NO_PRESET
    profile: Annotated[
        Optional[Path],  # noqa: UP045
        optional_argument("PATH", "Measured profile, in place of --model and --device."),
    ] = None
    trace: Annotated[
        Optional[Path],  # noqa: UP045
        optional_argument("PATH", "Failure trace, in any of the formats of docs/traces.md."),
    ] = None
    nodes: Annotated[
        Optional[int],  # noqa: UP045
        optional_argument("INT", "Nodes that --trace was measured on, where it names only those that failed."),
    ] = None
    generate: Annotated[
        Optional[Literal["bursts", "poisson", "weibull", "spot"]],  # noqa: UP045
        optional_argument("{bursts,poisson,weibull,spot}", "Draw a trace from this model, fitted to measured ones."),
    ] = None
    days: Annotated[
        Optional[float],  # noqa: UP045
        optional_argument("FLOAT", "Days to simulate: 365 of a trace that is drawn, by default all of another."),
    ] = None
    seed: Annotated[int, tyro.conf.arg(help="Of what is drawn.")] = 0
    rate: Annotated[float, tyro.conf.arg(help="Failures come so many times as often; repairs are as much quicker.")] = (
        1.0
    )
    keep_repairs: Annotated[
        Switch, optional_argument("", "Repairs take as long at every --rate, so that more workers are down.")
    ] = False
    policies: Annotated[
        str, optional_argument("NAME[,NAME ...]", "Policies to set side by side, or all. (default: all)")
    ] = "all"
    micro_batches: Annotated[
        Optional[int],  # noqa: UP045
        optional_argument("INT", "Micro-batches of a step, over all pipelines; 4 for each worker if not given."),
    ] = None
    workers_per_host: WorkersPerHost = 8
    assume: Annotated[
        str,
        optional_argument(
            "NAME=NUMBER[,...]", "Costs of failures in place of those in docs/simulator-internals.md: restart_s=600."
        ),
    ] = ""
    sweep: Annotated[
        Optional[str],  # noqa: UP045
        optional_argument(
            "NAME=VALUE,VALUE,...",
            "Vary one thing: rate (of failures), workers, memory (10^9 bytes of a worker), bandwidth (factor), "
            "micro-batches.",
        ),
    ] = None
    picture: Annotated[
        Optional[Path],  # noqa: UP045
        optional_argument("PATH", "Draw throughput over time and what is missing, or the sweep: .svg, .png or .pdf."),
    ] = None
    save_trace: Annotated[
        Optional[Path],  # noqa: UP045
        optional_argument("PATH", "Write the trace that is simulated, as JSON lines."),
    ] = None
    json: Annotated[Switch, optional_argument("", "Print the results as JSON.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """What is simulated, and how it is called."""

    scene: Scene
    title: str
    parameters: Parameters
    facts: dict[str, object]
    note: str | None = None
    start: Plan | None = None
    as_in_run: bool = False


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given = parse_arguments(SimulateArguments, arguments, command="simulate")
    policies, parameters = chosen_policies(given.policies), assumed(given.assume)
    swept = None if given.sweep is None else chosen_sweep(given.sweep)
    case = _drawn(given, parameters) if given.run is None else _of_run(given, given.run)
    if given.picture is not None:
        require_picture(given.picture)
    require_places(picture=given.picture, trace=given.save_trace)
    from chameleon_ft.cli._waiting import compile_kernels

    compile_kernels()
    if given.save_trace is not None:
        save_trace(case.scene.trace, given.save_trace)
    if swept is None:
        _simulate(given, case, policies)
    else:
        _sweep(given, case, policies, *swept)
    tell_written(json=given.json, picture=given.picture, trace=given.save_trace)
    return 0


def _simulate(given: SimulateArguments, case: _Case, policies: Sequence[str]) -> None:
    from chameleon_ft.cli._simulate_progress import Progress

    scene = case.scene
    with Progress(policies) as progress:
        results = simulate(
            scene.trace,
            scene.workload,
            scene.cluster,
            policies,
            parameters=case.parameters,
            start=case.start,
            as_in_run=case.as_in_run,
            progress=progress.of_policy,
        )
    if given.picture is not None:
        from chameleon_ft.simulate.pictures import draw_results

        draw_results(given.picture, title=case.title, results=results, trace=scene.trace)
    warning = _no_failure_warning(results, of_run=given.run is not None)
    if given.json:
        print(json.dumps({**case.facts, **results.to_json()}))
        if warning is not None:
            print(f"chameleon simulate: {warning}", file=sys.stderr)
    else:
        from chameleon_ft.cli._simulate_view import show_results

        show_results(case.title, results, scene.trace, note=case.note, warning=warning)


def _no_failure_warning(results: Results, *, of_run: bool) -> str | None:
    """The warning that a ranking compares no reaction to failures, and what to simulate instead."""
    if results.lost_events:
        return None
    simulated = "in the run" if of_run else f"in the {results.duration_s / 86_400:,.1f} days that are simulated"
    instead = "give a run that lost one" if of_run else "give more --days, a higher --rate or a --trace with failures"
    return (
        f"warning: no worker is lost {simulated}, so the ranking says nothing about how policies handle failures; "
        f"{instead}"
    )


def _sweep(given: SimulateArguments, case: _Case, policies: Sequence[str], name: str, values: Sequence[float]) -> None:
    from chameleon_ft.cli._simulate_progress import Progress

    with Progress(policies, name, values) as progress:
        found = sweep(case.scene, name, values, policies, parameters=case.parameters, progress=progress.of_value)
    if not found.policies:
        raise PlanError(f"--sweep {given.sweep}: at no value can anything be trained: {found.points[-1].misfit}")
    if given.picture is not None:
        from chameleon_ft.simulate.pictures import draw_sweep

        draw_sweep(given.picture, title=case.title, sweep=found)
    if given.json:
        print(json.dumps({**case.facts, **found.to_json()}))
    else:
        from chameleon_ft.cli._simulate_view import show_sweep

        show_sweep(case.title, found, case.scene.trace)


def _of_run(given: SimulateArguments, path: Path) -> _Case:
    given.preset.refuse(f"the run {path} says what is simulated; leave out one of --run and this")
    for each in fields(given):
        if each.name not in _BESIDE_A_RUN and getattr(given, each.name) != each.default:
            flag = f"--{each.name.replace('_', '-')}"
            raise ConfigError(f"{flag}: the run {path} says what is simulated; leave out one of --run and {flag}")
    found = run_case(path)
    workload, policy = found.scene.workload, found.policy
    parameters = assumed(given.assume, found.parameters)
    return _Case(
        scene=found.scene,
        title=(
            f"the run {path}, {len(found.scene.cluster.workers):,} workers, {workload.samples:,} samples a step, "
            f"{found.scene.trace.duration_s:,.0f} s; {policy} trained {found.samples_per_s:.4g} samples/s in it"
        ),
        parameters=parameters,
        facts={
            "run": str(path),
            "run_policy": policy,
            "run_samples_per_s": found.samples_per_s,
            "run_timed_checkpoints": found.timed_checkpoints,
            "checkpoint_write_s": parameters.checkpoint_write_s,
        },
        note=_describe_checkpoints(found, parameters),
        start=found.start,
        as_in_run=True,
    )


def _describe_checkpoints(found: RunCase, parameters: Parameters) -> str:
    stops = f"stops training for {duration(parameters.checkpoint_write_s)}"
    if parameters.checkpoint_write_s != found.parameters.checkpoint_write_s:
        return f"a checkpoint {stops}, as was said"
    if found.timed_checkpoints:
        return f"a checkpoint {stops}, the median of {found.timed_checkpoints:,} in the run"
    return f"a checkpoint {stops}: assumed, for the run timed none; --assume checkpoint_write_s=SECONDS changes it"


def _drawn(given: SimulateArguments, parameters: Parameters) -> _Case:
    scene = _scene(given)
    return _Case(scene=scene, title=_title(given, scene), parameters=parameters, facts=_facts(given, scene))


def _scene(given: SimulateArguments) -> Scene:
    per_host, workers = given.workers_per_host, given.workers
    if workers is None:
        raise ConfigError("the number of workers is missing: give --workers, or a recorded run by --run")
    hosts = hosts_of(workers, per_host)
    if workers < 1 or workers % per_host:
        raise ConfigError(
            f"--workers {workers}: should be 1 or more times the {per_host} workers of a host; "
            "change one of --workers and --workers-per-host"
        )
    profile = profile_of(given.preset, given.profile, missing=_NOTHING)
    chosen = TraceChoice(
        path=given.trace,
        generate=given.generate,
        nodes=given.nodes,
        days=given.days,
        seed=given.seed,
        rate=given.rate,
        keep_repairs=given.keep_repairs,
    )
    trace = trace_of(chosen, hosts=workers // per_host, workers_per_host=per_host)
    micro_batches = _PER_WORKER * workers if given.micro_batches is None else given.micro_batches
    if micro_batches < 1:
        raise ConfigError(f"--micro-batches {micro_batches}: should be 1 or more")
    return Scene(trace, profile.workload(micro_batches), profile.cluster(hosts))


def _title(given: SimulateArguments, scene: Scene) -> str:
    trace = scene.trace.name or "a trace"
    if given.trace is not None and given.nodes is None and names_only_failing(given.trace):
        trace += f", taken as measured on {scene.trace.hosts:,} nodes"
    preset = given.preset
    trained = f"{preset.model} on {preset.device}" if given.profile is None else f"the profile {given.profile.name}"
    rate = "" if given.rate == 1 else f", {given.rate:g} times the failures"
    return (
        f"{trained}, {scene.trace.workers:,} workers, {scene.workload.samples:,} samples a step, "
        f"{scene.trace.duration_s / 86_400:,.1f} days of {trace}{rate}"
    )


def _facts(given: SimulateArguments, scene: Scene) -> dict[str, object]:
    figures = trace_statistics(scene.trace)
    return {
        "model": given.preset.model,
        "device": given.preset.device,
        "profile": None if given.profile is None else str(given.profile),
        "micro_batches": scene.workload.micro_batches,
        "faults": figures.faults,
        "faults_per_1000_host_days": figures.faults_per_1000_host_days,
        "availability": figures.availability,
    }
