"""Simulations in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table

from chameleon_ft.observe.terminal import output
from chameleon_ft.quantities import duration, rate
from chameleon_ft.simulate import Trace, trace_statistics
from chameleon_ft.simulate.accounting.results import PolicyResult, Results
from chameleon_ft.simulate.run import ORACLE
from chameleon_ft.simulate.sweep import Point, Sweep

__all__ = ["show_results", "show_sweep"]

_WIDE = 110  # characters, from which on there is room for all columns
_DAY_S = 86_400.0
_KINDS = 2  # of decisions, that are named
_WITH_UNITS = {"memory": "memory (GB)", "rate": "failure rate"}


def show_results(
    title: str, results: Results, trace: Trace, *, note: str | None = None, warning: str | None = None
) -> None:
    """Print what each policy made of a trace, the best first.

    A `note` on what is simulated and a `warning` about the ranking come before the table.
    """
    console, shape = output()
    console.print(title, style="bold", soft_wrap=True)
    console.print(_describe_trace(trace), soft_wrap=True)
    console.print(f"begins with {results.start}", soft_wrap=True)
    if note is not None:
        console.print(note, soft_wrap=True)
    if warning is not None:
        console.print(warning, style="bold yellow", soft_wrap=True)
    console.print(_table(results, shape, wide=console.width >= _WIDE))
    first = next((name for name in results.ranking if name != ORACLE), None)
    if first is not None:
        console.print(_where_it_went(first, results.policies[first]))


def _table(results: Results, shape: box.Box, *, wide: bool) -> Table:
    table = Table(box=shape)
    table.add_column("policy", no_wrap=True)
    columns = ["samples/s", "of failure-\nfree", "of\noracle", "stall", "lost\nwork", "deci-\nsions"]
    if wide:
        columns.insert(-1, "ETTR")
    for column in columns:
        table.add_column(column, justify="right")
    if wide:
        table.add_column("of which")
    for name in results.ranking:
        own = results.policies[name]
        bound = name == ORACLE
        cells = [
            name,
            rate(own.goodput),
            f"{own.share_of_failure_free:.2%}",
            f"{own.share_of_oracle:.2%}",
            "" if bound else duration(own.stall_s),
            "" if bound else duration(own.lost_s),
            *([f"{own.effective_time_ratio:.2%}"] if wide else []),
            "" if bound else f"{len(own.decisions):,}",
        ]
        table.add_row(*cells, *([_kinds(own)] if wide else []), style="dim" if bound else "")
    return table


def _kinds(own: PolicyResult) -> str:
    counts = list(own.decisions_by_kind.items())
    named = [f"{count} {kind.removeprefix(own.policy + '-')}" for kind, count in counts[:_KINDS]]
    others = sum(count for _, count in counts[_KINDS:])
    return ", ".join([*named, *([f"{others} other"] if others else [])])


def _describe_trace(trace: Trace) -> str:
    figures = trace_statistics(trace)
    slow = f", {figures.slow_share:.1%} slow" if figures.slow_share else ""
    host = "worker" if trace.workers_per_host == 1 else "host"
    # Of the minutes of a run that says nothing.
    rate = f", {figures.faults_per_1000_host_days:.2f} per 1,000 {host}-days" if trace.duration_s >= _DAY_S else ""
    return (
        f"{_counted(figures.faults, f'{host} failure')} on {_counted(figures.hosts, host)}{rate}; "
        f"{figures.availability:.1%} of the workers up on average{slow}, at worst "
        f"{_counted(figures.most_hosts_down, host)} down"
    )


def _counted(number: int, name: str) -> str:
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def _where_it_went(name: str, own: PolicyResult) -> Table:
    """What keeps the first from the failure-free rate; and how well its decisions were predicted."""
    facts = [
        ("stalls", _by_cause(own.stall_by_cause)),
        ("work done again", _by_cause(own.lost_by_cause)),
        ("writing checkpoints", duration(own.checkpoint_s) if own.checkpoint_s else "none"),
    ]
    if own.down_s:
        facts.append(("too few workers", duration(own.down_s)))
    if own.stall_error is not None and own.step_error is not None:
        facts.append(("predictions are off", f"by {own.step_error:.1%} of steps and {own.stall_error:.1%} of stalls"))
    table = Table.grid(padding=(0, 2))
    for index, (what, value) in enumerate(facts):
        table.add_row("" if index else name, what, value)
    return table


def _by_cause(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{cause} {duration(value)}" for cause, value in seconds.items()) or "none"


def show_sweep(title: str, found: Sweep, trace: Trace) -> None:
    """Print the goodput of every policy at every value, and who is first where."""
    console, shape = output()
    console.print(title, style="bold", soft_wrap=True)
    console.print(_describe_trace(trace), soft_wrap=True)
    console.print(_sweep_table(found, shape))
    for point in found.points:
        if point.misfit:
            console.print(f"{found.name} {point.value:g}: {point.misfit}", soft_wrap=True)
    if quiet := [point for point in found.points if point.results is not None and not point.results.lost_events]:
        values = ", ".join(f"{point.value:g}" for point in quiet)
        console.print(
            f"warning: no worker is lost at {found.name} {values}: what differs there is not the reaction to failures",
            style="bold yellow",
            soft_wrap=True,
        )
    for line in _describe_leads(found):
        console.print(line, soft_wrap=True)


def _sweep_table(found: Sweep, shape: box.Box) -> Table:
    bounded = ORACLE in found.policies
    of = "the oracle's samples" if bounded else "the failure-free samples"
    table = Table(box=shape, title=f"share of {of}, by {_WITH_UNITS.get(found.name, found.name)}", title_justify="left")
    table.add_column("")
    for point in found.points:
        table.add_column(f"{point.value:g}", justify="right", no_wrap=True)
    for policy in found.policies:
        if policy != ORACLE:
            table.add_row(policy, *(_cell(point, policy, bounded=bounded) for point in found.points))
    table.add_section()
    table.add_row("samples/s of the first", *map(_most, found.points))
    if found.name == "workers":
        table.add_row("for each worker", *(_most(point, per_worker=True) for point in found.points))
    return table


def _cell(point: Point, policy: str, *, bounded: bool) -> str:
    if point.results is None:
        return "-"
    own = point.results.policies[policy]
    return f"{own.share_of_oracle if bounded else own.share_of_failure_free:.2%}"


def _most(point: Point, *, per_worker: bool = False) -> str:
    if point.results is None:
        return "-"
    by_policy = point.results.policies
    first = next((name for name in point.results.ranking if name != ORACLE), ORACLE)
    return rate(by_policy[first].goodput / (point.results.workers if per_worker else 1))


def _describe_leads(found: Sweep) -> list[str]:
    """Who is first where: of all policies, and of rerouting and re-partition."""
    policies = [policy for policy in found.policies if policy != ORACLE]
    lines = []
    if len(policies) > 1:
        lines.append(f"first: {_leads(found, policies)}")
    pair = [policy for policy in ("reroute", "repartition") if policy in policies]
    if len(pair) == len(policies):
        return lines
    if len(pair) > 1:
        lines.append(f"of {pair[0]} and {pair[1]}: {_leads(found, pair)}")
    return lines


def _leads(found: Sweep, policies: Sequence[str]) -> str:
    parts = []
    for lead in found.leads(policies):
        where = f"at {lead.first:g}" if lead.first == lead.last else f"from {lead.first:g} to {lead.last:g}"
        parts.append(f"{lead.policy} {where}")
    return ", ".join(parts) or "no policy"
