"""The results of a simulation: samples trained and time spent, by policy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from chameleon_ft.errors import ChameleonError
from chameleon_ft.plan.frozen_map import FrozenMap

_CONSERVATION_TOLERANCE = 1e-6


class ConservationError(ChameleonError):
    """Time, samples or worker-hours of a simulation do not add up: a defect of the simulator."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """Samples per second from `time_s` on, until the next record; 0 in a stall."""

    time_s: float
    samples_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """A decision and its outcome.

    Attributes:
        time_s: seconds since the trace began.
        cause: `lost`, `back`, `slow`, or `review` for a decision during training after a loss.
        chosen: the chosen kind of plan, such as `reroute`; `checkpoint` if no plan was feasible and all workers
            returned to a checkpoint, `wait` if too few workers are live.
        live: number of live workers.
        predicted_stall_s: predicted seconds without progress, including repeated work.
        stall_s: simulated seconds, fewer if the next event came first.
        predicted_step_s: predicted seconds of a step; infinite for `wait`.
        step_s: mean seconds of the steps until the next decision; None if there were none.
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
    """The result of a policy on a trace.

    Attributes:
        workers, duration_s: those of the trace.
        samples: The samples of steps that were not rolled back.
        failure_free_samples: The samples of the fastest known plan for all workers in this time, without any event.
        oracle_samples: The samples of the oracle; see `Oracle`.
        useful_s: seconds of steps that count.
        down_s: seconds in which no plan fitted the live workers.
        used_hours, idle_hours, dead_hours: worker-hours of workers in the active plan, of other live workers, and of
            lost workers; they add up to those of all workers.
        timeline: throughput at each change.
        checkpoint_s: seconds in which training stopped for a checkpoint.
        unfinished_s: seconds in the step that the end of the trace cut off.
        stall_by_cause: seconds of stalls after a decision, by its cause (`lost`, `back`, `slow`, `review`).
        lost_by_cause: seconds of lost work, in the interrupted step (`step`) or since the last checkpoint or snapshot
            (`checkpoint`, `snapshot`). All these seconds add up to `duration_s`.
        decisions: in order of time.

    Raises:
        ConservationError: a sum does not match, or the samples exceed those of the oracle.
    """

    policy: str
    workers: int
    duration_s: float
    samples: float
    failure_free_samples: float
    oracle_samples: float
    useful_s: float
    down_s: float
    used_hours: float
    idle_hours: float
    dead_hours: float
    timeline: tuple[Throughput, ...]
    checkpoint_s: float = 0.0
    unfinished_s: float = 0.0
    stall_by_cause: Mapping[str, float] = field(default_factory=dict)
    lost_by_cause: Mapping[str, float] = field(default_factory=dict)
    decisions: tuple[DecisionRecord, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "stall_by_cause", FrozenMap(dict(sorted(self.stall_by_cause.items()))))
        object.__setattr__(self, "lost_by_cause", FrozenMap(dict(sorted(self.lost_by_cause.items()))))
        seconds = [self.useful_s, self.checkpoint_s, self.unfinished_s, self.down_s]
        seconds += [*self.stall_by_cause.values(), *self.lost_by_cause.values()]
        self._check_sum("seconds", seconds, self.duration_s)
        hours = [self.used_hours, self.idle_hours, self.dead_hours]
        self._check_sum("worker-hours", hours, self.workers * self.duration_s / 3600)
        if self.samples < 0 or self._done > self.oracle_samples * (1 + _CONSERVATION_TOLERANCE):
            raise ConservationError(
                f"{self.policy}: {self._done} samples, where no policy can train more than {self.oracle_samples}"
            )

    def _check_sum(self, unit: str, parts: list[float], whole: float) -> None:
        if min(parts) < -_CONSERVATION_TOLERANCE * whole:
            raise ConservationError(f"{self.policy}: a share of the {unit} is negative: {min(parts)}")
        if abs(math.fsum(parts) - whole) > _CONSERVATION_TOLERANCE * whole:
            raise ConservationError(
                f"{self.policy}: {math.fsum(parts)} {unit} are accounted for, but there are {whole}"
            )

    @property
    def goodput(self) -> float:
        """Samples kept per second of the trace, including the completed part of the last step."""
        return self._done / self.duration_s

    @property
    def share_of_failure_free(self) -> float:
        """`goodput` as a share of the failure-free goodput."""
        return self._done / self.failure_free_samples

    @property
    def share_of_oracle(self) -> float:
        """`goodput` as a share of the oracle's; 1 if both are zero."""
        return self._done / self.oracle_samples if self.oracle_samples else 1.0

    @property
    def _done(self) -> float:
        return self.samples + (self.unfinished_s * self.timeline[-1].samples_per_s if self.unfinished_s else 0.0)

    @property
    def stall_s(self) -> float:
        """Seconds of stalls after decisions."""
        return math.fsum(self.stall_by_cause.values())

    @property
    def lost_s(self) -> float:
        """Seconds of lost work."""
        return math.fsum(self.lost_by_cause.values())

    @property
    def effective_time_ratio(self) -> float:
        """Share of the time that went into steps that count (ETTR)."""
        return self.useful_s / self.duration_s

    @property
    def decisions_by_kind(self) -> dict[str, int]:
        """Number of decisions for each kind of plan, the most frequent first."""
        counts = Counter(each.chosen for each in self.decisions)
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    @property
    def stall_error(self) -> float | None:
        """Mean absolute error of predicted stalls, relative to the mean prediction; None without predictions."""
        return _mean_error([(each.predicted_stall_s, each.stall_s) for each in self.decisions])

    @property
    def step_error(self) -> float | None:
        """Error of predicted step times, as in `stall_error`, over decisions followed by a step."""
        steps = [(each.predicted_step_s, each.step_s) for each in self.decisions if each.step_s is not None]
        return _mean_error(steps)

    def to_json(self) -> dict[str, object]:
        """Return the figures of `--json`; see `docs/simulator-internals.md`."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """The results of all policies on a trace, in the requested order.

    `trace` is the name of the trace, `start` a description of the initial plan; `lost_events` counts the events in
    which workers are lost.
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
        """The policies by goodput, the highest first."""
        return tuple(sorted(self.policies, key=lambda name: (-self.policies[name].goodput, name)))

    def to_json(self) -> dict[str, object]:
        """Return the figures of `--json`."""
        figures: dict[str, object] = {each.name: getattr(self, each.name) for each in fields(self)}
        return figures | {"policies": {name: result.to_json() for name, result in self.policies.items()}}


def _mean_error(pairs: list[tuple[float, float]]) -> float | None:
    finite = [(predicted, simulated) for predicted, simulated in pairs if math.isfinite(predicted)]
    total = math.fsum(predicted for predicted, _ in finite)
    return math.fsum(abs(simulated - predicted) for predicted, simulated in finite) / total if total else None
