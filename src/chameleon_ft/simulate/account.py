"""An account of the time of a simulation, second by second, and the oracle, a bound for all policies."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from chameleon_ft.errors import ConfigError
from chameleon_ft.simulate.results import PolicyResult, Throughput
from chameleon_ft.simulate.traces.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A stall, and the training that follows it.

    Attributes:
        cause: the key of the stall in `Account.stall_by_cause`.
        stall_s: seconds of standing still.
        step_s: seconds of a step from then on.
        checkpoint_every_s: seconds of steps between two checkpoints.
        write_s: seconds that each checkpoint takes.
        saved: True if the stall begins with a checkpoint.
    """

    cause: str
    stall_s: float
    step_s: float
    checkpoint_every_s: float
    write_s: float
    saved: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """Layers that move during training, before a change.

    Attributes:
        seconds: until all have arrived.
        step_s: seconds of a step meanwhile.
        needs_switch: True if they begin to move at the end of the present step, and not at once.
    """

    seconds: float
    step_s: float
    needs_switch: bool


@dataclass(slots=True)
class _Training:
    """Steps of equal length, with a checkpoint after the first `first` steps and then after every `every`.

    `passed_s` seconds after their begin, `done` steps and `written` checkpoints have been counted.
    """

    step_s: float
    first: int
    every: int
    write_s: float
    done: int = 0
    written: int = 0
    passed_s: float = 0.0

    def until_boundary_s(self, seconds: float) -> float:
        """Return the seconds until the step or checkpoint ends that is under way in so many seconds."""
        later = replace(self, passed_s=self.passed_s + seconds)
        done, written, writing_s = later.progress()
        if writing_s:
            return seconds + self.write_s - writing_s
        part_s = later.passed_s - done * self.step_s - written * self.write_s
        return seconds + (self.step_s - part_s if part_s > 0 else 0.0)

    def progress(self) -> tuple[int, int, float]:
        """Return (steps done, checkpoints written, seconds of the one that is being written) by now."""
        first_s = self.first * self.step_s + self.write_s
        if self.passed_s < first_s:
            steps = min(self.first, int(self.passed_s / self.step_s))
            return steps, 0, max(0.0, self.passed_s - self.first * self.step_s)
        cycle_s = self.every * self.step_s + self.write_s
        cycles = int((self.passed_s - first_s) / cycle_s)
        rest_s = self.passed_s - first_s - cycles * cycle_s
        steps = min(self.every, int(rest_s / self.step_s))
        writing_s = max(0.0, rest_s - self.every * self.step_s)
        return self.first + cycles * self.every + steps, 1 + cycles, writing_s


