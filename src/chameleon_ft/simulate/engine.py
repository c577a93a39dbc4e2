"""A policy's path through a trace: events, decisions, and the account of its time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from chameleon_ft.recovery import Checkpoints, FailureModel, Snapshots
from chameleon_ft.simulate.account import Account, Change, KnownRates, Migration, live_of
from chameleon_ft.simulate.parameters import Parameters
from chameleon_ft.simulate.planners.planner import Option, Planner, SimulatorState, WorkersPlan
from chameleon_ft.simulate.results import DecisionRecord, PolicyResult, Throughput
from chameleon_ft.simulate.traces.trace import Event, Trace


@dataclass(slots=True)
class PolicySimulation:
    """A simulation of one policy on a trace.

    Attributes:
        rates: receives the rates at which the live workers train under the planner.
        restarts: True if every loss sends the job back to a checkpoint.
        adapts_checkpoints: True if checkpoints are written whenever that pays, instead of at fixed intervals.
    """

    trace: Trace
    planner: Planner[Any]
    samples_per_step: int
    parameters: Parameters
    rates: KnownRates
    restarts: bool
    adapts_checkpoints: bool
    account: Account = field(default_factory=Account)
    decisions: list[DecisionRecord] = field(default_factory=list)
    _speeds: dict[int, float] = field(init=False)
    _rate: FailureModel = field(init=False)
    _active: Option[WorkersPlan] | None = None
    # Steps between two snapshots under the active option; zero for none.
    _snapshot_every: int = 0
    # Whether there has ever been a plan: the job begins as soon as one fits the live workers.
    _has_started: bool = False
    _last_incident_s: float = -math.inf
    # Worker-seconds of workers in the active plan, of other live workers, and of lost ones.
    _used_s: float = 0.0
    _idle_s: float = 0.0
    _dead_s: float = 0.0
    # The option that trains until a change to the active one begins.
    _trains: Option[WorkersPlan] | None = None
    # When it is decided during training: what to do with workers that are back, or after a continuation in place.
    _decides_s: float | None = None
    _deciding: str = ""
    # Whether slices of the optimizer's state have lost an owner since the last change.
    _lacks_copies: bool = False
    # Before the last decision, if its outcome is not recorded yet: steps, their seconds, and seconds of stalls; and the
    # work that is done again because of it.
    _before: tuple[int, float, float, float] | None = None

    def __post_init__(self) -> None:
        self._speeds = dict.fromkeys(range(self.trace.workers), 1.0)
        self._rate = self.parameters.rate

    def run(self, progress: Callable[[float], None] | None = None) -> None:
        """Simulate the whole trace; `progress` is called with the share of it that is done."""
        if not self.trace.events or self.trace.events[0].time_s > 0:
            self._start()
        for time_s, events in self.trace.groups():
            self._pass_to(time_s)
            self._handle(events)
            if progress is not None:
                progress(time_s / self.trace.duration_s)
        self._pass_to(self.trace.duration_s)
        self._record_outcome()

    def result(self, policy: str, *, failure_free_samples: float, oracle_samples: float) -> PolicyResult:
        """Return the result of a simulation that has run."""
        timeline: list[Throughput] = []
        for time_s, step_s in self.account.timeline:
            # A later change may come before earlier ones have taken effect.
            while timeline and timeline[-1].time_s >= time_s:
                timeline.pop()
            if time_s < self.trace.duration_s:
                timeline.append(Throughput(time_s, 0.0 if step_s == math.inf else self.samples_per_step / step_s))
        account = self.account
        return PolicyResult(
            policy=policy,
            workers=self.trace.workers,
            duration_s=self.trace.duration_s,
            samples=account.steps * self.samples_per_step,
            failure_free_samples=failure_free_samples,
            oracle_samples=oracle_samples,
            useful_s=account.useful_s,
            checkpoint_s=account.checkpoint_s,
            unfinished_s=account.part_s,
            stall_by_cause=account.stall_by_cause,
            lost_by_cause=account.lost_by_cause,
            down_s=account.down_s,
            used_hours=self._used_s / 3600,
            idle_hours=self._idle_s / 3600,
            dead_hours=self._dead_s / 3600,
            decisions=tuple(self.decisions),
            timeline=tuple(timeline),
        )

    def _pass_to(self, time_s: float) -> None:
        """Let time pass; decide during training when it is time to."""
        while self._decides_s is not None and self._decides_s <= time_s:
            self._advance(self._decides_s)
            # Layers have begun to move while the decision was due.
            if self.account.is_changing:
                self._decides_s = self.account.resume_s + self.parameters.weigh_s
            else:
                self._decide(self._deciding)
        self._advance(time_s)

    def _advance(self, time_s: float) -> None:
        seconds = time_s - self.account.clock_s
        used = 0 if self._active is None else len(self._active.plan.used)
        self._used_s += used * seconds
        self._idle_s += (len(self._speeds) - used) * seconds
        self._dead_s += (self.trace.workers - len(self._speeds)) * seconds
        self._rate = self._rate.observed(worker_s=len(self._speeds) * seconds)
        self.account.advance(time_s)

    def _handle(self, events: Sequence[Event]) -> None:
        """Apply the events of one moment, and decide."""
        lost: set[int] = set()
        for event in events:
            if event.kind == "lost":
                lost.update(event.workers)
                for worker in event.workers:
                    del self._speeds[worker]
            else:
                self._speeds.update(dict.fromkeys(event.workers, event.speed))
        if events[0].time_s == 0:
            # Workers that are absent from the start have not failed.
            self._start()
        elif lost:
            on_host = Counter(map(self.trace.host_of, lost))
            left = set(map(self.trace.host_of, self._speeds))
            whole = sum(count > 1 and host not in left for host, count in on_host.items())
            gap_s = self.account.clock_s - self._last_incident_s
            self._rate = self._rate.observed(failures=len(on_host), host_failures=whole, gap_s=gap_s)
            self._last_incident_s = self.account.clock_s
            self._decide("lost", frozenset(lost))
        elif all(event.kind == "slow" for event in events):
            self._decide("slow")
        else:
            self._handle_returns()

    def _handle_returns(self) -> None:
        """Decide on workers that are back, at once or once training has resumed.

        A return to a checkpoint that is under way is completed first, because to begin it again would take its whole
        time again. Only a job that always begins again (`restart`) takes them in at once.
        """
        now_s = decide_s = self.account.clock_s
        if self._active is not None:
            if not (self.restarts and self._active.from_checkpoint):
                decide_s = max(now_s, self.account.resume_s)
            decide_s += self.parameters.weigh_s
        if decide_s == now_s:
            self._decide("back")
        else:
            self._decides_s, self._deciding = decide_s, "back"

    def _start(self) -> None:
        # Nothing that happened before the start is known of failures.
        self._active = self.planner.start(self._state(self.parameters.rate)) if self._speeds else None
        if self._active is None:
            self.account.wait()
        else:
            self._has_started = True
            self._change_to(self._active, cause="start", finish_step=False)

    def _decide(self, cause: str, lost: frozenset[int] = frozenset()) -> None:
        if not self._has_started:
            self._start()
            return
        account, before = self.account, self._active
        hit = before is not None and not lost.isdisjoint(self._needed)
        if self.planner.salvages and lost and before is not None and not hit:
            # The lost worker was a spare, on which nothing depends.
            return
        self._decides_s = None
        state = self._state(
            self._rate,
            lost=lost if hit or before is None else frozenset(),
            repeat_s=account.part_s if hit else 0.0,
            in_place=self.planner.salvages and (hit or cause == "slow"),
        )
        option = self._active = self.planner.decide(state)
        if option is None:
            self._record_outcome()
            account.lose_step()
            if self.parameters.has_checkpoints:
                account.return_to_checkpoint()
            account.wait()
            self._record(cause, "wait", step_s=math.inf)
            return
        unchanged = before is not None and not option.stall_s and option.step_s == before.step_s
        # A switch has no stall either.
        is_switch = self.planner.salvages and before is not None and option.plan != before.plan
        if not unchanged or is_switch or state.interrupted:
            self._carry_out(option, before, cause, is_hit=hit)
        elif self._lacks_copies:
            # Slices that have lost an owner move to another one before the end of the present step.
            self._trains = option
            self._change_to(option, cause=cause, finish_step=True)
        else:
            self._note_rate(option)
        self._lacks_copies = self.planner.restores_copies and option.in_place and (hit or self._lacks_copies)
        if option.in_place:
            self._decides_s = max(account.clock_s, account.resume_s) + self.parameters.search_s
            self._deciding = "review"

    def _carry_out(
        self, option: Option[WorkersPlan], before: Option[WorkersPlan] | None, cause: str, *, is_hit: bool
    ) -> None:
        """Record a decision and begin its change."""
        account = self.account
        self._record_outcome()
        repeat_s = option.repeat_s
        if option.in_place:
            step_s = option.step_s + self._overhead_s
            repeat_s = account.salvage(step_s=step_s, share_s=option.share_s)
        elif is_hit or cause == "slow" or before is None:
            account.lose_step()
        if option.from_checkpoint and not option.saves_first:
            account.lose_step()
            if option.from_snapshot:
                account.return_to_snapshot(self._snapshot_every)
            else:
                account.return_to_checkpoint()
        stall_s = option.still_s + repeat_s
        self._record(cause, option.policy, step_s=option.step_s, stall_s=stall_s, repeat_s=repeat_s)
        if not account.is_changing:
            self._trains = before
        self._change_to(option, cause=cause, finish_step=not (is_hit or option.in_place))

    @property
    def _needed(self) -> frozenset[int]:
        """The workers whose loss interrupts training, or the change that is under way."""
        used = frozenset() if self._active is None else self._active.plan.used
        return used | self._trains.plan.used if self.account.is_changing and self._trains is not None else used

    def _state(
        self,
        rate: FailureModel,
        *,
        lost: frozenset[int] = frozenset(),
        repeat_s: float = 0.0,
        in_place: bool = False,
    ) -> SimulatorState:
        now_s, resume_s = self.account.clock_s, self.account.resume_s
        return SimulatorState(
            speeds=dict(self._speeds),
            lost=lost,
            repeat_s=repeat_s,
            running_s=max(0.0, now_s - resume_s),
            in_place=in_place,
            interrupted=now_s < resume_s,
            checkpoints=self._checkpoints,
            snapshots=self._snapshots,
            rate=rate,
        )

    @property
    def _overhead_s(self) -> float:
        """Seconds that a step takes beyond its estimate, its share of snapshots included."""
        parameters, every = self.parameters, self._snapshot_every
        return parameters.step_overhead_s + (parameters.snapshot_cost_s / every if every else 0.0)

    @property
    def _snapshots(self) -> Snapshots | None:
        """The snapshots, as long as there is a plan whose workers have some."""
        every, active = self._snapshot_every, self._active
        if not every or active is None:
            return None
        unsaved_s = self.account.unsnapped(every)[1] + self.account.part_s
        step_s = active.step_s + self._overhead_s
        return self.parameters.snapshots(unsaved_s=unsaved_s, step_s=step_s, rule=self.planner.snapshot_rule)

    @property
    def _checkpoints(self) -> Checkpoints:
        parameters = self.parameters
        return Checkpoints(
            unsaved_s=self.account.unsaved_s,
            # Without checkpoints, the first would come after the end.
            longest_s=min(parameters.checkpoint_interval_s, 2 * self.trace.duration_s),
            write_s=parameters.checkpoint_write_s if self.adapts_checkpoints else None,
        )

    def _change_to(self, option: Option[WorkersPlan], *, cause: str, finish_step: bool) -> None:
        parameters = self.parameters
        fatal, total = 1.0, 0.0
        if option.risk is not None and not self.restarts:
            fatal = self._rate.fatal_probability(option.risk)
            total = self._rate.total_loss_probability(option.risk)
        if self._snapshot_every:
            self.account.end_snapshots(self._snapshot_every)
        self._snapshot_every = 0
        if parameters.takes_snapshots and self.planner.salvages and option.has_snapshots:
            self._snapshot_every = parameters.steps_between_snapshots(
                step_s=option.step_s + self._overhead_s, return_gap_s=self._gap_s(fatal)
            )
        return_gap_s = self._gap_s(fatal + total)
        change = Change(
            cause=cause,
            stall_s=option.still_s,
            step_s=option.step_s + self._overhead_s,
            checkpoint_every_s=self._checkpoints.interval_s(step_s=option.step_s, return_gap_s=return_gap_s),
            write_s=parameters.checkpoint_write_s,
            saved=option.saves_first,
        )
        migration = None
        if option.migration_s:
            step_s = option.migration_step_s + self._overhead_s
            migration = Migration(seconds=option.migration_s, step_s=step_s, needs_switch=option.needs_switch)
        self.account.change(change, finish_step=finish_step, migration=migration)
        self._note_rate(option)

    def _gap_s(self, returns: float) -> float:
        """Return the mean seconds between two returns, which follow this share of incidents."""
        return self._rate.horizon_s(len(self._speeds)) / returns if returns else math.inf

    def _note_rate(self, option: Option[WorkersPlan]) -> None:
        step_s = option.step_s + self._overhead_s
        self.rates.note(live_of(self._speeds.values()), self.samples_per_step / step_s)

    def _record(self, cause: str, kind: str, *, step_s: float, stall_s: float = 0.0, repeat_s: float = 0.0) -> None:
        """Record a decision; `_record_outcome` replaces `stall_s` and `step_s`."""
        account = self.account
        self.decisions.append(
            DecisionRecord(
                time_s=account.clock_s,
                cause=cause,
                chosen=kind,
                live=len(self._speeds),
                predicted_stall_s=stall_s,
                stall_s=stall_s,
                predicted_step_s=step_s + self._overhead_s,
                step_s=None,
            )
        )
        self._before = account.steps, account.useful_s, account.still_s, repeat_s

    def _record_outcome(self) -> None:
        """Record the outcome of the last decision."""
        if self._before is None:
            return
        steps_before, useful_s, still_s, repeat_s = self._before
        steps = self.account.steps - steps_before
        self.decisions[-1] = replace(
            self.decisions[-1],
            stall_s=self.account.still_s - still_s + repeat_s,
            step_s=(self.account.useful_s - useful_s) / steps if steps > 0 else None,
        )
        self._before = None
