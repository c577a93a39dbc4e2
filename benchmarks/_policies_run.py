"""Runs one policy through one scenario; losses come at given times, whatever step the run is in."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks._common import child, write_config
from benchmarks._live_run import Tail, end
from benchmarks._policies_observed import Change, Commit, Observed, Outage, Outcome
from benchmarks._policies_scenarios import Loss
from chameleon_ft.config import RunConfig
from chameleon_ft.errors import ConfigError, ControlError
from chameleon_ft.launch.live_run import inject
from chameleon_ft.storage.files import RunDirectory

_WARM_UP: Final = 3  # commits before the window begins
_POLL_S: Final = 0.01
_FROM_CHECKPOINT: Final = ("restart", "checkpoint")


@dataclass(slots=True)
class Clock:
    """Seconds of the wall clock since the window began, plus the charged time of restarts.

    A run returns to a checkpoint at once, because its processes still exist. The assumed cost of a real restart is
    added here, so events that were due in the meantime happen when the run resumes.
    """

    began_at: float
    charged_s: float = 0.0

    def at_s(self, unix_s: float) -> float:
        return unix_s - self.began_at + self.charged_s


@dataclass(slots=True, kw_only=True)
class _Watch:
    """Follows a live run through its files, and kills its workers at the given times."""

    run: RunDirectory
    losses: list[Loss]
    duration_s: float
    restart_s: float
    clock: Clock | None = None
    commits: list[Commit] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    outages: list[Outage] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    switched_bytes: int = 0
    metrics: Tail = field(init=False)
    events: Tail = field(init=False)
    _before: list[tuple[float, dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.metrics, self.events = Tail(self.run.metrics_file), Tail(self.run.events_file)

    def look(self) -> float:
        """Read new records and kill workers that are due; return the seconds since the start of the window."""
        # Events first, because the charge of a restart comes before the steps that follow it.
        for event in self.events.new():
            self._event(event)
        now = time.time()
        for line in self.metrics.new():
            self._step(now, line)
        if self.clock is None:
            return -1.0
        at_s = self.clock.at_s(now)
        while at_s < self.duration_s and self.losses and self.losses[0].at_s <= at_s:
            self._kill(self.losses.pop(0).workers)
        return at_s

    def _step(self, now: float, line: dict[str, Any]) -> None:
        if self.clock is not None:
            self.commits.append(_commit(self.clock.at_s(now), line))
            return
        self._before.append((now, line))
        if len(self._before) == _WARM_UP:
            self.clock = Clock(now)
            self.commits = [_commit(self.clock.at_s(then), early) for then, early in self._before]

    def _kill(self, workers: Sequence[int]) -> None:
        assert self.clock is not None
        for worker in workers:
            at_s = self.clock.at_s(time.time())
            try:
                inject(self.run, worker=worker, kind="kill", phase=None, step=None)
            except (ConfigError, ControlError):
                self.skipped.append(worker)
            else:
                self.changes.append(Change(at_s, worker, -1))

    def _event(self, event: dict[str, Any]) -> None:
        if self.clock is None:
            return
        at_s = self.clock.at_s(event["time"])
        match event["event"]:
            case "failure" if all(known.generation != event["generation"] for known in self.outages):
                charged_s = 0.0
                if event["policy"] in _FROM_CHECKPOINT:
                    charged_s = max(0.0, self.restart_s - event["stall_s"])
                    self.clock.charged_s += charged_s
                self.outages.append(
                    Outage(
                        at_s=at_s + charged_s,
                        generation=event["generation"],
                        policy=event["policy"],
                        stall_s=event["stall_s"],
                        moved_bytes=event["moved_bytes"],
                        charged_s=charged_s,
                    )
                )
            case "joined":
                self.changes.append(Change(at_s, event["worker"], 1))
            case "join" if all(known.generation != event["generation"] for known in self.outages):
                self.switched_bytes += event["moved_bytes"]
            case "outcome" if (outcome := Outcome.of(event)) is not None:
                self.outcomes.append(outcome)


def observe(
    config: RunConfig, *, run: Path, losses: Sequence[Loss], duration_s: float, restart_s: float, timeout_s: float
) -> Observed:
    """Run `config` in the directory `run` for a window of `duration_s`, which begins with its third commit.

    After the window the current step is completed, and the run is interrupted.

    Args:
        losses: workers and times of the losses; workers that are not live then are skipped.
        restart_s: charged time of a return to a checkpoint; see `Clock`.
        timeout_s: limit of the time before the window, and between its end and the next commit.
    """
    run.parent.mkdir(parents=True, exist_ok=True)
    file, log = write_config(config, run.with_suffix(".toml")), run.with_suffix(".log")
    watch = _Watch(run=RunDirectory(run), losses=list(losses), duration_s=duration_s, restart_s=restart_s)
    with child(
        [sys.executable, "-m", "chameleon_ft", "train", str(file), "--output-dir", str(run)], log=log
    ) as process:
        ended = _watched(watch, process, timeout_s=timeout_s)
        end(process)
    if watch.clock is None:
        raise SystemExit(f"{run}: there was no third step; see {log}")
    watch.losses.clear()
    watch.look()  # at what the run says of its last decision when it ends
    return Observed(
        run=run.name,
        duration_s=duration_s,
        workers=config.workers,
        commits=tuple(watch.commits),
        changes=tuple(sorted(watch.changes, key=lambda change: change.at_s)),
        skipped=tuple(watch.skipped),
        outages=tuple(watch.outages),
        outcomes=tuple(watch.outcomes),
        switched_bytes=watch.switched_bytes,
        ended=ended,
    )


def _watched(watch: _Watch, process: subprocess.Popen[bytes], *, timeout_s: float) -> str | None:
    """Watch until the first commit after the window; return the reason if the run ended before that."""
    began = time.monotonic()
    over: float | None = None
    while True:
        running = process.poll() is None
        at_s = watch.look()
        if not running:
            return f"exit code {process.returncode}, {max(0.0, at_s):.0f} s after the window began"
        if watch.commits and watch.commits[-1].at_s >= watch.duration_s:
            return None
        if at_s >= watch.duration_s:
            over = over or time.monotonic()
            if time.monotonic() > over + timeout_s:
                return f"no step was committed in the {timeout_s:g} s after the window"
            if any(outage.charged_s and outage.at_s >= watch.duration_s for outage in watch.outages):
                return None  # it restarts until after the window
        elif watch.clock is None and time.monotonic() > began + timeout_s:
            return f"no third step within {timeout_s:g} s (--timeout)"
        time.sleep(_POLL_S)


def _commit(at_s: float, line: dict[str, Any]) -> Commit:
    return Commit(at_s, line["step"], line["generation"], line["samples"], line["step_s"])
