"""The arguments of `chameleon simulate`, and the case they describe: a trace, a cluster, and the costs of failures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final, Literal, get_type_hints

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass as pydantic_dataclass
from typing_extensions import Doc

from chameleon_ft.config import Parallel
from chameleon_ft.cost.snapshots import MIN_SNAPSHOT_COST, expected_snapshot_s
from chameleon_ft.errors import ConfigError
from chameleon_ft.plan import Plan
from chameleon_ft.quantities import duration
from chameleon_ft.session.costs import (
    NO_MODEL,
    USUAL_HOSTS,
    HostRequest,
    ModelRequest,
    given_flags,
    hosts_of,
    profile_of,
)
from chameleon_ft.simulate import MODELS, Trace, generate_trace, load_trace, load_trace_for, trace_statistics
from chameleon_ft.simulate.parameters import Parameters
from chameleon_ft.simulate.recorded import (
    measured_parameters,
    recorded_changes,
    recorded_copies_s,
    recorded_run,
    trace_of_changes,
)
from chameleon_ft.simulate.run import MAX_VARIED, SIMULATED_POLICIES, SWEPT, Scene
from chameleon_ft.storage.files import RunDirectory

_DAY_S: Final = 86_400.0
_YEAR_DAYS: Final = 365.0
_USUAL_MICRO_BATCHES_PER_WORKER: Final = 4
_WITH_RUN: Final = ("--run", "--policies", "--assume", "--picture", "--save-trace", "--json")
"""Flags that may be given with --run."""


@pydantic_dataclass(frozen=True)
class SimulateRequest:
    """A cluster and its failures to simulate, over a trace, a drawn one, or those of a recorded run."""

    workers: PositiveInt | None = None
    """Workers in the cluster; a multiple of --workers-per-host."""
    run: Path | None = None
    """Directory of a recorded run that gives the workload, the cluster, the first plan and the losses."""
    preset: ModelRequest = NO_MODEL
    profile: Path | None = None
    """Measured profile, instead of --model and --device."""
    trace: Path | None = None
    """Failure trace, in any of the formats of docs/traces.md."""
    nodes: int | None = None
    """Number of nodes that --trace was measured on, if it names only the failed ones."""
    generate: Literal["bursts", "poisson", "weibull", "spot"] | None = None
    """Draw a trace from this model, fitted to measured traces."""
    days: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Days to simulate; by default 365 for a drawn trace, and the whole length of any other."""
    seed: int = 0
    """Seed of everything drawn."""
    rate: Annotated[float, Field(ge=1 / MAX_VARIED, le=MAX_VARIED)] = 1.0
    """Factor on the failure rate; repairs are faster by the same factor."""
    keep_repairs: bool = False
    """Keep repair times the same at every --rate, so that higher rates leave more workers down."""
    policies: Annotated[
        str, "NAME[,NAME ...]", Doc(f"Policies to compare: {', '.join(SIMULATED_POLICIES)}; all of them by default.")
    ] = "all"
    micro_batches: PositiveInt | None = None
    """Micro-batches per step, over all pipelines; 4 per worker if not given."""
    hosts: HostRequest = USUAL_HOSTS
    assume: Annotated[str, "NAME=NUMBER[,...]"] = ""
    """Costs of failures that override those in docs/simulator-internals.md, such as restart_cost_s=600."""
    sweep: Annotated[str | None, "NAME=VALUE,VALUE,..."] = None
    """Vary one input: rate (of failures), workers, memory (10^9 bytes a worker), bandwidth (factor), micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateCase:
    """A case to simulate.

    Attributes:
        title: one line that names the case.
        facts: values that the JSON output adds to the results.
        note: one line about assumptions; None if there are none.
        start: initial plan; None lets each policy choose its own.
        as_in_run: The simulation repeats a recorded run.
    """

    scene: Scene
    title: str
    parameters: Parameters
    facts: dict[str, object]
    note: str | None = None
    start: Plan | None = None
    as_in_run: bool = False


def simulate_case(given: SimulateRequest) -> SimulateCase:
    """Return the case that the arguments describe. Raises ConfigError if they do not fit together."""
    if given.run is not None:
        return _recorded_case(given, given.run)
    per_host, workers = given.hosts.workers_per_host, given.workers
    if workers is None:
        raise ConfigError("the number of workers is missing: give --workers, or a recorded run by --run")
    hosts = hosts_of(workers, per_host)
    if workers % per_host:
        raise ConfigError(
            f"--workers {workers}: should be a multiple of the {per_host} workers of a host; "
            "change --workers or --workers-per-host"
        )
    preset = given.preset
    missing = "nothing to simulate: give a published --model and its --device, or a --profile"
    profile = profile_of(preset, given.profile, missing=missing)
    trace = _trace(given, hosts=workers // per_host)
    micro_batches = _USUAL_MICRO_BATCHES_PER_WORKER * workers if given.micro_batches is None else given.micro_batches
    owners = given.hosts.owners(Parallel().owners)
    workload, cluster = replace(profile.workload(micro_batches), owners=owners), profile.cluster(hosts)
    scene = Scene(trace, workload, cluster)
    host_bytes = given.hosts.memory_bytes
    # As runs decide by default.
    as_in_runs = Parameters(
        snapshot_every=None,
        snapshot_cost_s=MIN_SNAPSHOT_COST * expected_snapshot_s(workload, cluster),
        host_memory_bytes=math.inf if host_bytes is None else host_bytes,
    )
    model = f"{preset.model} on {preset.device}" if given.profile is None else f"the profile {given.profile.name}"
    name = trace.name or "a trace"
    if given.trace is not None and given.nodes is None and _names_only_failing(given.trace):
        name += f", assumed to be measured on {trace.hosts:,} nodes"
    if given.rate != 1:
        name += f", {given.rate:g} times the failures"
    figures = trace_statistics(trace)
    return SimulateCase(
        scene=scene,
        title=(
            f"{model}, {trace.workers:,} workers, {scene.workload.samples:,} samples a step, "
            f"{trace.duration_s / _DAY_S:,.1f} days of {name}"
        ),
        parameters=_assume(given.assume, as_in_runs),
        facts={
            "model": preset.model,
            "device": preset.device,
            "profile": None if given.profile is None else str(given.profile),
            "micro_batches": scene.workload.micro_batches,
            "optimizer_redundancy": "all" if owners is None else owners,
            "faults": figures.faults,
            "faults_per_1000_host_days": figures.faults_per_1000_host_days,
            "availability": figures.availability,
        },
    )


def _recorded_case(given: SimulateRequest, path: Path) -> SimulateCase:
    """Return the case of a recorded run. Raises ConfigError if there is no run or its records are insufficient."""
    for flag, _ in given_flags(given):
        if flag not in _WITH_RUN:
            raise ConfigError(f"{flag}: the run {path} determines what is simulated; leave out either --run or {flag}")
    run = RunDirectory.open(path)
    recorded = recorded_run(run, measured_parameters([run]))
    changes, duration_s = recorded_changes(run)
    samples = sum({step.step: step.samples for step in run.steps()}.values())
    timed_checkpoints = len(recorded_copies_s(run))
    if not samples:
        raise ConfigError(f"--run {path}: no step was committed; give a run that has trained")
    costs, workers = recorded.costs, len(recorded.costs.cluster.workers)
    trace = trace_of_changes(changes, workers=workers, duration_s=duration_s, name=f"the run {path.name}")
    parameters = _assume(given.assume, recorded.parameters)
    note = f"a checkpoint stops training for {duration(parameters.checkpoint_write_s)}"
    if parameters.checkpoint_write_s != recorded.parameters.checkpoint_write_s:
        note += ", as given by --assume"
    elif timed_checkpoints:
        note += f", the median of {timed_checkpoints:,} in the run"
    else:
        note += ": assumed, because the run timed none; --assume checkpoint_write_s=SECONDS changes it"
    return SimulateCase(
        scene=Scene(trace, costs.workload, costs.cluster),
        title=(
            f"the run {path}, {workers:,} workers, {costs.workload.samples:,} samples a step, {duration_s:,.0f} s; "
            f"it trained {samples / duration_s:.4g} samples/s under {recorded.policy}"
        ),
        parameters=parameters,
        facts={
            "run": str(path),
            "run_policy": recorded.policy,
            "run_samples_per_s": samples / duration_s,
            "run_timed_checkpoints": timed_checkpoints,
            "checkpoint_write_s": parameters.checkpoint_write_s,
        },
        note=note,
        start=recorded.start,
        as_in_run=True,
    )


def _trace(given: SimulateRequest, *, hosts: int) -> Trace:
    """Return the trace for a cluster, at the given rate and of the given length. Raises ConfigError."""
    per_host = given.hosts.workers_per_host
    if given.trace is not None:
        if given.generate is not None:
            raise ConfigError(f"--generate {given.generate}: --trace {given.trace} is given too; leave one of them out")
        if given.nodes is None and _names_only_failing(given.trace):
            named = load_trace(given.trace).hosts
            if hosts < named:
                raise ConfigError(
                    f"--trace {given.trace}: names only nodes that failed, {named} of them, and the cluster has only "
                    f"{hosts} hosts; give the number of measured nodes with --nodes, to determine the failure rate"
                )
        trace = load_trace_for(given.trace, hosts=hosts, workers_per_host=per_host, nodes=given.nodes)
        trace = _at_rate(trace, given)
        return trace if given.days is None else trace.limited(given.days * _DAY_S)
    if given.generate is None:
        raise ConfigError(f"no failures to simulate: give a --trace, or --generate {'|'.join(MODELS)}")
    if given.nodes is not None:
        raise ConfigError(
            f"--nodes {given.nodes}: applies only to a --trace that names only the nodes that failed; leave it out"
        )
    # Compressing by the rate makes the trace shorter, so draw a longer one.
    drawn_s = (given.days or _YEAR_DAYS) * _DAY_S * (1.0 if given.keep_repairs else given.rate)
    model = MODELS[given.generate]
    trace = generate_trace(model, hosts=hosts, workers_per_host=per_host, duration_s=drawn_s, seed=given.seed)
    return _at_rate(trace, given)


def _at_rate(trace: Trace, given: SimulateRequest) -> Trace:
    return trace.scaled(given.rate, seed=given.seed) if given.keep_repairs else trace.compressed(given.rate)


def _names_only_failing(path: Path) -> bool:
    """Return whether a file is a list of faults like InfiniteHBD's; False if unreadable, which the loader reports."""
    try:
        with path.open("rb") as file:
            return file.read(200).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
    except OSError:
        return False


