"""`chameleon simulate`: compare policies over months of failures."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from pydantic.dataclasses import dataclass

from chameleon_ft.cli.arguments import parse_arguments
from chameleon_ft.cli.output import Output, compile_kernels, progress_bar, require_places, tell_written
from chameleon_ft.errors import PlanError
from chameleon_ft.quantities import counted, duration, rate
from chameleon_ft.session.simulation import SimulateCase, SimulateRequest, chosen_policies, chosen_sweep, simulate_case
from chameleon_ft.simulate import save_trace, trace_statistics
from chameleon_ft.simulate.account import ORACLE
from chameleon_ft.simulate.results import PolicyResult, Results
from chameleon_ft.simulate.run import Point, Sweep, simulate, sweep

# A line of this many characters has room for all columns.
_WIDE: Final = 110
_DAY_S: Final = 86_400.0
_KINDS_NAMED: Final = 2
_WITH_UNITS: Final = {"memory": "memory (GB)", "rate": "failure rate"}


@dataclass(frozen=True)
class SimulateArguments(SimulateRequest):
    """Compare policies over months of failures: how much each one trains, and where the time goes.

    Simulates a published --model on a known --device, or a --profile, on a cluster of --workers, over a failure --trace
    or one drawn by --generate. No process is started, and the same arguments give the same results. --sweep repeats the
    simulation at several failure rates, cluster sizes, memories, bandwidths or batches. --run replays the failures of a
    recorded run.
    """

    picture: Path | None = None
    """Draw the throughput over time and the time lost, or the sweep: .svg, .png or .pdf."""
    save_trace: Path | None = None
    """Write the simulated trace, as JSON lines."""
    json: bool = False
    """Print the results as JSON."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given = parse_arguments(SimulateArguments, arguments, command="simulate")
    policies = chosen_policies(given.policies)
    swept = None if given.sweep is None else chosen_sweep(given.sweep)
    case = simulate_case(given)
    require_places(picture=given.picture, trace=given.save_trace)
    compile_kernels()
    if given.save_trace is not None:
        save_trace(case.scene.trace, given.save_trace)
    if swept is None:
        _simulate(given, case, policies)
    else:
        _sweep(given, case, policies, *swept)
    tell_written(json=given.json, picture=given.picture, trace=given.save_trace)
    return 0


def _simulate(given: SimulateArguments, case: SimulateCase, policies: Sequence[str]) -> None:
    scene = case.scene
    with _progress(policies) as show:
        results = simulate(
            scene.trace,
            scene.workload,
            scene.cluster,
            policies,
            parameters=case.parameters,
            start=case.start,
            as_in_run=case.as_in_run,
            progress=partial(show, 0.0),
        )
    if given.picture is not None:
        from chameleon_ft.simulate.pictures import draw_results

        draw_results(given.picture, title=case.title, results=results, trace=scene.trace)
    warning = None if results.lost_events else _no_failure_warning(results, of_run=given.run is not None)
    if given.json:
        print(json.dumps({**case.facts, **results.to_json()}))
        if warning is not None:
            print(f"chameleon simulate: {warning}", file=sys.stderr)
    else:
        _show_results(case, results, warning)


def _sweep(
    given: SimulateArguments, case: SimulateCase, policies: Sequence[str], name: str, values: Sequence[float]
) -> None:
    with _progress(policies, name, values) as show:
        found = sweep(case.scene, name, values, policies, parameters=case.parameters, progress=show)
    if not found.policies:
        raise PlanError(
            f"--sweep {given.sweep}: nothing can be trained at any of these values: {found.points[-1].misfit}"
        )
    if given.picture is not None:
        from chameleon_ft.simulate.pictures import draw_sweep

        draw_sweep(given.picture, title=case.title, sweep=found)
    if given.json:
        print(json.dumps({**case.facts, **found.to_json()}))
    else:
        _show_sweep(case, found)


@contextmanager
def _progress(
    policies: Sequence[str], name: str = "", values: Sequence[float] = (0.0,)
) -> Iterator[Callable[[float, str, float], None]]:
    """Show a bar while the block runs; yields a function of a swept value, a policy and its share of the trace."""
    shown = [policy for policy in policies if policy != ORACLE] or list(policies)
    points = sorted(values)
    furthest = 0.0
    with progress_bar(len(shown) * len(points)) as advance:

        def show(value: float, policy: str, share: float) -> None:
            nonlocal furthest
            # A policy may be simulated twice, from pipelines of two depths.
            furthest = max(furthest, points.index(value) * len(shown) + shown.index(policy) + share)
            advance(furthest, f"{name} {value:g}: {policy}" if name else policy)

        yield show


def _no_failure_warning(results: Results, *, of_run: bool) -> str:
    """Say that the ranking does not compare reactions to failures, and what to simulate instead."""
    simulated = "in the run" if of_run else f"in the {results.duration_s / _DAY_S:,.1f} days that are simulated"
    instead = "give a run that lost one" if of_run else "give more --days, a higher --rate or a --trace with failures"
    return (
        f"warning: no worker is lost {simulated}, so the ranking says nothing about how policies handle failures; "
        f"{instead}"
    )


