"""Where the time of a simulation goes, second by second, and which steps count."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

__all__ = ["Account"]


@dataclass(slots=True)
class _Training:
    """Steps of equal length with a checkpoint after so many; times since the first of them began.

    Attributes:
        step_s: seconds of a step.
        first: steps until the first checkpoint.
        every: steps between two others.
        write_s: seconds of a checkpoint.
        done: steps whose end has been counted.
        written: checkpoints whose end has been counted.
        passed_s: seconds that have passed.
    """

    step_s: float
    first: int
    every: int
    write_s: float
    done: int = 0
    written: int = 0
    passed_s: float = 0.0

    def at(self, passed_s: float) -> tuple[int, int, float]:
        """(steps done, checkpoints written, seconds of the one that is being written) after so many seconds."""
        first_s = self.first * self.step_s + self.write_s
        if passed_s < first_s:
            steps = min(self.first, int(passed_s / self.step_s))
            return steps, 0, max(0.0, passed_s - self.first * self.step_s)
        cycle_s = self.every * self.step_s + self.write_s
        cycles = int((passed_s - first_s) / cycle_s)
        rest_s = passed_s - first_s - cycles * cycle_s
        steps = min(self.every, int(rest_s / self.step_s))
        writing_s = max(0.0, rest_s - self.every * self.step_s)
        return self.first + cycles * self.every + steps, 1 + cycles, writing_s


@dataclass(frozen=True, slots=True)
class _Change:
    """Stand still from a moment on, and train otherwise then."""

    from_s: float
    stall_s: float
    cause: str
    step_s: float
    checkpoint_every_s: float
    write_s: float
    saved: bool


@dataclass(slots=True)
class Account:
    """The state of a run in time: standing still, training, or down for want of workers.

    Every second is put down when it passes; `PolicyResult` checks that they add up.

    Attributes:
        useful_s: seconds of steps that count.
        checkpoint_s: seconds in which a checkpoint was written.
        down_s: seconds without a plan.
        steps: steps that count.
        stall_by_cause, lost_by_cause: see `PolicyResult`.
        part_s: seconds in the step that is being computed.
        resume_s: when training goes on, or went on.
        timeline: (time, seconds of a step; infinite where there are none) at each change.
    """

    useful_s: float = 0.0
    checkpoint_s: float = 0.0
    down_s: float = 0.0
    steps: int = 0
    stall_by_cause: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    lost_by_cause: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    part_s: float = 0.0
    resume_s: float = 0.0
    timeline: list[tuple[float, float]] = field(default_factory=list)
    _clock_s: float = 0.0
    _cause: str = ""
    _training: _Training | None = None
    _change: _Change | None = None
    _writing_s: float = 0.0
    # Steps since the last checkpoint, and their seconds: what going back to it makes vain.
    _unsaved: int = 0
    _unsaved_s: float = 0.0

    @property
    def unsaved_s(self) -> float:
        """Seconds of steps since the last checkpoint, the current one included."""
        return self._unsaved_s + self.part_s

    @property
    def clock_s(self) -> float:
        """How much time has passed."""
        return self._clock_s

    def advance(self, to_s: float) -> None:
        """Let time pass."""
        if self._change is not None and to_s >= self._change.from_s:
            change = self._change
            self._advance(change.from_s)
            self._change = None
            self._part_to_step()
            self._begin(change)
        self._advance(to_s)

    def changes(
        self,
        *,
        step_s: float,
        stall_s: float,
        cause: str,
        checkpoint_every_s: float,
        write_s: float,
        finish_step: bool,
        saved: bool,
    ) -> None:
        """Stand still, at once or when the step has been finished, and then train with steps of this length.

        Args:
            step_s: seconds of a step from then on.
            stall_s: seconds of standing still.
            cause: what it is put down to.
            checkpoint_every_s: seconds of steps between two checkpoints.
            write_s: seconds that each takes.
            finish_step: whether the step that was begun is finished first.
            saved: whether the stall begins with a checkpoint.
        """
        from_s = self._clock_s
        trains = self._change is not None or self._clock_s >= self.resume_s
        if finish_step and self._training is not None and trains:
            left_s = self._training.step_s - self.part_s if self.part_s else 0.0
            from_s += left_s + (self._training.write_s - self._writing_s if self._writing_s else 0.0)
        self._change = None
        change = _Change(from_s, stall_s, cause, step_s, checkpoint_every_s, write_s, saved)
        if from_s > self._clock_s:
            self._change = change
            self.resume_s = from_s + stall_s
        else:
            # It may end just now, but for a rounding.
            self._part_to_step()
            self._begin(change)

    def waits(self) -> None:
        """From now on: down."""
        self._training = self._change = None
        self.timeline.append((self._clock_s, math.inf))

    def lose_step(self) -> None:
        """Give up the step that was begun, and a change that has not."""
        if self.part_s:
            self.lost_by_cause["step"] += self.part_s
        self.part_s = self._writing_s = 0.0
        self._change = None

    def back_to_checkpoint(self) -> None:
        """Give up all steps since the last checkpoint; `lose_step` comes first."""
        if self._unsaved_s:
            self.lost_by_cause["checkpoint"] += self._unsaved_s
        self.useful_s -= self._unsaved_s
        self.steps -= self._unsaved
        self._unsaved, self._unsaved_s = 0, 0.0

    def _begin(self, change: _Change) -> None:
        if change.saved:
            self._unsaved, self._unsaved_s = 0, 0.0
        every = max(1, round(change.checkpoint_every_s / change.step_s))
        first = min(every, max(1, round((change.checkpoint_every_s - self._unsaved_s) / change.step_s)))
        self._training = _Training(change.step_s, first, every, change.write_s)
        self._cause = change.cause
        self._writing_s = 0.0
        self.resume_s = self._clock_s + change.stall_s
        if change.stall_s:
            self.timeline.append((self._clock_s, math.inf))
        self.timeline.append((self.resume_s, change.step_s))

    def _part_to_step(self) -> None:
        """A step that ends just now may miss its end by a rounding."""
        training = self._training
        if training is not None and self.part_s > training.step_s / 2:
            self.steps += 1
            self.useful_s += self.part_s
            self._unsaved += 1
            self._unsaved_s += self.part_s
        self.part_s = 0.0

    def _advance(self, to_s: float) -> None:
        if self._training is None:
            self.down_s += to_s - self._clock_s
        else:
            begin_s = self.resume_s if self._change is None else self._clock_s
            still_s = min(max(0.0, begin_s - self._clock_s), to_s - self._clock_s)
            if still_s > 0:
                self.stall_by_cause[self._cause] += still_s
            if to_s > max(begin_s, self._clock_s):
                self._train(self._training, to_s - max(self._clock_s, begin_s))
        self._clock_s = to_s

    def _train(self, training: _Training, seconds: float) -> None:
        training.passed_s += seconds
        done, written, writing_s = training.at(training.passed_s)
        self.steps += done - training.done
        self.useful_s += (done - training.done) * training.step_s
        if written > training.written:
            self.checkpoint_s += (written - training.written) * training.write_s
            last = training.first + (written - 1) * training.every
            self._unsaved, self._unsaved_s = done - last, (done - last) * training.step_s
        else:
            self._unsaved += done - training.done
            self._unsaved_s += (done - training.done) * training.step_s
        self.checkpoint_s += writing_s - self._writing_s
        self._writing_s = writing_s
        self.part_s = max(0.0, training.passed_s - done * training.step_s - written * training.write_s - writing_s)
        training.done, training.written = done, written
