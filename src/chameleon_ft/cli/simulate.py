"""`chameleon simulate`: what each policy makes of months of failures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
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
from chameleon_ft.errors import ConfigError, PlanError
from chameleon_ft.observe.picture_file import require_picture
from chameleon_ft.simulate import save_trace, trace_statistics
from chameleon_ft.simulate.parameters import Parameters
from chameleon_ft.simulate.run import simulate
from chameleon_ft.simulate.sweep import Scene, sweep

__all__ = ["main"]

_NOTHING = "nothing to simulate: give a published --model and its --device, or a --profile"
_PER_WORKER = 4  # micro-batches of a step, by default


@dataclass(frozen=True)
class SimulateArguments:
    """Let policies live through months of failures: what each trains, and where the time goes.

    For a published --model on a known --device or a --profile, on a cluster of --workers, over a failure --trace or one
    that is drawn by --generate. Nothing is started. The same arguments give the same results. With --sweep, at several
    failure rates, cluster sizes, memories, bandwidths or batches.
    """

    workers: Annotated[int, tyro.conf.arg(help="Workers of the cluster: whole hosts.")]
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
            "NAME=NUMBER[,...]", "Costs of failures other than those of docs/simulate.md, such as restart_s=600."
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


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given = parse_arguments(SimulateArguments, arguments, command="simulate")
    policies, parameters = chosen_policies(given.policies), assumed(given.assume)
    swept = None if given.sweep is None else chosen_sweep(given.sweep)
    scene = _scene(given)
    if given.picture is not None:
        require_picture(given.picture)
    if given.save_trace is not None:
        save_trace(scene.trace, given.save_trace)
    if swept is None:
        _simulate(given, scene, policies, parameters)
    else:
        _sweep(given, scene, policies, parameters, *swept)
    return 0


def _simulate(given: SimulateArguments, scene: Scene, policies: Sequence[str], parameters: Parameters) -> None:
    from chameleon_ft.cli._simulate_progress import Progress

    with Progress(policies) as progress:
        results = simulate(
            scene.trace,
            scene.workload,
            scene.cluster,
            policies,
            parameters=parameters,
            progress=progress.of_policy,
        )
    if given.picture is not None:
        from chameleon_ft.simulate.picture import draw_results

        draw_results(given.picture, title=_title(given, scene), results=results, trace=scene.trace)
    if given.json:
        print(json.dumps({**_case(given, scene), **results.to_json()}))
    else:
        from chameleon_ft.cli._simulate_view import show_results

        show_results(_title(given, scene), results, scene.trace)


def _sweep(
    given: SimulateArguments,
    scene: Scene,
    policies: Sequence[str],
    parameters: Parameters,
    name: str,
    values: Sequence[float],
) -> None:
    from chameleon_ft.cli._simulate_progress import Progress

    with Progress(policies, name, values) as progress:
        found = sweep(scene, name, values, policies, parameters=parameters, progress=progress.of_value)
    if not found.policies:
        raise PlanError(f"--sweep {given.sweep}: at no value can anything be trained: {found.points[-1].misfit}")
    if given.picture is not None:
        from chameleon_ft.simulate.picture import draw_sweep

        draw_sweep(given.picture, title=_title(given, scene), sweep=found)
    if given.json:
        print(json.dumps({**_case(given, scene), **found.to_json()}))
    else:
        from chameleon_ft.cli._simulate_view import show_sweep

        show_sweep(_title(given, scene), found, scene.trace)


def _scene(given: SimulateArguments) -> Scene:
    per_host = given.workers_per_host
    hosts = hosts_of(given.workers, per_host)
    if given.workers < 1 or given.workers % per_host:
        raise ConfigError(
            f"--workers {given.workers}: should be a multiple of the {per_host} workers of a host; "
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
    trace = trace_of(chosen, hosts=given.workers // per_host, workers_per_host=per_host)
    micro_batches = _PER_WORKER * given.workers if given.micro_batches is None else given.micro_batches
    return Scene(trace, profile.workload(micro_batches), profile.cluster(hosts))


def _title(given: SimulateArguments, scene: Scene) -> str:
    trace = scene.trace.name or "a trace"
    if given.trace is not None and given.nodes is None and names_only_failing(given.trace):
        trace += f", taken as measured on {scene.trace.hosts:,} nodes"
    preset = given.preset
    trained = f"{preset.model} on {preset.device}" if given.profile is None else f"the profile {given.profile.name}"
    rate = "" if given.rate == 1 else f", {given.rate:g} times the failures"
    return (
        f"{trained}, {given.workers:,} workers, {scene.workload.samples:,} samples a step, "
        f"{scene.trace.duration_s / 86_400:,.1f} days of {trace}{rate}"
    )


def _case(given: SimulateArguments, scene: Scene) -> dict[str, object]:
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
