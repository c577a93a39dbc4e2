"""`chameleon explain`: show each decision of a run, the reason for it, and its outcome."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from chameleon_ft.cli.arguments import OptionalInt, RunPath, Switch, parse_arguments
from chameleon_ft.cli.output import Output
from chameleon_ft.errors import ConfigError
from chameleon_ft.events.decisions import (
    CountedOnSnapshots,
    DecisionEvent,
    ObservedRate,
    ScoredCandidate,
    StallParts,
    UsedCorrections,
)
from chameleon_ft.events.records import DETECTED_BY, FailureRecord, OutcomeRecord
from chameleon_ft.quantities import ROUNDING, counted, data_size, duration, listed
from chameleon_ft.report.decisions import DecisionStory
from chameleon_ft.report.facts import describe_damage
from chameleon_ft.report.view import RunView
from chameleon_ft.storage.files import RunDirectory

_NOTICEABLE_STALL_S = 5e-4
_TRIGGERS: Final = {"loss": "lost", "join": "joined", "review": "review", "drain": "leaving", "slow": "slow"}
_PRESENT: Final = {
    "loss": "are left",
    "join": "are there, newcomers included",
    "review": "are live",
    "drain": "stay",
    "slow": "are live",
}
"""The words after a number of workers, by the trigger of a decision."""
_UNNAMED: Final = {
    "loss": "no worker",
    "join": "new workers",
    "review": "the last plan was chosen without a search, so that no worker waited for it",
    "slow": "none any longer",
}


@dataclass(frozen=True)
class ExplainArguments:
    """Show each decision of a run: the situation, the candidates, the predictions and the outcome.

    Only the files of the run are read, so the run may still be live.
    """

    run: RunPath
    """Run directory."""
    decision: OptionalInt = None
    """Only this decision, counted from 1."""
    json: Switch = False
    """Print the decisions as JSON."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    given = parse_arguments(ExplainArguments, arguments, command="explain")
    run = RunDirectory.open(given.run)
    view, damaged = RunView.of_events(run)
    stories = chosen = view.decisions.stories()
    if given.decision is not None:
        if not 1 <= given.decision <= len(stories):
            known = f"this run has 1 to {len(stories)}" if stories else "this run has none"
            raise ConfigError(f"--decision {given.decision}: there is no such decision; {known}")
        chosen = (stories[given.decision - 1],)
    if given.json:
        found = [{**story.to_json(), "why": describe_reason(story.decided)} for story in chosen]
        print(json.dumps({"decisions": found, "damaged_lines": damaged}))
        return 0
    out = Output()
    if chosen:
        out.text(str(run.path), "bold")
    elif damaged:
        print(f"{run.path}: no line that can be read is a decision")
    else:
        lost = view.counts[FailureRecord]
        losses = f"{counted(lost, 'worker')} {'was' if lost == 1 else 'were'} lost, and the banners say what was done"
        print(f"{run.path}: there was nothing to decide; {losses if lost else 'no worker was lost'}")
    if damaged:
        out.text(describe_damage(damaged))
    _show(out, chosen, total=len(stories))
    return 0


