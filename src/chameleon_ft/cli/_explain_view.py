"""The story of a run's decisions in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from chameleon_ft.cli._explain_formatting import (
    describe_corrections,
    describe_failure_rate,
    describe_measured_stall,
    describe_predicted_stall,
    describe_sole_holders,
    describe_stall,
    why,
)
from chameleon_ft.observe.decisions import DecisionEvent, DecisionStory, ScoredCandidate
from chameleon_ft.observe.records import DETECTED_BY
from chameleon_ft.observe.terminal import output
from chameleon_ft.quantities import data_size, duration

__all__ = ["show"]


def show(stories: Sequence[DecisionStory], *, title: str, of: int) -> None:
    """Print stories of a run that has `of` decisions in all."""
    console, shape = output()
    console.print(title, style="bold", soft_wrap=True, markup=False)
    resumed = any(story.session > 1 for story in stories)
    for story in stories:
        when = datetime.fromtimestamp(story.decided.time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        life = f", life {story.session} of the run" if resumed else ""
        console.print()
        console.print(
            f"Decision {story.number} of {of}: in step {story.decided.step}, {when}{life}", style="bold", soft_wrap=True
        )
        console.print(_known(story))
        console.print(_how_weighed(story.decided))
        console.print(_weighed(story.decided, shape))
        console.print(_actual(story))


def _known(story: DecisionStory) -> Table:
    decided = story.decided
    facts = _facts()
    facts.add_row("lost", _losses(story))
    there = "are there, newcomers included" if decided.trigger == "join" else "are left"
    facts.add_row("in force", f"{decided.plan}; {decided.live} workers {there}")
    facts.add_row("expected", describe_failure_rate(decided.rate, live=decided.live, horizon_s=decided.horizon_s))
    facts.add_row("stall", describe_stall(decided.stall))
    facts.add_row("corrected", describe_corrections(decided.corrections))
    return facts


def _losses(story: DecisionStory) -> str:
    if not story.decided.lost:
        return "no worker"
    known = {loss.worker: loss for loss in story.losses}
    return escape(
        "\n".join(
            f"worker {worker}: {known[worker].cause}, detected by {DETECTED_BY[known[worker].noticed_by]}"
            if worker in known
            else f"worker {worker}"
            for worker in story.decided.lost
        )
    )


def _how_weighed(decided: DecisionEvent) -> str:
    if not decided.prepared:
        how = "weighed in"
    elif decided.trigger == "loss":
        how = "weighed before the loss, looked up in"
    else:
        how = "weighed while training went on, " + ("in" if decided.chosen == "stay" else "looked up in")
    return f"{how} {duration(decided.search_s)}"


def _weighed(decided: DecisionEvent, shape: box.Box) -> Table:
    table = Table(box=shape)
    table.add_column("")
    for name in ("step", "stall", "moves", "samples until then"):
        table.add_column(name, justify="right")
    table.add_column("")
    # Who must not be lost is said where it makes a difference.
    differ = len({(each.last_holders, each.last_hosts) for each in decided.candidates if each.feasible}) > 1
    for each in decided.candidates:
        chosen = each.policy == decided.chosen
        remarks = ("chosen" if chosen else escape(each.reason or ""), describe_sole_holders(each) if differ else "")
        table.add_row(*_row(each), ", ".join(filter(None, remarks)), style="bold" if chosen else None)
    return table


def _row(each: ScoredCandidate) -> tuple[str, ...]:
    return (
        each.policy,
        "-" if each.step_s is None else duration(each.step_s),
        "-" if each.stall_s is None else duration(each.stall_s),
        "-" if each.moved_bytes is None else data_size(each.moved_bytes),
        f"{each.samples:,.0f}" if each.feasible else "-",
    )


def _actual(story: DecisionStory) -> Table:
    decided, outcome = story.decided, story.outcome
    best = decided.best
    facts = _facts()
    facts.add_row("why", why(decided))
    action = next((loss.action for loss in story.losses if loss.generation == decided.generation), None)
    if story.policy is None:
        facts.add_row("action", "none: the run ended")
    else:
        facts.add_row("action", escape(f"{story.policy}: {action}" if action else story.policy))
    if best is not None and best.step_s is not None and best.stall_s is not None:
        facts.add_row("predicted", f"step {duration(best.step_s)}, {describe_predicted_stall(best, decided.stall)}")
    if story.is_noop:
        facts.add_row("actual", "no worker stopped for it")
    elif outcome is None:
        facts.add_row("actual", "no step was committed under it, or none has been yet")
    else:
        steps = f"after {outcome.steps} step{'' if outcome.steps == 1 else 's'}"
        facts.add_row(
            "actual",
            f"step {duration(outcome.measured_step_s)}{_share(outcome.step_error)}, "
            f"stall {duration(outcome.measured_stall_s)}{_share(outcome.stall_error)}, {steps}",
        )
        if parts := describe_measured_stall(outcome, story.losses):
            facts.add_row("", parts)
        if outcome.warning is not None:
            facts.add_row("warning", Text(outcome.warning, style="bold yellow"))
    return facts


def _share(error: float | None) -> str:
    return "" if error is None else f" ({error:+.1%})"


def _facts() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table
