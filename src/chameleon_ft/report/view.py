"""The story of a run, put together from its records, and the report on it that `chameleon status` and the page show."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Final, Literal, Self, TypeAlias, get_args

from chameleon_ft.config import RunConfig
from chameleon_ft.errors import ConfigError
from chameleon_ft.events import decisions, kinds
from chameleon_ft.events.base import Event
from chameleon_ft.events.lines import Record
from chameleon_ft.events.records import (
    Evaluation,
    FailureCostRecord,
    FailureRecord,
    OutcomeRecord,
    RunStatus,
    Started,
    StepRecord,
)
from chameleon_ft.quantities import duration
from chameleon_ft.recovery import FailureModel
from chameleon_ft.recovery.generation import GenerationSpec
from chameleon_ft.report.conditions import Conditions
from chameleon_ft.report.decisions import Decisions
from chameleon_ft.report.incidents import Incidents
from chameleon_ft.report.steps import Pace, StepHistory
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.plans import read_generation

WorkerState: TypeAlias = Literal["live", "slow", "draining", "spare", "joining", "lost", "left"]

WORKER_STATES: Final[Mapping[WorkerState, str]] = {
    "live": "trains",
    "slow": "trains, slower than the others",
    "draining": "trains until a plan without it is in force",
    "spare": "is ready, and the plan does not use it",
    "joining": "is starting, or loading layers",
    "lost": "has failed",
    "left": "has left on request",
}
"""Description of each state."""


@dataclass(slots=True)
class WorkerBoard:
    """The workers as the events so far leave them.

    Attributes:
        hosts: host of each worker, as far as events name it.
        speeds: speed of each slow worker, relative to the others.
        link_speeds: likewise of each slow link, by its two workers.
    """

    hosts: dict[int, str] = field(default_factory=dict)
    speeds: dict[int, float] = field(default_factory=dict)
    link_speeds: dict[tuple[int, int], float] = field(default_factory=dict)
    # Lost workers whose recovery is not recorded yet.
    _detected: set[int] = field(default_factory=set)
    _states: dict[int, WorkerState] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Take in an event."""
        match event:
            case Started(pipelines=pipelines):
                self.speeds.clear()
                self.link_speeds.clear()
                self._detected.clear()
                self._states = {worker: "live" for pipeline in pipelines for worker in pipeline}
            case kinds.HostJoined(workers=workers):
                self._set("joining", *workers)
            case kinds.Respawn(worker=worker):
                self._set("joining", worker)
            case kinds.Joined(worker=worker, host=host):
                # It is a spare until a plan uses it.
                self._set("live", worker)
                self.hosts[worker] = host
            case kinds.Lost(worker=worker):
                self._lost(event)
                self._detected.add(worker)
            # It may be starting again by now.
            case FailureRecord(worker=worker) if worker in self._detected:
                self._detected.discard(worker)
            case FailureRecord():
                self._lost(event)
            case kinds.JoinFailed(worker=worker) | kinds.Blocklisted(worker=worker):
                self._set("lost", worker)
            case kinds.Draining(workers=workers):
                self._set("draining", *workers)
            case kinds.DrainFailed(workers=workers):
                self._set("live", *workers)
            case kinds.Drained(worker=worker) | kinds.Left(worker=worker):
                self._set("left", worker)
            case kinds.Slow(worker=worker, speed=speed):
                self.speeds[worker] = speed
            case kinds.Recovered(worker=worker):
                self.speeds.pop(worker, None)
            case kinds.SlowLink(workers=(one, other), speed=speed):
                self.link_speeds[min(one, other), max(one, other)] = speed
            case kinds.RecoveredLink(workers=(one, other)):
                self.link_speeds.pop((min(one, other), max(one, other)), None)

    def by_state(self, in_plan: frozenset[int] | None = None) -> dict[WorkerState, tuple[int, ...]]:
        """Return the workers in each state, ascending.

        Args:
            in_plan: workers that the plan in force uses; None: not known, so that there seem to be no spares.
        """
        found: defaultdict[WorkerState, list[int]] = defaultdict(list)
        for worker in sorted(self._states):
            state = self._states[worker]
            if state == "live" and in_plan is not None and worker not in in_plan:
                state = "spare"
            elif state == "live" and worker in self.speeds:
                state = "slow"
            found[state].append(worker)
        return {state: tuple(found[state]) for state in WORKER_STATES if found[state]}

    def _lost(self, event: kinds.Lost | FailureRecord) -> None:
        self._set("lost", event.worker)
        if event.host:
            self.hosts[event.worker] = event.host

    def _set(self, state: WorkerState, *workers: int) -> None:
        for worker in workers:
            self._states[worker] = state
            if state in ("lost", "left", "joining"):
                self.speeds.pop(worker, None)