@dataclass(slots=True)
class Account:
    """The state of a job in time: in a stall, training, or down because too few workers are live.

    Every second is counted as it passes; `PolicyResult` explains the counts, and checks that they add up.

    Attributes:
        steps: steps that count.
        part_s: seconds in the step that is being computed.
        clock_s: seconds that have passed.
        resume_s: time at which training resumes, or resumed.
        timeline: (time, seconds of a step; infinite if there are none) at each change.
    """

    useful_s: float = 0.0
    checkpoint_s: float = 0.0
    down_s: float = 0.0
    steps: int = 0
    stall_by_cause: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    lost_by_cause: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    part_s: float = 0.0
    clock_s: float = 0.0
    resume_s: float = 0.0
    timeline: list[tuple[float, float]] = field(default_factory=list)
    _cause: str = ""
    _training: _Training | None = None
    # A change that waits for the end of a step, and its time; and one that follows once layers have moved for so long.
    _change: Change | None = None
    _change_s: float = 0.0
    _following: tuple[Change, float] | None = None
    _writing_s: float = 0.0
    # Steps since the last checkpoint, and their seconds: the loss of a return to it.
    _unsaved: int = 0
    # The step of the snapshot from which the next ones are counted.
    _snapped: int = 0
    _unsaved_s: float = 0.0

    @property
    def unsaved_s(self) -> float:
        """Seconds of steps since the last checkpoint, the current one included."""
        return self._unsaved_s + self.part_s

    @property
    def still_s(self) -> float:
        """Seconds of stalls."""
        return math.fsum(self.stall_by_cause.values())

    def advance(self, to_s: float) -> None:
        """Let time pass."""
        while self._change is not None and to_s >= self._change_s:
            self._advance(self._change_s)
            self._make(self._change)
        self._advance(to_s)

    @property
    def is_changing(self) -> bool:
        """Whether a change waits for the end of a migration or of a step, and training continues until then."""
        return self._change is not None

    def change(self, change: Change, *, finish_step: bool, migration: Migration | None = None) -> None:
        """Begin a change at once, or with `finish_step` at the end of the current step or checkpoint.

        With a migration, at the end of the step in which the last layer arrives. A change that begins at once continues
        the current step, unless that was given up.
        """
        training = self._training
        if not finish_step or training is None or not (self.is_changing or self.clock_s >= self.resume_s):
            self._begin(change)
            return
        if migration is None:
            self._await(change, training.until_boundary_s(0.0))
            return
        during = replace(change, stall_s=0.0, step_s=migration.step_s, saved=False)
        if migration.needs_switch or self._writing_s:
            self._await(during, training.until_boundary_s(0.0), (change, migration.seconds))
            return
        if migration.step_s != training.step_s:
            self._begin(during)
        assert self._training is not None
        self._await(change, self._training.until_boundary_s(migration.seconds))

    def wait(self) -> None:
        """Be down from now on."""
        self._training = self._change = None
        self.timeline.append((self.clock_s, math.inf))

    def lose_step(self) -> None:
        """Give up the current step, and a change that has not begun; another change or a wait follows."""
        if self.part_s:
            self.lost_by_cause["step"] += self.part_s
        self.part_s = self._writing_s = 0.0
        self._training = self._change = None

    def salvage(self, *, step_s: float, share_s: float) -> float:
        """Keep the current step for a change that begins at once; give up a change that has not begun.

        Without the stall, the step takes `share_s` longer than those before, or as long as those after the change if
        that is more: the part of it that has to be repeated is given up.

        Args:
            step_s: seconds of a step after the change.
            share_s: seconds by which the rest of the step takes longer.

        Returns:
            The seconds that are given up.
        """
        assert self._training is not None
        before_s = self._training.step_s
        kept_s = self.part_s * min(1.0, step_s / before_s) - max(0.0, share_s - max(0.0, step_s - before_s))
        lost_s = self.part_s - max(0.0, kept_s)
        if lost_s:
            self.lost_by_cause["step"] += lost_s
        self.part_s -= lost_s
        self._writing_s = 0.0
        self._change = None
        return lost_s

    def return_to_checkpoint(self) -> None:
        """Give up all steps since the last checkpoint; `lose_step` comes first."""
        if self._unsaved_s:
            self.lost_by_cause["checkpoint"] += self._unsaved_s
        self.useful_s -= self._unsaved_s
        self.steps -= self._unsaved
        self._unsaved, self._unsaved_s = 0, 0.0

    def unsnapped(self, every: int) -> tuple[int, float]:
        """Return the steps since the last snapshot, or checkpoint if that is later, and their seconds.

        One follows every `every` steps after the last one under the plan before.
        """
        steps = min((self.steps - self._snapped) % every, self._unsaved)
        return steps, steps * self._unsaved_s / self._unsaved if self._unsaved else 0.0

    def end_snapshots(self, every: int) -> None:
        """Note the last snapshot at this interval: others may follow at another one."""
        self._snapped = self.steps - (self.steps - self._snapped) % every

    def return_to_snapshot(self, every: int) -> None:
        """Give up all steps since the last snapshot; `lose_step` comes first."""
        steps, seconds = self.unsnapped(every)
        if seconds:
            self.lost_by_cause["snapshot"] += seconds
        self.useful_s -= seconds
        self.steps -= steps
        self._unsaved -= steps
        self._unsaved_s = max(0.0, self._unsaved_s - seconds) if self._unsaved else 0.0

    def _await(self, change: Change, seconds: float, following: tuple[Change, float] | None = None) -> None:
        """Make a change after some seconds; layers may move from then on, before the one that is to follow."""
        self._change, self._change_s, self._following = change, self.clock_s + seconds, following
        self.resume_s = self._change_s + change.stall_s
        if not seconds:
            self._make(change)

    def _make(self, change: Change) -> None:
        """Make a change that is due, at the end of a step."""
        following = self._following
        # The step may miss its end by a rounding.
        if self._training is not None and self.part_s > self._training.step_s / 2:
            self._finish(1, self.part_s)
        self.part_s = 0.0
        self._begin(change)
        if following is not None and self._training is not None:
            later, seconds = following
            self._await(later, self._training.until_boundary_s(seconds))

    def _begin(self, change: Change) -> None:
        self._change = None
        if change.saved:
            self._unsaved, self._unsaved_s = 0, 0.0
        every = max(1, round(change.checkpoint_every_s / change.step_s))
        first = min(every, max(1, round((change.checkpoint_every_s - self._unsaved_s) / change.step_s)))
        self._training = _Training(change.step_s, first, every, change.write_s, passed_s=self.part_s)
        self._cause = change.cause
        self._writing_s = 0.0
        self.resume_s = self.clock_s + change.stall_s
        if change.stall_s:
            self.timeline.append((self.clock_s, math.inf))
        self.timeline.append((self.resume_s, change.step_s))

    def _finish(self, steps: int, seconds: float) -> None:
        self.steps += steps
        self.useful_s += seconds
        self._unsaved += steps
        self._unsaved_s += seconds

    def _advance(self, to_s: float) -> None:
        if self._training is None:
            self.down_s += to_s - self.clock_s
        else:
            begin_s = self.resume_s if self._change is None else self.clock_s
            still_s = min(max(0.0, begin_s - self.clock_s), to_s - self.clock_s)
            if still_s > 0:
                self.stall_by_cause[self._cause] += still_s
            if to_s > max(begin_s, self.clock_s):
                self._train(self._training, to_s - max(self.clock_s, begin_s))
        self.clock_s = to_s

    def _train(self, training: _Training, seconds: float) -> None:
        training.passed_s += seconds
        done, written, writing_s = training.progress()
        self._finish(done - training.done, (done - training.done) * training.step_s)
        if written > training.written:
            self.checkpoint_s += (written - training.written) * training.write_s
            last = training.first + (written - 1) * training.every
            self._unsaved, self._unsaved_s = done - last, (done - last) * training.step_s
        self.checkpoint_s += writing_s - self._writing_s
        self._writing_s = writing_s
        self.part_s = max(0.0, training.passed_s - done * training.step_s - written * training.write_s - writing_s)
        training.done, training.written = done, written


