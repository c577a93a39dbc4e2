"""What was observed of one policy in one scenario, and what follows from it. Times are in seconds of the wall clock."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Change", "Commit", "Observed", "Outage", "Outcome", "Stretch", "mean_size"]

_NO_GAP = 0.05  # of a step: what lies between two of them when nothing happens


@dataclass(frozen=True, slots=True)
class Commit:
    """A committed step; `at_s` since the window began, like all times here."""

    at_s: float
    step: int
    generation: int
    samples: int
    step_s: float


@dataclass(frozen=True, slots=True)
class Change:
    """A worker that was killed, or is there again."""

    at_s: float
    worker: int
    live: int
    """-1 or 1."""


@dataclass(frozen=True, slots=True)
class Outage:
    """What followed a loss; several losses at once have one."""

    at_s: float
    """When training went on."""
    generation: int
    policy: str
    stall_s: float
    moved_bytes: int
    charged_s: float
    """What was added for a restart; see `Clock` in `_policies_run`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run said of one of its decisions: predicted and measured seconds of the stall."""

    generation: int
    predicted_s: float
    measured_s: float


@dataclass(frozen=True, slots=True)
class Stretch:
    """A time in which a step was trained that counts."""

    begin_s: float
    end_s: float
    samples: int

    @property
    def samples_per_s(self) -> float:
        return self.samples / (self.end_s - self.begin_s)

    def within(self, duration_s: float) -> float:
        """Its samples inside the window."""
        inside_s = min(self.end_s, duration_s) - max(self.begin_s, 0.0)
        return self.samples_per_s * max(0.0, inside_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One run.

    Attributes:
        run: name of its directory, beside the file that this is written to.
        duration_s: length of the window.
        workers: of the start.
        skipped: workers that should have been killed and were not live.
        predicted_s: generation -> seconds of a step, by its plan, program and profile.
        ended: why the run ended inside the window; None where it did not.
        others_share: what other processes took of the machine.
    """

    run: str
    duration_s: float
    workers: int
    commits: tuple[Commit, ...]
    changes: tuple[Change, ...]
    skipped: tuple[int, ...]
    outages: tuple[Outage, ...]
    outcomes: tuple[Outcome, ...]
    predicted_s: dict[int, float]
    ended: str | None
    others_share: float = math.nan

    def write(self, path: Path) -> None:
        """Write it for `read`."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Observed:
        """Read what `write` wrote."""
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        parts = {"commits": Commit, "changes": Change, "outages": Outage, "outcomes": Outcome}
        data |= {name: tuple(part(**each) for each in data[name]) for name, part in parts.items()}
        data["skipped"] = tuple(data["skipped"])
        data["predicted_s"] = {int(generation): value for generation, value in data["predicted_s"].items()}
        return cls(**data)

    @property
    def stretches(self) -> list[Stretch]:
        """When steps were trained that count: not in stalls, and not in what was interrupted."""
        found: list[Stretch] = []
        before: Commit | None = None
        for commit in self.commits:
            begin_s = commit.at_s - commit.step_s
            if before is not None:
                same = before.generation == commit.generation
                if begin_s < before.at_s or (same and begin_s - before.at_s < _NO_GAP * commit.step_s):
                    begin_s = before.at_s
            found.append(Stretch(begin_s, commit.at_s, commit.samples))
            before = commit
        return found

    @property
    def samples_per_s(self) -> float:
        """Average over the window; steps that are only partly inside count in part."""
        return math.fsum(stretch.within(self.duration_s) for stretch in self.stretches) / self.duration_s

    @property
    def surviving(self) -> float:
        """Live workers by those of the start, averaged over the window."""
        inside = [change for change in self.changes if change.at_s < self.duration_s]
        lost = math.fsum(-change.live * (self.duration_s - max(0.0, change.at_s)) for change in inside)
        return 1 - lost / (self.workers * self.duration_s)

    @property
    def lost(self) -> int:
        return sum(change.live < 0 for change in self.changes)

    @property
    def stall_s(self) -> float:
        """Of all outages together, restarts as they are charged; what is inside the window."""
        return math.fsum(
            max(0.0, min(each.stall_s + each.charged_s, self.duration_s - (each.at_s - each.stall_s - each.charged_s)))
            for each in self.outages
        )

    @property
    def moved_bytes(self) -> int:
        return sum(outage.moved_bytes for outage in self.outages)

    def steps_s(self) -> dict[int, list[float]]:
        """Generation -> from one commit to the next, but for its first step, in which everything is new."""
        found: dict[int, list[float]] = defaultdict(list)
        for before, after in itertools.pairwise(self.commits):
            if before.generation == after.generation:
                found[after.generation].append(after.at_s - before.at_s)
        return dict(found)

    @property
    def undisturbed_steps_s(self) -> list[float]:
        """Of the generation that the run began with."""
        return self.steps_s().get(self.commits[0].generation, []) if self.commits else []

    @property
    def last_step_s(self) -> float | None:
        """Median of the last generation; None before two of its steps, or where there was only one generation."""
        if not self.commits or self.commits[-1].generation == self.commits[0].generation:
            return None
        last = self.steps_s().get(self.commits[-1].generation)
        return statistics.median(last) if last else None

    @property
    def step_errors(self) -> list[float]:
        """Predicted by measured seconds of a step, less one, for each generation that has some."""
        measured = self.steps_s()
        both = sorted(measured.keys() & self.predicted_s.keys())
        return [self.predicted_s[each] / statistics.median(measured[each]) - 1 for each in both]

    @property
    def stall_errors(self) -> list[float]:
        """The same of the stall of each decision after a loss that no other one overtook."""
        lost = {outage.generation for outage in self.outages}
        known = [each for each in self.outcomes if each.generation in lost and each.measured_s > 0]
        return [each.predicted_s / each.measured_s - 1 for each in known]


def mean_size(errors: Sequence[float]) -> float:
    """Mean of their sizes; not a number where there are none."""
    return statistics.fmean(map(abs, errors)) if errors else math.nan
