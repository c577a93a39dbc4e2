"""The state of a run, from its records so far."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from chameleon_ft.config import RunConfig
from chameleon_ft.errors import ConfigError
from chameleon_ft.observe.files import RunDirectory
from chameleon_ft.observe.live.report import Condition, Costs, RunReport, Saved
from chameleon_ft.observe.live.steps import StepHistory
from chameleon_ft.observe.live.workers import WorkerBoard
from chameleon_ft.observe.plans import GenerationPlan
from chameleon_ft.observe.recorder import RecordLine
from chameleon_ft.observe.records import RunStatus, StepRecord
from chameleon_ft.quantities import duration
from chameleon_ft.recovery import FailureModel

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
        self._plan: GenerationPlan | None = None
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
    def plan(self) -> GenerationPlan | None:
        """The plan in force; None if its file cannot be read."""
        if self._generation and (self._plan is None or self._plan.generation != self._generation):
            with suppress(ConfigError):
                self._plan = GenerationPlan.read(self._run.plan_file(self._generation))
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
