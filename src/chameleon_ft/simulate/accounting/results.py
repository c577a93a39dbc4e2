"""What a simulation says: of every policy how much it trained, and where the time went."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from chameleon_ft.errors import ChameleonError
from chameleon_ft.plan.frozen_map import FrozenMap

__all__ = ["ConservationError", "DecisionRecord", "PolicyResult", "Results", "Throughput"]

_CONSERVATION_TOLERANCE = 1e-6


class ConservationError(ChameleonError):
    """Time, samples or worker-hours of a simulation do not add up: a defect of the simulator."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """From `time_s` on, until the next, so many samples per second are trained; 0 while training stands still."""

    time_s: float
    samples_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """One decision, and what became of it.

    Attributes:
        time_s: when, in seconds since the trace began.
        cause: what led to it: `lost`, `back` or `slow`.
        chosen: the kind of plan that was chosen, such as `reroute`; `checkpoint` where all went back to one because
            nothing else could be done, `wait` where too few workers are live.
        live: workers that were live.
        predicted_stall_s: seconds in which nothing is gained, work that is done again included, as predicted.
        stall_s: the same, as simulated: less if the next event came first.
        predicted_step_s: seconds of a step as predicted; infinite for `wait`.
        step_s: mean seconds of the steps that followed, until the next decision; None if there were none.
    """

    time_s: float
    cause: str
    chosen: str
    live: int
    predicted_stall_s: float
    stall_s: float
    predicted_step_s: float
    step_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResult:
    """What a policy made of a trace.

    Seconds of `useful_s`, `checkpoint_s`, `unfinished_s`, `stall_by_cause`, `lost_by_cause` and `down_s` make up
    `duration_s`. Worker-hours of `used_hours`, `idle_hours` and `dead_hours` make up those of all workers.

    Attributes:
        policy: its name.
        workers: workers of the trace.
        duration_s: seconds of the trace.
        samples: samples that were trained and count: those of steps that were not given up later.
        failure_free_samples: what the fastest plan that is known for all workers trains in the time without any event.
        oracle_samples: what the oracle trains; see `oracle`.
        useful_s: seconds of steps that count.
        checkpoint_s: seconds in which training stood still for a checkpoint to be written.
        unfinished_s: seconds in the step that the end of the trace cut off.
        stall_by_cause: seconds of standing still after a decision, by what led to it (`lost`, `back`, `slow`).
        lost_by_cause: seconds of work done in vain: `step` (the interrupted one) or `checkpoint` (all since then).
        down_s: seconds in which no plan was possible, for want of workers.
        used_hours: worker-hours of workers that were part of the plan in force, stalls included.
        idle_hours: of live ones that were not.
        dead_hours: of lost ones.
        decisions: all of them, in order.
        timeline: throughput from each moment at which it changed.
    """

    policy: str
    workers: int
    duration_s: float
    samples: float
    failure_free_samples: float
    oracle_samples: float
    useful_s: float
    checkpoint_s: float
    unfinished_s: float
    stall_by_cause: Mapping[str, float]
    lost_by_cause: Mapping[str, float]
    down_s: float
    used_hours: float
    idle_hours: float
    dead_hours: float
    decisions: tuple[DecisionRecord, ...]
    timeline: tuple[Throughput, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "stall_by_cause", FrozenMap(dict(sorted(self.stall_by_cause.items()))))
        object.__setattr__(self, "lost_by_cause", FrozenMap(dict(sorted(self.lost_by_cause.items()))))
        self._check_time()
        self._check_workers()
        self._check_samples()

    @property
    def goodput(self) -> float:
        """Samples that count, per second of the trace; of the step that the end cut off, as many as had been done."""
        return self._done / self.duration_s

    @property
    def share_of_failure_free(self) -> float:
        """The same as a share of what would have been trained without any event."""
        return self._done / self.failure_free_samples

    @property
    def share_of_oracle(self) -> float:
        """The same as a share of the oracle's; 1 where neither trained any."""
        return self._done / self.oracle_samples if self.oracle_samples else 1.0

    @property
    def _done(self) -> float:
        return self.samples + (self.unfinished_s * self.timeline[-1].samples_per_s if self.unfinished_s else 0.0)

    @property
    def stall_s(self) -> float:
        """Seconds of standing still after decisions."""
        return math.fsum(self.stall_by_cause.values())

    @property
    def lost_s(self) -> float:
        """Seconds of work that was done in vain."""
        return math.fsum(self.lost_by_cause.values())

    @property
    def effective_time_ratio(self) -> float:
        """Share of the time that went into steps that count (ETTR)."""
        return self.useful_s / self.duration_s

    @property
    def decisions_by_kind(self) -> dict[str, int]:
        """How often each kind of plan was chosen, most often first."""
        counts: dict[str, int] = {}
        for each in self.decisions:
            counts[each.chosen] = counts.get(each.chosen, 0) + 1
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    @property
    def stall_error(self) -> float | None:
        """Mean absolute difference of simulated and predicted stall, relative to the mean predicted; None without."""
        return _mean_error([(each.predicted_stall_s, each.stall_s) for each in self.decisions])

    @property
    def step_error(self) -> float | None:
        """The same of the seconds of a step, over decisions that a step followed."""
        steps = [(each.predicted_step_s, each.step_s) for each in self.decisions if each.step_s is not None]
        return _mean_error(steps)

    def to_json(self) -> dict[str, object]:
        """The figures that stand in `--json`; see `docs/simulator-internals.md`."""
        return {
            "goodput": self.goodput,
            "share_of_failure_free": self.share_of_failure_free,
            "share_of_oracle": self.share_of_oracle,
            "samples": self.samples,
            "effective_time_ratio": self.effective_time_ratio,
            "stall_s": self.stall_s,
            "stall_by_cause": dict(self.stall_by_cause),
            "lost_s": self.lost_s,
            "lost_by_cause": dict(self.lost_by_cause),
            "checkpoint_s": self.checkpoint_s,
            "down_s": self.down_s,
            "used_hours": self.used_hours,
            "idle_hours": self.idle_hours,
            "dead_hours": self.dead_hours,
            "decisions": len(self.decisions),
            "decisions_by_kind": self.decisions_by_kind,
            "stall_error": self.stall_error,
            "step_error": self.step_error,
        }

    def _check_time(self) -> None:
        parts = [
            *(self.useful_s, self.checkpoint_s, self.unfinished_s, self.down_s),
            *(self.stall_by_cause.values()),
            *(self.lost_by_cause.values()),
        ]
        if min(parts) < -_CONSERVATION_TOLERANCE * self.duration_s:
            raise ConservationError(f"{self.policy}: a share of the time is negative: {min(parts)} s")
        if abs(math.fsum(parts) - self.duration_s) > _CONSERVATION_TOLERANCE * self.duration_s:
            raise ConservationError(
                f"{self.policy}: {math.fsum(parts)} s are accounted for, but the trace has {self.duration_s} s"
            )

    def _check_workers(self) -> None:
        hours = self.used_hours + self.idle_hours + self.dead_hours
        wanted = self.workers * self.duration_s / 3600
        if min(self.used_hours, self.idle_hours, self.dead_hours) < -_CONSERVATION_TOLERANCE * wanted:
            raise ConservationError(f"{self.policy}: a share of the worker-hours is negative")
        if abs(hours - wanted) > _CONSERVATION_TOLERANCE * wanted:
            raise ConservationError(f"{self.policy}: {hours} worker-hours are accounted for, but there are {wanted}")

    def _check_samples(self) -> None:
        if self.samples < 0 or self._done > self.oracle_samples * (1 + _CONSERVATION_TOLERANCE):
            raise ConservationError(
                f"{self.policy}: {self._done} samples, where no policy can train more than {self.oracle_samples}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What all policies made of a trace, in the order in which they were asked for.

    Attributes:
        trace: name of the trace.
        workers: workers of the cluster.
        duration_s: seconds of the trace.
        start: what all began with, in words.
        samples_per_step: samples of a step.
        lost_events: groups of events with a loss.
        policies: name -> result.
    """

    trace: str
    workers: int
    duration_s: float
    start: str
    samples_per_step: int
    lost_events: int
    policies: Mapping[str, PolicyResult]

    def __post_init__(self) -> None:
        object.__setattr__(self, "policies", FrozenMap(self.policies))

    @property
    def ranking(self) -> tuple[str, ...]:
        """The policies by goodput, most first."""
        return tuple(sorted(self.policies, key=lambda name: (-self.policies[name].goodput, name)))

    def to_json(self) -> dict[str, object]:
        """The figures that stand in `--json`."""
        return {
            "trace": self.trace,
            "workers": self.workers,
            "duration_s": self.duration_s,
            "start": self.start,
            "samples_per_step": self.samples_per_step,
            "lost_events": self.lost_events,
            "policies": {name: result.to_json() for name, result in self.policies.items()},
        }


def _mean_error(pairs: list[tuple[float, float]]) -> float | None:
    pairs = [(predicted, simulated) for predicted, simulated in pairs if math.isfinite(predicted)]
    total = math.fsum(predicted for predicted, _ in pairs)
    if not total:
        return None
    return math.fsum(abs(simulated - predicted) for predicted, simulated in pairs) / total