Condition: TypeAlias = (
    Literal["waiting", "training", "evaluating", "reading", "recovering", "silent", "lost"] | RunStatus
)

CONDITIONS: Final[Mapping[Condition, str]] = {
    "waiting": "workers are joining, or load their layers",
    "training": "steps are committed",
    "evaluating": "the held-out samples are evaluated",
    "reading": "a sample takes long to read, and no step has been committed since",
    "recovering": "a worker is lost, and no step has been committed since",
    "silent": "no record for ten usual steps, and at least ten seconds",
    "lost": "the coordinator is gone, and the run has not ended",
    "finished": "all steps are trained",
    "interrupted": "ended by its user",
    "terminated": "ended by its machines; to be resumed",
    "failed": "ended by an error",
}
"""Description of each condition of a run."""

ENDED: Final = frozenset(get_args(RunStatus))
"""Conditions of a run that has ended."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A complete checkpoint or snapshot: training would resume with `step`; `time` in Unix seconds."""

    step: int
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The failures of a run and what they cost.

    Attributes:
        failures: lost workers.
        incidents: recoveries; workers lost together share one.
        steps: cost of all incidents, in steps.
        phases_s: seconds of each phase of the stalls, and of work that was repeated.
        causes: lost workers by cause, the most frequent first.
    """

    failures: int = 0
    incidents: int = 0
    steps: float = 0.0
    phases_s: Mapping[str, float] = field(default_factory=dict)
    causes: Mapping[str, int] = field(default_factory=dict)

    @property
    def stall_s(self) -> float:
        """Seconds of all stalls."""
        return sum(seconds for phase, seconds in self.phases_s.items() if phase != "repeat")

    def with_failure(self, failure: FailureRecord, *, is_first: bool) -> Self:
        """Add a lost worker. `is_first`: whether it is the first one of its incident, whose phases count."""
        causes = dict(Counter({**self.causes, failure.cause: self.causes.get(failure.cause, 0) + 1}).most_common())
        if not is_first:
            return replace(self, failures=self.failures + 1, causes=causes)
        added = {phase.removesuffix("_s"): getattr(failure, phase) or 0.0 for phase in (*_PHASES, "repeated_s")}
        added["repeat"] = added.pop("repeated")
        total = {phase: self.phases_s.get(phase, 0.0) + seconds for phase, seconds in added.items()}
        incidents = self.incidents + 1
        return replace(self, failures=self.failures + 1, incidents=incidents, phases_s=total, causes=causes)

    def with_steps(self, steps: float) -> Self:
        """Add the cost of an incident in steps."""
        return replace(self, steps=self.steps + steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """The state of a run at one moment. Times are in Unix seconds, durations in seconds.

    Attributes:
        run: its directory.
        condition: see `CONDITIONS`.
        reason: why, or how it ended; may be empty.
        at: when this was reported.
        began: when training began first; None if it has not.
        last: the newest committed step.
        steps: The steps of the whole run.
        pace: The pace of the newest steps.
        earlier: the pace to compare with.
        tokens: loss terms trained so far, each counted once.
        goodput: share of the time in which steps were trained that count, without stalls.
        eta_s: seconds until the last step, at this pace and goodput; None if it has ended or no step is committed.
        generation: The generation of the plan in force; 0 before the first.
        policy: that proposed it.
        workers: by state.
        hosts: The hosts of workers, as far as events name them.
        speeds: The speeds of slow workers, relative to the others.
        link_speeds: The speeds of slow links, by "WORKER-WORKER".
        checkpoint: the newest complete one.
        checkpoint_error: why the one after it failed, or cannot be read; None if none has.
        snapshot: the newest complete one.
        evaluation: the newest one; None if there is none.
        best_evaluation: the one with the least loss, the earliest if several have it.
        costs: The costs of failures.
        next_failure_s: expected seconds until the next failure.
    """

    run: str
    condition: Condition
    reason: str
    at: float
    began: float | None
    last: StepRecord | None
    steps: int
    pace: Pace | None
    earlier: Pace | None
    tokens: float
    goodput: float | None
    eta_s: float | None
    generation: int
    policy: str
    workers: Mapping[WorkerState, tuple[int, ...]]
    hosts: Mapping[int, str]
    speeds: Mapping[int, float]
    link_speeds: Mapping[str, float]
    checkpoint: Saved | None
    checkpoint_error: str | None
    snapshot: Saved | None
    evaluation: Evaluation | None
    best_evaluation: Evaluation | None
    costs: Costs
    next_failure_s: float | None

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.condition in ENDED

    @property
    def unit(self) -> str:
        """See `StepRecord.unit`."""
        return "tokens" if self.last is None else self.last.unit

    @property
    def last_step_age_s(self) -> float | None:
        """Seconds since the newest step was committed; None before the first."""
        return None if self.last is None else max(0.0, self.at - self.last.time)

    def to_json(self) -> dict[str, Any]:
        """Return the fields, and ages of what was saved, as JSON values."""
        values = {**asdict(self), "last": None if self.last is None else self.last.to_json()}
        for name, saved in (("checkpoint", self.checkpoint), ("snapshot", self.snapshot)):
            if saved is not None:
                values[name] = {**asdict(saved), "age_s": max(0.0, self.at - saved.time)}
        values["costs"] = {**asdict(self.costs), "stall_s": self.costs.stall_s}
        return {**values, "unit": self.unit, "last_step_age_s": self.last_step_age_s}


# A run without a commit for so many usual steps and seconds counts as silent.
_SILENT_STEPS: Final = 10.0
_SILENT_S: Final = 10.0
_PHASES: Final = ("detect_s", "stop_s", "decide_s", "regroup_s", "transfer_s")


def best_of(evaluations: Iterable[Evaluation]) -> Evaluation | None:
    """Return the first evaluation with the least loss; None if none has a loss."""
    known = (each for each in evaluations if each.loss is not None)
    return min(known, key=lambda each: each.loss or 0.0, default=None)


def with_evaluations(known: Mapping[int, Evaluation], event: Event) -> Mapping[int, Evaluation]:
    """Return the evaluations by their steps after an event; of steps that are trained again, the old do not count."""
    match event:
        case Started(first_step=first):
            return {number: each for number, each in known.items() if number < first}
        case Evaluation(step=step):
            return {**{number: each for number, each in known.items() if number < step}, step: event}
    return known


class RunView:
    """The story of a run: `add` takes in its records in their order, and all that shows a run reads the rest.

    It is changed in place, because the steps of a long run are many.

    Attributes:
        steps: The committed steps.
        workers: The state of each worker.
        events: All events, in their order.
        counts: The number of events of each type.
        decisions: The decisions, with their losses and outcomes.
        incidents: The lost workers, and what was done.
        conditions: Other problems.
        outcome: The newest measured outcome of a decision; None if there is none.
        evaluations: The evaluations by their steps, the newest of each.
        arriving: Layers that move to a worker while the run trains, such as "0-3, 7", by its number.
        ending: How the run ended; None while it is live.
        latest: Time of the newest record, in Unix seconds of the clock of the records; None before the first.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self.steps = StepHistory()
        self.workers = WorkerBoard()
        self.events: list[Event] = []
        self.counts: Counter[type[Event]] = Counter()
        self.decisions = Decisions()
        self.incidents = Incidents()
        self.conditions = Conditions()
        self.outcome: OutcomeRecord | None = None
        self.arriving: Mapping[int, str] = {}
        self.latest: float | None = None
        self.ending: kinds.Finished | None = None
        self._costs = Costs()
        self._began: float | None = None
        # When the run was started or last resumed, and the seconds of the sessions before.
        self._session: float | None = None
        self._up_s = 0.0
        # Workers that are lost, and the text of a sample that takes long to read, with no step committed since.
        self._unresolved: list[int] = []
        self._reading = ""
        self._is_evaluating = False
        self.evaluations: Mapping[int, Evaluation] = {}
        self._generation, self._policy = 0, ""
        self._saved: dict[str, Saved] = {}
        self._error: str | None = None
        self._incident_generations: set[int] = set()
        self._plan: GenerationSpec | None = None
        self._total_steps: int | None = None

    @cached_property
    def config(self) -> RunConfig:
        """The configuration of the run, as it was when it was needed first."""
        return self._run.config()

    @classmethod
    def of_events(cls, run: RunDirectory) -> tuple[Self, list[str]]:
        """Return what the events of a run tell, without its steps, and a message about each damaged line."""
        view, (events, damaged) = cls(run), run.readable_events()
        for event in events:
            view.add(event)
        return view, damaged

    def add(self, record: Record) -> None:
        """Take in the next record."""
        if isinstance(record, StepRecord):
            self.steps.add(record)
            self._unresolved.clear()
            self._reading, self._is_evaluating = "", False
        else:
            self.events.append(record)
            self.counts[type(record)] += 1
            self.workers.add(record)
            self.decisions.add(record)
            self.incidents.add(record)
            self.conditions.add(record)
            self._add(record)
        self.latest = max(record.time, self.latest or 0.0)

    def report(self, now: float, *, has_coordinator: bool | None) -> RunReport:
        """Return the state of the run.

        Args:
            now: in Unix seconds.
            has_coordinator: True if its coordinator lives; None: not known.
        """
        last, pace = self.steps.last, self.steps.recent
        plan = self.plan
        in_plan = None if plan is None else frozenset(plan.plan.workers)
        workers = self.workers.by_state(in_plan)
        count = sum(len(workers.get(state, ())) for state in ("live", "slow", "draining", "spare"))
        condition, reason = self._condition(now, has_coordinator=has_coordinator)
        has_ended = self.ending is not None
        if has_ended:  # no worker trains any more
            workers = {state: each for state, each in workers.items() if state in ("lost", "left")}
        steps = self.config.steps if self._total_steps is None else self._total_steps
        done, before = 0 if last is None else last.step + 1, self.config.batch.samples_before
        # In steps of the present batch, which may grow.
        left = (before(steps) - before(done)) / (before(max(done, 1)) - before(max(done, 1) - 1))
        goodput = self._goodput
        eta_s = (
            None if has_ended or condition == "lost" or pace is None or not goodput else left * pace.step_s / goodput
        )
        return RunReport(
            run=str(self._run.path),
            condition=condition,
            reason=reason,
            at=now,
            began=self._began,
            last=last,
            steps=steps,
            pace=pace,
            earlier=self.steps.earlier(now),
            tokens=self.steps.tokens,
            goodput=goodput,
            eta_s=eta_s,
            generation=self._generation,
            policy=self._policy,
            workers=workers,
            hosts=dict(self.workers.hosts),
            speeds={} if has_ended else dict(self.workers.speeds),
            link_speeds={}
            if has_ended
            else {f"{first}-{second}": each for (first, second), each in self.workers.link_speeds.items()},
            checkpoint=self._saved.get("checkpoint"),
            checkpoint_error=self._error,
            snapshot=self._saved.get("snapshot"),
            evaluation=next(reversed(list(self.evaluations.values())), None),
            best_evaluation=best_of(self.evaluations.values()),
            costs=self._costs,
            next_failure_s=None if has_ended else self._next_failure_s(count),
        )

    @property
    def plan(self) -> GenerationSpec | None:
        """The plan in force; None if its file cannot be read."""
        if self._generation and (self._plan is None or self._plan.generation != self._generation):
            with suppress(ConfigError):
                self._plan = read_generation(self._run.plan_file(self._generation))
                self.workers.hosts.update(self._plan.costs.cluster.hosts)
        return self._plan if self._plan is not None and self._plan.generation == self._generation else None

    def _add(self, event: Event) -> None:
        self.evaluations = with_evaluations(self.evaluations, event)
        match event:
            case Started(time=time, steps=steps):
                if self._session is not None and self.latest is not None:
                    self._up_s += self.latest - self._session
                self._began = time if self._began is None else self._began
                self._session, self.ending, self._total_steps = time, None, steps
                self._unresolved.clear()
                self._reading, self._is_evaluating = "", False
            case kinds.Evaluating():
                self._is_evaluating = True
            case Evaluation():
                self._is_evaluating = False
            case kinds.Waiting(limit_s=float()):
                where = f"worker {event.worker}{f' on {event.host}' if event.host else ''}"
                self._reading = f"{where} has been {event.doing} for {duration(event.since_s)}"
            case decisions.PlanInForce(generation=generation, policy=policy):
                self._generation, self._policy = generation, policy
                self.arriving = {}
            case decisions.Migration(arriving=arriving):
                self.arriving = arriving
            case kinds.Lost(worker=worker):
                self._unresolved.append(worker)
            case FailureRecord(generation=generation):
                self._costs = self._costs.with_failure(event, is_first=generation not in self._incident_generations)
                self._incident_generations.add(generation)
            case FailureCostRecord(failure_cost_steps=steps_lost):
                self._costs = self._costs.with_steps(steps_lost)
            case OutcomeRecord():
                self.outcome = event
            case kinds.CheckpointComplete(step=step, time=time):
                self._saved["checkpoint"], self._error = Saved(step, time), None
            case kinds.SnapshotComplete(step=step, time=time):
                self._saved["snapshot"] = Saved(step, time)
            case kinds.CheckpointFailed(step=step, error=error) | kinds.CheckpointUnreadable(step=step, error=error):
                self._error = f"step {step}: {error}"
            case kinds.Finished():
                self.ending = event

    def _condition(self, now: float, *, has_coordinator: bool | None) -> tuple[Condition, str]:
        if self.ending is not None:
            return self.ending.status, self.ending.reason
        if has_coordinator is False and self.events:
            return "lost", "its coordinator is gone without an end of the run; resume it"
        if self._session is None:
            return "waiting", "training has not begun"
        if self._unresolved:
            numbers = ", ".join(map(str, self._unresolved))
            return "recovering", f"lost {numbers}; no step is committed since"
        if self._reading:
            return "reading", self._reading
        if self._is_evaluating:
            return "evaluating", ""
        pace, latest = self.steps.recent, self.latest or now
        limit_s = max(_SILENT_S, _SILENT_STEPS * (0.0 if pace is None else pace.step_s))
        if now - latest > limit_s:
            return "silent", f"no record for {now - latest:.0f} s"
        return "training", ""

    @property
    def _goodput(self) -> float | None:
        """Return the share of the time since the start in which steps were trained that count, without stalls."""
        if self._session is None or self.latest is None or not len(self.steps):
            return None
        up_s = self._up_s + self.latest - self._session
        return min(1.0, self.steps.useful_s / up_s) if up_s > 0 else None

    def _next_failure_s(self, workers: int) -> float | None:
        """Return the expected seconds until the next incident, as learned from those of the run."""
        if not workers or self._session is None or self.latest is None:
            return None
        recovery = self.config.recovery
        model = FailureModel(
            worker_mtbf_s=recovery.worker_mtbf_hours * 3600,
            prior_failures=recovery.prior_weight,
            prior_host_failure_fraction=recovery.host_failure_fraction,
            failures=self._costs.incidents,
            worker_s=workers * (self._up_s + self.latest - self._session),
        )
        return model.horizon_s(workers)