ORACLE: Final = "oracle"

Live: TypeAlias = tuple[tuple[float, int], ...]
"""Number of live workers by speed, the fastest first."""


def live_of(speeds: Iterable[float]) -> Live:
    """Return the live workers with these speeds."""
    return tuple(sorted(Counter(speeds).items(), reverse=True))


class KnownRates:
    """Samples per second that some plan reaches, by its live workers.

    More or faster workers can do whatever fewer or slower ones can. So the best rate of live workers is the highest one
    noted for workers of which they have, for every speed, as many that are as fast.
    """

    def __init__(self) -> None:
        self._noted: dict[Live, float] = {}

    def note(self, live: Live, samples_per_s: float) -> None:
        """Add the rate of a plan on these workers. Raises ConfigError if it is not positive."""
        if not samples_per_s > 0:
            raise ConfigError(f"a plan trains a positive number of samples per second; got {samples_per_s}")
        self._noted[live] = max(samples_per_s, self._noted.get(live, 0.0))

    def best(self, live: Live) -> float:
        """Return the highest rate for these workers; 0 if none is known."""
        return max((rate for fewer, rate in self._noted.items() if _covers(live, fewer)), default=0.0)


def _covers(live: Live, fewer: Live) -> bool:
    """Return whether `live` has for every worker of `fewer` one of its own that is as fast."""
    return all(
        sum(count for own, count in live if own >= speed) >= sum(count for own, count in fewer if own >= speed)
        for speed, _ in fewer
    )


class Oracle:
    """The highest known rates for the live workers of a trace, without any stall.

    Args:
        trace: events of the workers.
        rates: the rates of all simulated policies.
        rate_of: samples per second of the fastest known plan for a number of equal workers; 0 if none fits.
    """

    def __init__(self, trace: Trace, rates: KnownRates, rate_of: Callable[[int], float]) -> None:
        self._trace = trace
        speeds = dict.fromkeys(range(trace.workers), 1.0)
        moments = [(0.0, live_of(speeds.values()))]
        for time_s, events in trace.groups():
            for event in events:
                for worker in event.workers:
                    if event.kind == "lost":
                        del speeds[worker]
                    else:
                        speeds[worker] = event.speed
            moments.append((time_s, live_of(speeds.values())))
        different = {live for _, live in moments}
        for live in different:
            if (rate := rate_of(dict(live).get(1.0, 0))) > 0:
                rates.note(live, rate)
        best = {live: rates.best(live) for live in different}
        ends_s = [*(time_s for time_s, _ in moments[1:]), trace.duration_s]
        # (start, seconds, live workers, samples per second)
        self._intervals = [
            (start_s, end_s - start_s, sum(count for _, count in live), best[live])
            for (start_s, live), end_s in zip(moments, ends_s, strict=True)
        ]
        self.samples = math.fsum(seconds * rate for _, seconds, _, rate in self._intervals)

    def result(self, failure_free_samples: float) -> PolicyResult:
        """Return the result of the oracle."""
        used_s = math.fsum(count * seconds for _, seconds, count, rate in self._intervals if rate)
        idle_s = math.fsum(count * seconds for _, seconds, count, rate in self._intervals if not rate)
        down_s = math.fsum(seconds for _, seconds, _, rate in self._intervals if not rate)
        duration_s, workers = self._trace.duration_s, self._trace.workers
        return PolicyResult(
            policy=ORACLE,
            workers=workers,
            duration_s=duration_s,
            samples=self.samples,
            failure_free_samples=failure_free_samples,
            oracle_samples=self.samples,
            useful_s=duration_s - down_s,
            down_s=down_s,
            used_hours=used_s / 3600,
            idle_hours=idle_s / 3600,
            dead_hours=workers * duration_s / 3600 - (used_s + idle_s) / 3600,
            timeline=tuple(Throughput(start_s, rate) for start_s, seconds, _, rate in self._intervals if seconds),
        )
