"""Observations of one policy in one scenario, and figures derived from them. Times are in seconds of the wall clock."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks._chameleon import event_lines
from chameleon_ft.storage.files import RunDirectory

_NO_GAP = 0.05  # of a step: the gap between two steps when nothing happens


@dataclass(frozen=True, slots=True)
class Commit:
    """A committed step; `at_s` is since the start of the window, like all times here."""

    at_s: float
    step: int
    generation: int
    samples: int
    step_s: float


@dataclass(frozen=True, slots=True)
class Change:
    """A worker that was killed, or has returned."""

    at_s: float
    worker: int
    live: int
    """-1 or 1."""


@dataclass(frozen=True, slots=True)
class Outage:
    """The recovery from one loss, or from several at once."""

    at_s: float
    """When training resumed."""
    generation: int
    policy: str
    stall_s: float
    moved_bytes: int
    charged_s: float
    """Time added for a restart; see `Clock` in `_policies_run`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome that a run recorded for a decision: predictions, and measurements over the next `steps` steps."""

    generation: int
    steps: int
    predicted_step_s: float
    measured_step_s: float
    predicted_stall_s: float
    measured_stall_s: float

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> Outcome | None:
        """Return the outcome in an event `outcome`; None if there was no prediction."""
        if event["predicted_stall_s"] is None or event["predicted_step_s"] is None:
            return None
        return cls(**{each.name: event[each.name] for each in fields(cls)})


@dataclass(frozen=True, slots=True)
class Stretch:
    """The time in which a committed step was trained."""

    begin_s: float
    end_s: float
    samples: int

    @property
    def samples_per_s(self) -> float:
        return self.samples / (self.end_s - self.begin_s)

    def within(self, duration_s: float) -> float:
        """Return its samples inside the window."""
        inside_s = min(self.end_s, duration_s) - max(self.begin_s, 0.0)
        return self.samples_per_s * max(0.0, inside_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Observations of one run.

    Attributes:
        run: name of its directory, beside the file of these observations.
        duration_s: length of the window.
        workers: workers at the start.
        skipped: workers that were to be killed and were not live.
        outcomes: of all decisions, also those on workers that had joined.
        switched_bytes: that moved for a switch to another plan, most of them during training; not those of outages.
        ended: why the run ended inside the window; None if it did not.
        others_share: share of the machine that other processes took.
    """

    run: str
    duration_s: float
    workers: int
    commits: tuple[Commit, ...]
    changes: tuple[Change, ...]
    skipped: tuple[int, ...]
    outages: tuple[Outage, ...]
    outcomes: tuple[Outcome, ...]
    switched_bytes: int = 0
    ended: str | None
    others_share: float = math.nan

    def write(self, path: Path) -> None:
        """Write the observations for `read`."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Observed:
        """Read observations that `write` wrote.

        What earlier versions did not record, predicted steps and bytes, is read from the run in the same folder.
        """
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("predicted_s", None) is not None:
            data["outcomes"] = _outcomes_of(
                path.parent / data["run"], [each["generation"] for each in data["outcomes"]]
            )
        if "switched_bytes" not in data:
            data["switched_bytes"] = _switched_bytes(path.parent / data["run"])
        parts = {"commits": Commit, "changes": Change, "outages": Outage, "outcomes": Outcome}
        data |= {name: tuple(part(**each) for each in data[name]) for name, part in parts.items()}
        data["skipped"] = tuple(data["skipped"])
        return cls(**data)

    @property
    def stretches(self) -> list[Stretch]:
        """Times in which committed steps were trained, without stalls and interrupted steps."""
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
        """Average over the window; steps that are partly inside count in part."""
        return math.fsum(stretch.within(self.duration_s) for stretch in self.stretches) / self.duration_s

    @property
    def surviving(self) -> float:
        """Share of the initial workers that were live, averaged over the window."""
        inside = [change for change in self.changes if change.at_s < self.duration_s]
        lost = math.fsum(-change.live * (self.duration_s - max(0.0, change.at_s)) for change in inside)
        return 1 - lost / (self.workers * self.duration_s)

    @property
    def lost(self) -> int:
        return sum(change.live < 0 for change in self.changes)

    @property
    def stall_s(self) -> float:
        """Total stall inside the window, with the charged time of restarts."""
        return math.fsum(
            max(0.0, min(each.stall_s + each.charged_s, self.duration_s - (each.at_s - each.stall_s - each.charged_s)))
            for each in self.outages
        )

    @property
    def moved_bytes(self) -> int:
        return self.switched_bytes + sum(outage.moved_bytes for outage in self.outages)

    def steps_s(self) -> dict[int, list[float]]:
        """Return generation -> times between commits, without its first step, which includes one-time work."""
        found: dict[int, list[float]] = defaultdict(list)
        for before, after in itertools.pairwise(self.commits):
            if before.generation == after.generation:
                found[after.generation].append(after.at_s - before.at_s)
        return dict(found)

    @property
    def undisturbed_steps_s(self) -> list[float]:
        """Step times of the first generation."""
        return self.steps_s().get(self.commits[0].generation, []) if self.commits else []

    @property
    def last_step_s(self) -> float | None:
        """Median step of the last generation; None if it has fewer than two steps, or is the only generation."""
        if not self.commits or self.commits[-1].generation == self.commits[0].generation:
            return None
        last = self.steps_s().get(self.commits[-1].generation)
        return statistics.median(last) if last else None

    @property
    def step_errors(self) -> list[float]:
        """predicted / measured - 1 of the step time, for each decision followed by more than one step.

        The first step includes the creation of buffers and connections.
        """
        known = [each for each in self.outcomes if each.steps > 1]
        return [each.predicted_step_s / each.measured_step_s - 1 for each in known]

    @property
    def stall_errors(self) -> list[float]:
        """predicted / measured - 1 of the stall of carried out decisions after a loss; restarts as charged."""
        charged_s = {outage.generation: outage.charged_s for outage in self.outages}
        known = [each for each in self.outcomes if each.generation in charged_s and each.measured_stall_s > 0]
        return [each.predicted_stall_s / (each.measured_stall_s + charged_s[each.generation]) - 1 for each in known]


def _outcomes_of(run: Path, generations: Collection[int]) -> list[dict[str, Any]]:
    if not RunDirectory(run).events_file.exists():
        raise SystemExit(f"{run}: its events are gone, without which the results of an earlier version cannot be read")
    events = (event for event in event_lines(RunDirectory(run)) if event["event"] == "outcome")
    found = [outcome for event in events if (outcome := Outcome.of(event)) is not None]
    return [asdict(outcome) for outcome in found if outcome.generation in generations]


def _switched_bytes(run: Path) -> int:
    if not RunDirectory(run).events_file.exists():
        return 0
    events = event_lines(RunDirectory(run))
    outages = {event["generation"] for event in events if event["event"] == "failure"}
    joins = [event for event in events if event["event"] == "join"]
    return sum(event["moved_bytes"] for event in joins if event["generation"] not in outages)


def mean_size(errors: Sequence[float]) -> float:
    """Return the mean of the absolute errors; NaN if there are none."""
    return statistics.fmean(map(abs, errors)) if errors else math.nan
