"""A policy's way through a trace: what happens, what is decided, and where the time goes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from chameleon_ft.recovery import Checkpoints, FailureModel
from chameleon_ft.simulate.accounting.account import Account
from chameleon_ft.simulate.accounting.oracle import KnownRates, live_of
from chameleon_ft.simulate.accounting.results import DecisionRecord, Throughput
from chameleon_ft.simulate.parameters import Parameters
from chameleon_ft.simulate.planners.options import Chosen, Option, Planner, SimulatorState
from chameleon_ft.simulate.traces.trace import Event, Trace

__all__ = ["Course", "course_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What became of a policy, before it is compared.

    Attributes:
        account: where the time went.
        used_hours, idle_hours, dead_hours: worker-hours, see `PolicyResult`.
        decisions: all of them.
        timeline: throughput from each moment at which it changed.
    """

    account: Account
    used_hours: float
    idle_hours: float
    dead_hours: float
    decisions: tuple[DecisionRecord, ...]
    timeline: tuple[Throughput, ...]


def course_of(
    trace: Trace,
    planner: Planner,
    *,
    samples_per_step: int,
    parameters: Parameters,
    known: KnownRates,
    restarts: bool,
    adapts_checkpoints: bool,
    progress: Callable[[float], None] | None = None,
) -> Course:
    """Let a planner live through a trace.

    Args:
        trace: what happens to the workers.
        planner: what to do about it.
        samples_per_step: B.
        parameters: what is assumed.
        known: is told how fast the live workers train under this planner.
        restarts: whether every loss sends it back to a checkpoint.
        adapts_checkpoints: whether checkpoints are written whenever that pays, or at fixed intervals.
        progress: is called with the share of the trace that is done.
    """
    run = _Run(trace, planner, samples_per_step, parameters, known, restarts, adapts_checkpoints)
    for time_s, events in trace.groups():
        run.pass_to(time_s)
        run.happens(events)
        if progress is not None:
            progress(time_s / trace.duration_s)
    run.pass_to(trace.duration_s)
    return run.course()


@dataclass(slots=True)
class _Hours:
    """Worker-seconds."""

    used: float = 0.0
    idle: float = 0.0
    dead: float = 0.0


@dataclass(slots=True)
class _Open:
    """A decision whose consequences are not known yet."""

    record: DecisionRecord
    steps: int
    useful_s: float
    repeat_s: float
    begin_s: float


