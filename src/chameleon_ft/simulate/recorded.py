"""Recorded runs as input of simulations: their prior knowledge, their failures, and the durations of their stalls."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from chameleon_ft.cost.step import estimate_step
from chameleon_ft.cost.transition import StallModel
from chameleon_ft.errors import ConfigError
from chameleon_ft.events.base import Event
from chameleon_ft.events.decisions import Prepared
from chameleon_ft.events.kinds import CheckpointComplete, Joined, SnapshotComplete
from chameleon_ft.events.records import FailureRecord, JoinRecord, Started
from chameleon_ft.plan import Plan
from chameleon_ft.recovery import DecisionContext
from chameleon_ft.recovery.generation import GenerationSpec
from chameleon_ft.recovery.symmetry import loss_classes
from chameleon_ft.report.decisions import Decisions, DecisionStory
from chameleon_ft.schedule import CostModel
from chameleon_ft.simulate.parameters import Parameters
from chameleon_ft.simulate.traces.trace import Fault, Trace
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.plans import read_generation_plans

# Losses with smaller gaps are found before anything is decided.
_AT_ONCE_S: Final = 0.25
# A run waits so long for further new workers before it decides about them.
_QUIET_S: Final = 0.5
_NO_STALL: Final = frozenset({"none", "stop", "restart", "checkpoint", "snapshot"})


@dataclass(frozen=True, slots=True, order=True)
class Change:
    """A loss or a return of a worker, in seconds since the trace began."""

    time_s: float
    worker: int
    is_lost: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """The prior knowledge of a run.

    Attributes:
        policy: its policy.
        costs: costs of a step, and the workers, without anything that was measured later.
        start: its first plan.
        parameters: The settings of its configuration, and the given ones for the rest.
    """

    policy: str
    costs: CostModel
    start: Plan
    parameters: Parameters


def recorded_run(run: RunDirectory, parameters: Parameters = Parameters()) -> RecordedRun:
    """Read the prior knowledge of a run. A run without a profile had none of its times, so its measurements are used.

    Args:
        run: its directory.
        parameters: assumptions for what its configuration does not give.

    Raises:
        ConfigError: the run has no plan, was resumed, or had no profile and measured nothing.
    """
    config, first = run.config(), _first(run)
    recovery, every = config.recovery, config.checkpoint.every
    # A run that wrote fewer than two by itself would have been longer.
    gap = (_median_gap(run, CheckpointComplete) or config.steps) if every == "auto" else every
    step_s = estimate_step(first.plan, first.program, first.costs).step_s
    return RecordedRun(
        policy=recovery.policy,
        costs=first.costs,
        start=first.plan,
        parameters=replace(
            parameters,
            worker_mtbf_s=recovery.worker_mtbf_hours * 3600,
            prior_failures=recovery.prior_weight,
            host_failure_fraction=recovery.host_failure_fraction,
            restart_cost_s=recovery.restart_cost_s,
            checkpoint_interval_s=gap * step_s if gap else math.inf,
            snapshot_every=_steps_between_snapshots(run),
            salvage=recovery.salvage,
        ),
    )


def recorded_changes(run: RunDirectory) -> tuple[tuple[Change, ...], float]:
    """Return (losses and returns, duration in seconds) of a run, from the start of training on.

    Raises:
        ConfigError: the run never began to train, or was resumed.
    """
    events = run.events()
    began_at = _began_at(run, events)
    changes = []
    for event in events:
        if isinstance(event, FailureRecord):
            changes.append(Change(event.time - event.stall_s - began_at, event.worker, is_lost=True))
        elif isinstance(event, Joined):
            changes.append(Change(event.time - began_at, event.worker, is_lost=False))
    return tuple(sorted(changes)), events[-1].time - began_at


def trace_of_changes(changes: Iterable[Change], *, workers: int, duration_s: float, name: str = "") -> Trace:
    """Return the trace of losses and returns.

    Losses within a quarter of a second are one event, that of the first. Changes without an effect are left out, such
    as the loss of a lost worker, as are changes outside the trace and those of workers that were added later.
    """
    faults: list[Fault] = []
    lost_since_s: dict[int, float] = {}
    together_s = -math.inf
    for change in sorted(changes):
        if not 0 <= change.time_s <= duration_s or change.worker >= workers:
            continue
        if not change.is_lost:
            start_s = lost_since_s.pop(change.worker, math.inf)
            if start_s < change.time_s:
                faults.append(Fault((change.worker,), start_s, change.time_s))
        elif change.worker not in lost_since_s:
            if change.time_s > together_s + _AT_ONCE_S:
                together_s = change.time_s
            lost_since_s[change.worker] = together_s
    faults += [Fault((worker,), start_s) for worker, start_s in lost_since_s.items()]
    return Trace.from_faults(faults, workers=workers, duration_s=duration_s, name=name)


def measured_parameters(
    runs: Iterable[RunDirectory],
    parameters: Parameters = Parameters(),
) -> Parameters:
    """Return the phases of stalls, and what else the simulator assumes and runs measure, as medians over these runs.

    Figures that no run recorded stay as in `parameters`. Raises ConfigError as `recorded_run` does.
    """
    seen: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        plans = read_generation_plans(run.plans)
        _add_phases(seen, run.events())
        seen["search_s"] += _searches_s(run.events(), plans)
        seen["step_overhead_s"] += _overheads_s(run, plans)
        seen["checkpoint_write_s"] += recorded_copies_s(run)
    found: dict[str, Any] = {name: max(0.0, statistics.median(values)) for name, values in seen.items() if values}
    if "search_s" in found:
        found["weigh_s"] = _QUIET_S + found["search_s"]
    return replace(parameters, **found)


def recorded_copies_s(run: RunDirectory) -> list[float]:
    """Return the seconds of the stop for each checkpoint; runs of old versions do not record them."""
    checkpoints = (event for event in run.events() if isinstance(event, CheckpointComplete))
    return [event.copy_s for event in checkpoints if event.copy_s is not None]


def _add_phases(seen: dict[str, list[float]], events: Sequence[Event]) -> None:
    """Add the phases of single losses, and the searches that follow them during training.

    The phases of several losses at once overlap, but for the search and the regrouping.
    """
    losses: dict[int, list[FailureRecord]] = defaultdict(list)
    for event in events:
        if isinstance(event, FailureRecord):
            losses[event.generation].append(event)
    stories = Decisions.of(events).stories()
    decisions = [story.decided for story in stories]
    prepared = {each.generation: each.prepared or each.salvaged is not None for each in decisions if each.lost}
    seen["search_s"] += [each.search_s for each in decisions if each.trigger == "review"]
    seen["migration_factor"] += _migration_factors(stories, events)
    for generation, records in losses.items():
        first = records[0]
        if first.policy in _NO_STALL or generation not in prepared:
            continue
        seen["decide_s" if prepared[generation] else "search_s"].append(first.decide_s)
        seen["regroup_s"].append(first.regroup_s)
        if len(records) == 1:
            seen["stop_s"].append(first.stop_s)
            if first.detect_s is not None:
                seen["detect_s"].append(first.detect_s)


def _migration_factors(stories: Iterable[DecisionStory], events: Iterable[Event]) -> list[float]:
    """Return the seconds of each migration over those that messages and links explain.

    One in several waves trains a step between them.
    """
    taken_s = {
        event.generation: event.migrate_s
        for event in events
        if isinstance(event, JoinRecord) and event.migrate_s > 0 and event.waves == 1
    }
    return [
        taken_s[decided.generation] * decided.corrections.migration / best.migration_s
        for decided in (story.decided for story in stories)
        if (best := decided.best) is not None and best.migration_s > 0 and decided.generation in taken_s
    ]


def _searches_s(events: Sequence[Event], plans: Mapping[int, GenerationSpec]) -> list[float]:
    """Return the mean seconds of a decision that was prepared during training, for each preparation."""
    found = []
    for event in events:
        if isinstance(event, Prepared) and event.losses and (planned := plans.get(event.generation)) is not None:
            context = DecisionContext(
                plan=planned.plan,
                in_flight_limits={},
                costs=planned.costs,
                phases=StallModel(detect_s=0.0, stop_s=0.0, decide_s=0.0, regroup_s=0.0),
                repeat_s=0.0,
                restart_cost_s=0.0,
            )
            found.append(event.prepare_s / len(loss_classes(context)))
    return found


def _overheads_s(run: RunDirectory, plans: Mapping[int, GenerationSpec]) -> list[float]:
    """Return the median seconds of the steps of each plan beyond their estimate, without its first step."""
    first = _first(run)
    steps_s: dict[tuple[int, int], list[float]] = defaultdict(list)
    for step in run.steps():
        if (plan := plans.get(step.generation)) is not None:
            steps_s[step.generation, plan.at(step.step).first_step].append(step.step_s)
    found = []
    for (generation, first_step), own in steps_s.items():
        if len(usual := own[1:]) > 1:
            plan = plans[generation].at(first_step)
            costs = first.costs if first.costs_from == "profile" else plan.costs
            step_s = estimate_step(plan.plan, plan.program, costs.with_micro_batches(plan.plan.micro_batches)).step_s
            found.append(statistics.median(usual) - step_s)
    return found


def _steps_between_snapshots(run: RunDirectory) -> int:
    """Return the median, which is below the configured most; 0 if there was none."""
    config = run.config()
    if not config.snapshots.every:
        return 0
    most = config.steps if config.snapshots.every == "auto" else config.snapshots.every
    return round(_median_gap(run, SnapshotComplete) or most)


def _median_gap(run: RunDirectory, kind: type[CheckpointComplete | SnapshotComplete]) -> float | None:
    steps = [each.step for each in run.events() if isinstance(each, kind)]
    gaps = [after - before for before, after in itertools.pairwise(steps) if after > before]
    return statistics.median(gaps) if gaps else None


def _first(run: RunDirectory) -> GenerationSpec:
    """Return the first plan of a run, for the batch of its last step, with measured costs if it had no profile."""
    _began_at(run, run.events())
    plans = read_generation_plans(run.plans)
    if not plans:
        raise ConfigError(f"{run.path}: there is no plan of any generation in {run.plans.name}; the run never began")
    first = next(iter(plans.values())).at(run.config().steps - 1)
    if first.costs_from != "assumed":
        return first
    measured = [plan for plan in plans.values() if plan.costs_from == "measured"]
    if not measured:
        raise ConfigError(
            f"{run.path}: the run had no profile, and has measured nothing of which a plan was made; "
            "give it one (chameleon profile), or a run in which something failed"
        )
    costs = CostModel(measured[-1].costs.workload, first.costs.cluster)
    return replace(first, costs=costs.with_micro_batches(first.plan.micro_batches), costs_from="measured")


def _began_at(run: RunDirectory, events: Sequence[Event]) -> float:
    begun = [event.time for event in events if isinstance(event, Started)]
    if len(begun) != 1:
        what = "it was resumed" if begun else "it never began to train"
        raise ConfigError(f"{run.path}: {what}; give a run that was not cut short")
    return begun[0]
