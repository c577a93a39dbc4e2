"""The state of a run, from its records so far.

The state of each worker of a run, from its events.

The report on a run at one moment: what `chameleon status` prints, and the page and the metrics show.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal, Self, TypeAlias, get_args

from chameleon_ft.config import RunConfig
from chameleon_ft.errors import ConfigError
from chameleon_ft.events.records import RunStatus, StepRecord
from chameleon_ft.quantities import duration
from chameleon_ft.recovery import FailureModel
from chameleon_ft.recovery.generation import GenerationSpec
from chameleon_ft.report.steps import Pace, StepHistory
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.plans import read_generation
from chameleon_ft.storage.recorder import RecordLine

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
    _detected: set[int] = field(default_factory=set)  # lost workers whose recovery is not recorded yet
    _states: dict[int, WorkerState] = field(default_factory=dict)

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Take in an event."""
        match name:
            case "started":
                self.speeds.clear()
                self.link_speeds.clear()
                self._detected.clear()
                self._states = {worker: "live" for pipeline in fields["pipelines"] for worker in pipeline}
            case "host_joined":
                self._set("joining", *fields["workers"])
            case "respawn":
                self._set("joining", fields["worker"])
            case "joined":
                self._set("live", fields["worker"])  # a spare, until a plan uses it
                self.hosts[fields["worker"]] = fields["host"]
            case "lost":
                self._lost(fields)
                self._detected.add(fields["worker"])
            case "failure" if fields["worker"] in self._detected:
                self._detected.discard(fields["worker"])  # it may be starting again by now
            case "failure":
                self._lost(fields)
            case "join_failed" | "blocklisted":
                self._set("lost", fields["worker"])
            case "draining":
                self._set("draining", *fields["workers"])
            case "drain_failed":
                self._set("live", *fields["workers"])
            case "drained" | "left":
                self._set("left", fields["worker"])
            case "slow":
                self.speeds[fields["worker"]] = fields["speed"]
            case "recovered":
                self.speeds.pop(fields["worker"], None)
            case "slow_link":
                self.link_speeds[_pair(fields)] = fields["speed"]
            case "recovered_link":
                self.link_speeds.pop(_pair(fields), None)

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

    def _lost(self, fields: Mapping[str, Any]) -> None:
        self._set("lost", fields["worker"])
        if host := fields.get("host"):
            self.hosts[fields["worker"]] = host

    def _set(self, state: WorkerState, *workers: int) -> None:
        for worker in workers:
            self._states[worker] = state
            if state in ("lost", "left", "joining"):
                self.speeds.pop(worker, None)


def _pair(fields: Mapping[str, Any]) -> tuple[int, int]:
    first, second = sorted(fields["workers"])
    return first, second


Condition: TypeAlias = Literal["waiting", "training", "reading", "recovering", "silent", "lost"] | RunStatus