@dataclass(slots=True)
class _Run:
    trace: Trace
    planner: Planner
    samples_per_step: int
    parameters: Parameters
    known: KnownRates
    restarts: bool
    adapts_checkpoints: bool
    account: Account = field(default_factory=Account)
    speeds: dict[int, float] = field(init=False)
    chosen: Chosen | None = None
    has_started: bool = False
    """Whether there has ever been a plan: the job begins as soon as one fits the live workers."""
    rate: FailureModel = field(init=False)
    last_incident_s: float = -math.inf
    hours: _Hours = field(default_factory=_Hours)
    decisions: list[DecisionRecord] = field(default_factory=list)
    open: _Open | None = None
    weighs_at_s: float | None = None
    """When it is decided what to do with workers that are back."""

    def __post_init__(self) -> None:
        self.speeds = dict.fromkeys(range(self.trace.workers), 1.0)
        self.rate = self.parameters.rate
        if not self.trace.events or self.trace.events[0].time_s > 0:
            self._start()

    def pass_to(self, time_s: float) -> None:
        """Let time pass, and weigh what to do with those who are back when it is time to."""
        while self.weighs_at_s is not None and self.weighs_at_s <= time_s:
            self._pass_to(self.weighs_at_s)
            self._decide(frozenset(), "back")
        self._pass_to(time_s)

    def _pass_to(self, time_s: float) -> None:
        seconds = time_s - self.account.clock_s
        used = 0 if self.chosen is None else len(self.chosen.used)
        self.hours.used += used * seconds
        self.hours.idle += (len(self.speeds) - used) * seconds
        self.hours.dead += (self.trace.workers - len(self.speeds)) * seconds
        self.rate = self.rate.observed(worker_s=len(self.speeds) * seconds)
        self.account.advance(time_s)

    def happens(self, events: Sequence[Event]) -> None:
        lost: set[int] = set()
        for event in events:
            if event.kind == "lost":
                lost.update(event.workers)
                for worker in event.workers:
                    del self.speeds[worker]
            else:
                self.speeds.update(dict.fromkeys(event.workers, event.speed))
        if events[0].time_s == 0:
            # Those that are not there from the start have not failed.
            self._start()
            return
        hit = Counter(map(self.trace.host_of, lost))
        left = set(map(self.trace.host_of, self.speeds))
        whole = sum(count > 1 and host not in left for host, count in hit.items())
        if lost:
            gap_s = self.account.clock_s - self.last_incident_s
            self.rate = self.rate.observed(failures=len(hit), host_failures=whole, gap_s=gap_s)
            self.last_incident_s = self.account.clock_s
        if lost:
            self._decide(frozenset(lost), "lost")
        elif all(event.kind == "slow" for event in events):
            self._decide(frozenset(), "slow")
        else:
            self._weigh_later()

    def _weigh_later(self) -> None:
        """Decide on workers that are back once training has resumed.

        A return to a checkpoint that is under way is completed first, because to begin it again would take its whole
        time again. Only a run that always begins again (`restart`) takes them in at once.
        """
        now_s = self.account.clock_s
        if self.chosen is None:
            self._decide(frozenset(), "back")
            return
        begins_anew = self.restarts and self.chosen.option.from_checkpoint and now_s < self.account.resume_s
        at_s = (now_s if begins_anew else max(now_s, self.account.resume_s)) + self.parameters.weigh_s
        if at_s == now_s:
            self._decide(frozenset(), "back")
        else:
            self.weighs_at_s = at_s

    def _start(self) -> None:
        self.chosen = self.planner.start(dict(self.speeds), self._checkpoints) if self.speeds else None
        if self.chosen is None:
            self.account.waits()
        else:
            self.has_started = True
            self._go_on(self.chosen, cause="start", finish_step=False)

    def _decide(self, lost: frozenset[int], cause: str) -> None:
        self.weighs_at_s = None
        if not self.has_started:
            self._start()
            return
        account, before = self.account, self.chosen
        hit = before is not None and not lost.isdisjoint(before.used)
        slowed = cause == "slow"
        horizon_s = self.rate.horizon_s(max(1, len(self.speeds)))
        state = SimulatorState(
            speeds=dict(self.speeds),
            lost=lost if hit or before is None else frozenset(),
            horizon_s=horizon_s,
            repeat_s=account.part_s if hit else 0.0,
            running_s=max(0.0, account.clock_s - account.resume_s),
            interrupted=account.clock_s < account.resume_s,
            checkpoints=self._checkpoints,
            rate=self.rate,
        )
        self.chosen = self.planner.decide(state)
        if self.chosen is None:
            self._close()
            account.lose_step()
            if self.parameters.has_checkpoints:
                account.back_to_checkpoint()
            account.waits()
            self._opened(state, cause, "wait", math.inf, 0.0)
            return
        option = self.chosen.option
        unchanged = before is not None and not option.stall_s and option.step_s == before.option.step_s
        if unchanged and not state.interrupted:
            self._note(option)
            return
        self._close()
        if hit or slowed or before is None:
            account.lose_step()
        if option.from_checkpoint and not option.saves_first:
            account.lose_step()
            account.back_to_checkpoint()
        self._opened(state, cause, option.kind, option.step_s, option.predicted_stall_s, option.repeat_s)
        self._go_on(self.chosen, cause=cause, finish_step=not hit)

    @property
    def _checkpoints(self) -> Checkpoints:
        parameters = self.parameters
        return Checkpoints(
            unsaved_s=self.account.unsaved_s,
            # Where there are no checkpoints, the first would come after the end.
            longest_s=min(parameters.checkpoint_interval_s, 2 * self.trace.duration_s),
            write_s=parameters.checkpoint_write_s if self.adapts_checkpoints else None,
        )

    def _go_on(self, chosen: Chosen, *, cause: str, finish_step: bool) -> None:
        parameters, option = self.parameters, chosen.option
        returns = 1.0
        if chosen.risk is not None and not self.restarts:
            returns = self.rate.fatal_probability(chosen.risk) + self.rate.total_loss_probability(chosen.risk)
        return_gap_s = self.rate.horizon_s(max(1, len(self.speeds))) / returns if returns else math.inf
        self.account.changes(
            step_s=option.step_s + parameters.step_overhead_s,
            stall_s=option.stall_s,
            cause=cause,
            checkpoint_every_s=self._checkpoints.interval_s(step_s=option.step_s, return_gap_s=return_gap_s),
            write_s=parameters.checkpoint_write_s,
            finish_step=finish_step,
            saved=option.saves_first,
        )
        self._note(option)

    def _note(self, option: Option) -> None:
        step_s = option.step_s + self.parameters.step_overhead_s
        self.known.note(live_of(self.speeds.values()), self.samples_per_step / step_s)

    def _opened(
        self, state: SimulatorState, cause: str, kind: str, step_s: float, stall_s: float, repeat_s: float = 0.0
    ) -> None:
        record = DecisionRecord(
            time_s=self.account.clock_s,
            cause=cause,
            chosen=kind,
            live=len(state.speeds),
            predicted_stall_s=stall_s,
            stall_s=stall_s,
            predicted_step_s=step_s + self.parameters.step_overhead_s,
            step_s=None,
        )
        account = self.account
        still_s = math.fsum(account.stall_by_cause.values())
        self.open = _Open(record, account.steps, account.useful_s, repeat_s, still_s)

    def _close(self) -> None:
        """Put down what has become of the last decision."""
        if self.open is None:
            return
        account, opened = self.account, self.open
        steps = account.steps - opened.steps
        self.decisions.append(
            replace(
                opened.record,
                stall_s=math.fsum(account.stall_by_cause.values()) - opened.begin_s + opened.repeat_s,
                step_s=(account.useful_s - opened.useful_s) / steps if steps > 0 else None,
            )
        )
        self.open = None

    def course(self) -> Course:
        self._close()
        return Course(
            account=self.account,
            used_hours=self.hours.used / 3600,
            idle_hours=self.hours.idle / 3600,
            dead_hours=self.hours.dead / 3600,
            decisions=tuple(self.decisions),
            timeline=_throughput(self.account.timeline, self.samples_per_step, self.trace.duration_s),
        )


def _throughput(changes: Sequence[tuple[float, float]], samples: int, duration_s: float) -> tuple[Throughput, ...]:
    """By time; what a later change came before is left out."""
    found: list[Throughput] = []
    for time_s, step_s in changes:
        while found and found[-1].time_s >= time_s:
            found.pop()
        if time_s < duration_s:
            found.append(Throughput(time_s, 0.0 if step_s == math.inf else samples / step_s))
    return tuple(found)