def _show_results(case: SimulateCase, results: Results, warning: str | None) -> None:
    """Print what each policy trained, the best first, and where the time of the best one went."""
    out = Output()
    _show_heading(out, case)
    out.text(f"begins with {results.start}")
    if case.note is not None:
        out.text(case.note)
    if warning is not None:
        out.text(warning, "bold yellow")
    wide = out.width >= _WIDE
    ettr = ["ETTR"] if wide else []
    table = out.table(
        [_result_row(results.policies[name], wide=wide) for name in results.ranking],
        left=["policy"],
        right=["samples/s", "of failure-\nfree", "of\noracle", "stall", "lost\nwork", *ettr, "deci-\nsions"],
        last=["of which"] if wide else [],
        styles={ORACLE: "dim"},
    )
    table.columns[0].no_wrap = True
    out.show(table)
    best = next((results.policies[name] for name in results.ranking if name != ORACLE), None)
    if best is not None:
        lost = enumerate(_lost_time(best))
        out.facts(("" if number else best.policy, name, text) for number, (name, text) in lost)


def _show_heading(out: Output, case: SimulateCase) -> None:
    trace = case.scene.trace
    figures = trace_statistics(trace)
    host = "worker" if trace.workers_per_host == 1 else "host"
    slow = f", {figures.slow_share:.1%} slow" if figures.slow_share else ""
    # A rate per day says nothing about the minutes of a run.
    per_day = f", {figures.faults_per_1000_host_days:.2f} per 1,000 {host}-days" if trace.duration_s >= _DAY_S else ""
    out.text(case.title, "bold")
    out.text(
        f"{counted(figures.faults, f'{host} failure')} on {counted(figures.hosts, host)}{per_day}; "
        f"{figures.availability:.1%} of the workers up on average{slow}, at worst "
        f"{counted(figures.max_hosts_down, host)} down"
    )


def _result_row(own: PolicyResult, *, wide: bool) -> list[str]:
    is_bound = own.policy == ORACLE
    counts = list(own.decisions_by_kind.items())
    kinds = [f"{count} {kind.removeprefix(own.policy + '-')}" for kind, count in counts[:_KINDS_NAMED]]
    if len(counts) > _KINDS_NAMED:
        kinds.append(f"{sum(count for _, count in counts[_KINDS_NAMED:])} other")
    return [
        own.policy,
        rate(own.goodput),
        f"{own.share_of_failure_free:.2%}",
        f"{own.share_of_oracle:.2%}",
        "" if is_bound else duration(own.stall_s),
        "" if is_bound else duration(own.lost_s),
        *([f"{own.effective_time_ratio:.2%}"] if wide else []),
        "" if is_bound else f"{len(own.decisions):,}",
        *([", ".join(kinds)] if wide else []),
    ]


def _lost_time(own: PolicyResult) -> Iterator[tuple[str, str]]:
    """Yield what keeps a policy from the failure-free rate, and how accurate its predictions were."""
    yield "stalls", _by_cause(own.stall_by_cause)
    yield "work done again", _by_cause(own.lost_by_cause)
    yield "writing checkpoints", duration(own.checkpoint_s) if own.checkpoint_s else "none"
    if own.down_s:
        yield "too few workers", duration(own.down_s)
    if own.stall_error is not None and own.step_error is not None:
        yield "predictions are off", f"by {own.step_error:.1%} of steps and {own.stall_error:.1%} of stalls"


def _by_cause(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{cause} {duration(value)}" for cause, value in seconds.items()) or "none"


def _show_sweep(case: SimulateCase, found: Sweep) -> None:
    """Print the share of every policy at every value, and which policy is first where."""
    out = Output()
    _show_heading(out, case)
    policies = [policy for policy in found.policies if policy != ORACLE]
    bound = "oracle" if ORACLE in found.policies else "failure_free"
    rows = [[policy, *(_share(point, policy, bound) for point in found.points)] for policy in policies]
    rows.append(["samples/s of the first", *map(_best_rate, found.points)])
    if found.name == "workers":
        rows.append(["for each worker", *(_best_rate(point, per_worker=True) for point in found.points)])
    samples = "the oracle's samples" if bound == "oracle" else "the failure-free samples"
    table = out.table(
        rows,
        left=[""],
        right=[f"{point.value:g}" for point in found.points],
        title=f"share of {samples}, by {_WITH_UNITS.get(found.name, found.name)}",
    )
    for column in table.columns[1:]:
        column.no_wrap = True
    table.rows[len(policies) - 1].end_section = True
    out.show(table)
    for point in found.points:
        if point.misfit:
            out.text(f"{found.name} {point.value:g}: {point.misfit}")
    if quiet := [point for point in found.points if point.results is not None and not point.results.lost_events]:
        values = ", ".join(f"{point.value:g}" for point in quiet)
        out.text(
            f"warning: no worker is lost at {found.name} {values}: what differs there is not the reaction to failures",
            "bold yellow",
        )
    if len(policies) > 1:
        out.text(f"first: {_describe_leads(found, policies)}")
    pair = [policy for policy in ("reroute", "repartition") if policy in policies]
    if len(pair) == 2 < len(policies):
        out.text(f"of reroute and repartition: {_describe_leads(found, pair)}")


def _share(point: Point, policy: str, bound: str) -> str:
    return "-" if point.results is None else f"{getattr(point.results.policies[policy], f'share_of_{bound}'):.2%}"


def _best_rate(point: Point, *, per_worker: bool = False) -> str:
    if point.results is None:
        return "-"
    best = next((name for name in point.results.ranking if name != ORACLE), ORACLE)
    return rate(point.results.policies[best].goodput / (point.results.workers if per_worker else 1))


def _describe_leads(found: Sweep, policies: Sequence[str]) -> str:
    parts = []
    for lead in found.leads(policies):
        where = f"at {lead.first:g}" if lead.first == lead.last else f"from {lead.first:g} to {lead.last:g}"
        parts.append(f"{lead.policy} {where}")
    return ", ".join(parts) or "no policy"