CONDITIONS: Final[Mapping[Condition, str]] = {
    "waiting": "workers are joining, or load their layers",
    "training": "steps are committed",
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

    def with_failure(self, phases: Mapping[str, float], *, cause: str, repeated_s: float, is_first: bool) -> Self:
        """Add a lost worker. `is_first`: whether it is the first one of its incident, whose phases count."""
        causes = dict(Counter({**self.causes, cause: self.causes.get(cause, 0) + 1}).most_common())
        if not is_first:
            return replace(self, failures=self.failures + 1, causes=causes)
        added = {phase.removesuffix("_s"): seconds for phase, seconds in phases.items()} | {"repeat": repeated_s}
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
        steps: those of the whole run.
        pace: of the newest steps.
        earlier: the pace to compare with.
        tokens: loss terms trained so far, each counted once.
        goodput: share of the time in which steps were trained that count, without stalls.
        eta_s: seconds until the last step, at this pace and goodput; None if it has ended or no step is committed.
        generation: of the plan in force; 0 before the first.
        policy: that proposed it.
        workers: by state.
        hosts: of workers, as far as events name them.
        speeds: of slow workers, relative to the others.
        link_speeds: of slow links, "WORKER-WORKER".
        checkpoint: the newest complete one.
        checkpoint_error: why the one after it failed, or cannot be read; None if none has.
        snapshot: the newest complete one.
        costs: of failures.
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


_SILENT_STEPS: Final = 10.0  # usual steps without a commit after which a run counts as silent
_SILENT_S: Final = 10.0  # and seconds
_PHASES: Final = ("detect_s", "stop_s", "decide_s", "regroup_s", "transfer_s")


@dataclass(frozen=True, slots=True)
class Ending:
    status: RunStatus
    reason: str


class RunState:
    """Collects the records of a run in their order, and reports what follows from them.

    Attributes:
        config: of the run, as it was when this was made.
        steps: the committed steps.
        workers: the state of each worker.
        events: all events, in their order.
        arriving: layers that move to a worker while the run trains, such as "0-3, 7", by its number.
        ending: how the run ended; None while it is live.
        latest: time of the newest record, in Unix seconds of the clock of the records; None before the first.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self.config: RunConfig = run.config()
        self.steps = StepHistory()
        self.workers = WorkerBoard()
        self.events: list[Mapping[str, Any]] = []
        self.arriving: Mapping[int, str] = {}
        self._costs = Costs()
        self._began: float | None = None
        self._session: float | None = None  # when it was started or last resumed
        self._up_s = 0.0  # seconds of the sessions before
        self.latest: float | None = None
        self.ending: Ending | None = None
        self._unresolved: list[int] = []  # workers that are lost, with no step committed since
        self._read = ""  # a sample that takes long to read, by which worker; likewise
        self._generation, self._policy = 0, ""
        self._saved: dict[str, Saved] = {}
        self._error: str | None = None
        self._incident_generations: set[int] = set()
        self._plan: GenerationSpec | None = None
        self._total_steps = self.config.steps

    def add(self, line: RecordLine) -> None:
        """Take in a line of a file of the run."""
        name, fields = line
        if name == "metrics":
            self.steps.add(StepRecord.from_json(fields))
            self._unresolved.clear()
            self._read = ""
        else:
            self._event(fields["event"], fields["time"], fields)
        self.latest = max(fields["time"], self.latest or 0.0)

    def report(self, now: float, *, has_coordinator: bool | None) -> RunReport:
        """Return the state of the run.

        Args:
            now: in Unix seconds.
            has_coordinator: whether its coordinator lives; None: not known.
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
        left = self._total_steps - (0 if last is None else last.step + 1)
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
            steps=self._total_steps,
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

    def _event(self, name: str, time: float, fields: Mapping[str, Any]) -> None:
        self.events.append(fields)
        self.workers.event(name, fields)
        match name:
            case "started":
                if self._session is not None and self.latest is not None:
                    self._up_s += self.latest - self._session
                self._began = time if self._began is None else self._began
                self._session, self.ending, self._total_steps = time, None, fields["steps"]
                self._unresolved.clear()
                self._read = ""
            case "waiting" if "limit_s" in fields:
                self._read = f"worker {fields['worker']} has been {fields['doing']} for {duration(fields['since_s'])}"
            case "plan":
                self._generation, self._policy = fields["generation"], fields["policy"]
                self.arriving = {}
            case "migration":
                self.arriving = {int(worker): layers for worker, layers in fields.get("arriving", {}).items()}
            case "lost":
                self._unresolved.append(fields["worker"])
            case "failure":
                self._failed(fields)
            case "failure_cost":
                self._costs = self._costs.with_steps(fields["failure_cost_steps"])
            case "checkpoint" | "snapshot":
                self._saved[name] = Saved(step=fields["step"], time=time)
                self._error = None if name == "checkpoint" else self._error
            case "checkpoint_failed" | "checkpoint_unreadable":
                self._error = f"step {fields['step']}: {fields['error']}"
            case "finished":
                self.ending = Ending(fields["status"], fields["reason"])

    def _failed(self, fields: Mapping[str, Any]) -> None:
        is_first = fields["generation"] not in self._incident_generations
        self._incident_generations.add(fields["generation"])
        phases = {phase: fields.get(phase) or 0.0 for phase in _PHASES}
        self._costs = self._costs.with_failure(
            phases, cause=fields["cause"], repeated_s=fields.get("repeated_s") or 0.0, is_first=is_first
        )

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
        if self._read:
            return "reading", self._read
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