def chosen_policies(text: str) -> tuple[str, ...]:
    """Return the policies named in `text`. Raises ConfigError if it names one twice, or none."""
    if text == "all":
        return SIMULATED_POLICIES
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ConfigError(f"--policies {text!r}: name one or more of {', '.join(SIMULATED_POLICIES)}, or all")
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--policies {text}: names {name} twice")
    return names


def chosen_sweep(text: str) -> tuple[str, tuple[float, ...]]:
    """Return the input to vary and its values. Raises ConfigError if the text is malformed."""
    name, _, values = text.partition("=")
    numbers = _numbers(values.split(","))
    if name not in SWEPT or not numbers:
        raise ConfigError(f"--sweep {text}: should be {'|'.join(SWEPT)}=VALUE,VALUE,..., such as rate=0.1,1,10,30")
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"--sweep {text}: has a value twice")
    return name, numbers


def _assume(text: str, parameters: Parameters) -> Parameters:
    """Return `parameters` with the changes in the text. Raises ConfigError for an unknown name or an invalid value."""
    types = get_type_hints(Parameters)
    given: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        name = name.strip()
        if name in given:
            raise ConfigError(f"--assume {text}: names {name} twice")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if name not in types or math.isnan(number) or not (types[name] is float or number.is_integer()):
            raise ConfigError(f"--assume {part}: should be NAME=NUMBER, with NAME one of {', '.join(types)}")
        if types[name] is bool and number not in (0, 1):
            raise ConfigError(f"--assume {part}: should be 0 or 1")
        given[name] = number if types[name] is float else int(number)
    change: Callable[..., Parameters] = replace
    return change(parameters, **given)


def _numbers(texts: Sequence[str]) -> tuple[float, ...]:
    """Return the texts as numbers; empty if any of them is not a finite number."""
    try:
        found = tuple(float(text) for text in texts)
    except ValueError:
        return ()
    return found if all(math.isfinite(value) for value in found) else ()