def _show(out: Output, stories: Sequence[DecisionStory], *, total: int) -> None:
    """Print stories of a run that has `total` decisions in all."""
    resumed = any(story.session > 1 for story in stories)
    for story in stories:
        decided = story.decided
        when = datetime.fromtimestamp(decided.time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        start = f", start {story.session} of the run" if resumed else ""
        out.text("")
        out.text(f"Decision {story.number} of {total}: in step {decided.step}, {when}{start}", "bold")
        present = _PRESENT[decided.trigger]
        out.facts(
            [
                (_TRIGGERS[decided.trigger], _describe_trigger(story)),
                ("in force", f"{decided.plan}; {decided.live} workers {present}"),
                ("expected", _describe_failure_rate(decided.rate, live=decided.live, horizon_s=decided.horizon_s)),
                ("stall", _describe_stall(decided.stall)),
                *_describe_snapshots(decided.snapshots),
                ("corrected", _describe_corrections(decided.corrections)),
            ]
        )
        earlier = (
            "scored before the loss, looked up" if decided.trigger == "loss" else "scored while training continued,"
        )
        out.text(f"{earlier if decided.prepared else 'scored'} in {duration(decided.search_s)}")
        # Single holders are named only if they tell the candidates apart.
        differ = (
            len(
                {
                    (each.worker_single_points_of_failure, each.host_single_points_of_failure)
                    for each in decided.candidates
                    if each.feasible
                }
            )
            > 1
        )
        costs = ["next failure costs"] if any(each.next_incident_s for each in decided.candidates) else []
        out.show(
            out.table(
                [
                    _candidate_row(each, decided.chosen, holders=differ, costs=bool(costs))
                    for each in decided.candidates
                ],
                left=[""],
                right=["step", "stall", "moves", *costs, "samples until then"],
                last=[""],
                styles={decided.chosen: "bold"},
            )
        )
        out.facts(_outcome_facts(story))


def _describe_trigger(story: DecisionStory) -> str:
    if story.decided.trigger == "drain":
        return listed("worker", story.decided.leaving)
    if story.decided.trigger == "slow" and (slow := _describe_slow(story.decided.corrections)):
        return slow
    if not story.decided.lost:
        return _UNNAMED[story.decided.trigger]
    known = {loss.worker: loss for loss in story.losses}
    lines = [
        f"worker {worker}: {known[worker].cause}, detected by {DETECTED_BY[known[worker].noticed_by]}"
        if worker in known
        else f"worker {worker}"
        for worker in story.decided.lost
    ]
    return "\n".join(lines)


def _candidate_row(each: ScoredCandidate, chosen: str | None, *, holders: bool, costs: bool) -> tuple[str, ...]:
    waves = f" in {each.waves} waves" if each.waves > 1 else ""
    remarks = (
        "chosen" if each.policy == chosen else each.reason,
        f"layers move for {duration(each.migration_s)} during training{waves}" if each.migration_s else "",
        _describe_sole_holders(each) if holders else "",
    )
    return (
        each.policy,
        "-" if each.step_s is None else duration(each.step_s),
        "-" if each.stall_s is None else duration(each.stall_s),
        "-" if each.bytes is None else data_size(each.bytes),
        *([duration(each.next_incident_s) if each.feasible else "-"] if costs else []),
        f"{each.samples:,.0f}" if each.feasible else "-",
        ", ".join(filter(None, remarks)),
    )


def _outcome_facts(story: DecisionStory) -> Iterator[tuple[str, Any]]:
    decided, outcome, best = story.decided, story.outcome, story.decided.best
    yield "why", describe_reason(decided)
    action = next((loss.action for loss in story.losses if loss.generation == decided.generation), None)
    if story.policy is None:
        yield "action", "none: the run ended"
    else:
        yield "action", f"{story.policy}: {action}" if action else story.policy
    if best is not None and best.step_s is not None and best.stall_s is not None:
        yield "predicted", f"step {duration(best.step_s)}, {_describe_predicted_stall(best, decided)}"
    if decided.salvaged is not None:
        yield (
            "salvaged",
            f"the rest of step {decided.step}, predicted to take {duration(decided.salvaged.rest_s)}; "
            f"{decided.salvaged.repeated_share:.1%} of the work of the step is repeated",
        )
    if (cost := story.cost) is not None:
        predicted = "" if cost.predicted_steps is None else f", predicted {cost.predicted_steps:.2f}"
        yield "cost", f"{cost.failure_cost_steps:.2f} steps{predicted}"
    if story.is_noop:
        yield "actual", "no worker stopped for it"
    elif outcome is None:
        yield "actual", "not measured: no whole step was trained under it alone"
    else:
        yield (
            "actual",
            f"step {duration(outcome.measured_step_s)}{_error(outcome.step_error)}, "
            f"stall {duration(outcome.measured_stall_s)}{_error(outcome.stall_error)}, "
            f"after {counted(outcome.steps, 'step')}",
        )
        if parts := _describe_measured_stall(outcome, story.losses):
            yield "", parts
        if outcome.warning is not None:
            from rich.text import Text

            yield "warning", Text(outcome.warning, style="bold yellow")


def _error(error: float | None) -> str:
    return "" if error is None else f" ({error:+.1%})"


def describe_reason(decision: DecisionEvent) -> str:
    """Say by what the chosen candidate beat the second."""
    best, second = decision.best, decision.second
    if best is None:
        return "no candidate was possible"
    if second is None:
        return "no other candidate was possible"
    if best.samples < second.samples * (1 - ROUNDING):
        more = f"{second.samples / best.samples - 1:.1%} more" if best.samples else "more"
        if (second.worker_single_points_of_failure, second.host_single_points_of_failure) > (
            best.worker_single_points_of_failure,
            best.host_single_points_of_failure,
        ):
            holders = _describe_sole_holders(second)
            return f"{second.policy} would train {more} samples, but for {holders}: there is no checkpoint"
        return f"{second.policy} would train {more} samples by what is known now, but it had been decided before"
    if best.samples <= second.samples * (1 + ROUNDING):
        own, other = best.bytes or 0, second.bytes or 0
        closer = f"it moves {data_size(own)}, not {data_size(other)}" if own < other else "it was proposed first"
        return f"as many samples as {second.policy}; {closer}"
    gain = f"{best.samples / second.samples - 1:.1%} more" if second.samples else "more"
    return f"{gain} samples than {second.policy}: {_describe_difference(best, second, decision.horizon_s)}"


def _describe_difference(best: ScoredCandidate, second: ScoredCandidate, horizon_s: float) -> str:
    assert best.step_s is not None
    assert second.step_s is not None
    more_stall_s = _lost_s(best) - _lost_s(second)
    shorter_by = duration(-more_stall_s)
    more, less, not_more = "more of stall", f"its stall is {shorter_by} shorter", "its stall is not longer"
    if abs(best.next_incident_s - second.next_incident_s) >= _NOTICEABLE_STALL_S:
        what, end = "the next failure", "s"
        if best.stall_s != second.stall_s:
            what, end = f"its stall and {what}", ""
        more, less = f"that {what} cost{end} more", f"{what} cost{end} {shorter_by} less"
        not_more = f"{what} do{'es' * bool(end)} not cost more"
    if best.step_s == second.step_s:
        return less
    # Time t after the decision at which both have trained as much: (t - a) / s = (t - b) / r, for steps of s and r and
    # a and b lost.
    even_s = (_lost_s(best) * second.step_s - _lost_s(second) * best.step_s) / (second.step_s - best.step_s)
    even = f"after {duration(even_s)}; the next failure is expected in {duration(horizon_s)}"
    if best.step_s > second.step_s:
        return (
            f"{less}, which the steps of {second.policy}, "
            f"{1 - second.step_s / best.step_s:.1%} shorter, make up for only {even}"
        )
    shorter = f"its steps are {1 - best.step_s / second.step_s:.1%} shorter"
    if more_stall_s < _NOTICEABLE_STALL_S:
        return f"{shorter}, and {not_more}"
    moves = f"it moves {data_size(best.bytes)}, and " if best.bytes else ""
    return f"{moves}{shorter}, which makes up for {duration(more_stall_s)} {more} {even}"


def _lost_s(each: ScoredCandidate) -> float:
    assert each.stall_s is not None
    return each.stall_s + each.next_incident_s


def _describe_sole_holders(each: ScoredCandidate) -> str:
    """Count the hosts and workers that would hold some layer alone; empty if there are none."""
    hosts = f"{counted(each.host_single_points_of_failure, 'host')} with all holders of a layer"
    workers = f"{counted(each.worker_single_points_of_failure, 'worker')} with the only copy of one"
    return " and ".join(
        text
        for text, count in (
            (hosts, each.host_single_points_of_failure),
            (workers, each.worker_single_points_of_failure),
        )
        if count
    )


def _describe_failure_rate(rate: ObservedRate, *, live: int, horizon_s: float) -> str:
    """Say when the next failure is expected, and from what; see `FailureModel.waits` for the formula."""
    incidents = rate.failures if rate.incidents is None else rate.incidents
    several = f", {counted(incidents, 'incident')}" if incidents < rate.failures else ""
    of_hosts = (
        ""
        if rate.host_failure_fraction is None
        else f"; {rate.host_failure_fraction:.0%} of failures take a whole host"
    )
    prior = f"{rate.prior_failures:g} {'failure' if rate.prior_failures == 1 else 'failures'}"
    return (
        f"the next failure in {duration(horizon_s)}, by {counted(rate.failures, 'failure')}{several} in "
        f"{duration(rate.worker_s)} of work by all workers together, {live} of which are live; expected beforehand: "
        f"one per worker in {duration(rate.worker_mtbf_s)}, which counts as {prior}{of_hosts}"
    )


def _describe_stall(stall: StallParts) -> str:
    """Say what stall was assumed, transfers left out."""
    parts = {name: getattr(stall, f"{name}_s") for name in ("repeat", "detect", "stop", "decide", "regroup")}
    if not any(parts.values()):
        return "none, because no worker stops; transfers on top"
    return f"{sum(parts.values()):.3f} s = {_sum(parts)}; transfers on top"


def _describe_snapshots(snapshots: CountedOnSnapshots | None) -> list[tuple[str, str]]:
    """Say what a loss of all holders of a layer would cost with snapshots; empty without."""
    if snapshots is None:
        return []
    every = f", one after at most {duration(snapshots.longest_s)} of steps" if snapshots.longest_s else ""
    return [("snapshots", f"if a layer loses all holders, back to one in {duration(snapshots.return_s)}{every}")]


def _sum(parts: dict[str, float]) -> str:
    return " + ".join(f"{name} {part_s:.3f}" for name, part_s in parts.items())


def _describe_predicted_stall(chosen: ScoredCandidate, decision: DecisionEvent) -> str:
    assert chosen.stall_s is not None
    stall, text = decision.stall, f"stall {duration(chosen.stall_s)}"
    if chosen.policy.startswith("snapshot"):
        return f"{text}: the way back to the snapshot and the steps since"
    if stall.restart_cost_s is not None and chosen.stall_s == stall.restart_cost_s:
        return f"{text}: recovery.restart_cost_s and the steps since the checkpoint"
    return f"{text}, {duration(chosen.transfer_s)} of it transfer" if chosen.transfer_s else text


def _describe_measured_stall(outcome: OutcomeRecord, losses: Sequence[FailureRecord]) -> str:
    """Give the parts of a measured stall, by the loss that was detected last; empty if no worker was lost.

    The time before the phases is work done again: of the interrupted step, and of steps since a checkpoint.
    """
    own = [loss for loss in losses if loss.generation == outcome.generation]
    if not own:
        return ""
    last = min(own, key=lambda loss: loss.stall_s)
    phases = {name: getattr(last, f"{name}_s") or 0.0 for name in ("detect", "stop", "decide", "transfer", "regroup")}
    again_s = max(0.0, outcome.measured_stall_s - sum(phases.values()))
    if not phases["transfer"]:
        del phases["transfer"]
    steps = last.step - last.resume_step
    repeated = f" ({counted(steps, 'step')} repeated)" if steps > 0 else ""
    return f"stall = repeat {again_s:.3f}{repeated} + {_sum(phases)}"


def _describe_corrections(corrections: UsedCorrections) -> str:
    factors = {
        "operations": corrections.operations,
        "steps": corrections.step,
        "transfers": corrections.transfer,
        "migrations": corrections.migration,
    }
    texts = [f"{name} x {factor:.2f}" for name, factor in factors.items() if f"{factor:.2f}" != "1.00"]
    texts += [slow] if (slow := _describe_slow(corrections)) else []
    return ", ".join(texts) or "none"


def _describe_slow(corrections: UsedCorrections) -> str:
    slow = [f"worker {worker} at {speed:.2f} of the speed of others" for worker, speed in corrections.slow.items()]
    slow += [f"link {ends} at {share:.2f} of its bandwidth" for ends, share in corrections.slow_links.items()]
    return ", ".join(slow)
