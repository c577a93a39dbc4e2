"""The run directory: where everything a run writes is, and how it is read back."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from chameleon_ft.config import RunConfig, config_to_toml, config_type, parse_config, read_recorded_toml
from chameleon_ft.errors import ConfigError
from chameleon_ft.observe.records import FailureRecord, OutcomeRecord, StepRecord, Summary

__all__ = ["ControlAddress", "RunDirectory", "open_for_appending", "read_lines", "replace_file"]

_GENERATION = re.compile(r"generation-(\d+)\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlAddress:
    """How to reach the coordinator of a live run."""

    address: str
    """host:port"""
    token: str
    pid: int
    """Process of the coordinator, on its own host."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """A directory that belongs to one run.

    Records are appended a line at a time, so what a crash leaves behind is complete up to its last line.
    """

    path: Path

    @classmethod
    def create(cls, path: Path, config: RunConfig) -> RunDirectory:
        """Make the directory and write the resolved configuration into it, with copies of the files that it names.

        Raises ConfigError where `path` exists or cannot be made.
        """
        cls.require_free(path)
        run = cls(path.absolute())
        try:
            run.path.mkdir(parents=True)
            run.checkpoints.mkdir()
            run.logs.mkdir()
            run._copy_files_of(config)
            run.config_file.write_text(config_to_toml(config), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--output-dir {path}: cannot be made: {error.strerror}; take another directory"
            ) from None
        return run

    @classmethod
    def require_free(cls, path: Path) -> None:
        """Raise ConfigError where there is something at `path` already."""
        if path.exists():
            is_run = cls(path).config_file.is_file()
            instead = f", or go on with that run by --resume {path}" if is_run else ""
            raise ConfigError(
                f"--output-dir {path}: exists already, and a run never writes over anything; take another{instead}"
            )

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Return the directory of an earlier run. Raises ConfigError where `path` is not one."""
        run = cls(path.absolute())
        if not path.exists():
            raise ConfigError(f"{path}: there is no such directory; give the one that a run printed as its files")
        if not run.config_file.is_file():
            raise ConfigError(
                f"{path}: is not a run directory, for it holds no {run.config_file.name}; "
                "give the directory that a run printed as its files"
            )
        return run

    @property
    def config_file(self) -> Path:
        """The resolved configuration, TOML."""
        return self.path / "config.toml"

    @property
    def metrics_file(self) -> Path:
        """One StepRecord per line."""
        return self.path / "metrics.jsonl"

    @property
    def events_file(self) -> Path:
        """One event per line, with `time` in Unix seconds and `event`, its name."""
        return self.path / "events.jsonl"

    @property
    def faults_file(self) -> Path:
        """When each injected failure happened; see `FaultLog`."""
        return self.path / "faults.jsonl"

    @property
    def summary_file(self) -> Path:
        """The Summary, written when the run ends."""
        return self.path / "summary.json"

    @property
    def control_file(self) -> Path:
        """The ControlAddress while the run is live; readable by its owner only, for it holds the token."""
        return self.path / "control.json"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Folder of what the processes print."""
        return self.path / "logs"

    @property
    def start_plan_file(self) -> Path:
        """A copy of the plan that the run was told to start with, if it was."""
        return self.path / "plan.json"

    @property
    def profile_file(self) -> Path:
        """A copy of the profile that the run was given, if it was."""
        return self.path / "profile.json"

    @property
    def plans(self) -> Path:
        """Folder of what was planned in each generation; see `GenerationPlan`."""
        return self.path / "plans"

    def plan_file(self, generation: int) -> Path:
        """The GenerationPlan of a generation."""
        return self.plans / f"generation-{generation:05}.json"

    def last_generation(self) -> int:
        """The highest number of a generation that was planned; 0 where there is none."""
        numbers = (_GENERATION.fullmatch(path.name) for path in self.plans.glob("generation-*.json"))
        return max((int(match[1]) for match in numbers if match is not None), default=0)

    @property
    def timelines(self) -> Path:
        """Folder of the operations that were recorded; see `RecordedStep`."""
        return self.path / "timelines"

    def timeline_file(self, worker: int) -> Path:
        """One RecordedStep of a worker per line."""
        return self.timelines / f"worker-{worker}.jsonl"

    def config(self) -> RunConfig:
        """Read the resolved configuration; its files are in this directory, wherever it has been moved to."""
        values = read_recorded_toml(self.config_file)
        return self.own(parse_config(config_type(values), values, source=str(self.config_file)))

    def own(self, config: RunConfig) -> RunConfig:
        """Return the configuration of this run, read anywhere, with this directory and the files in it."""
        update = {
            "output_dir": self.path,
            "profile": config.profile and self.profile_file,
            "plan": config.plan and self.start_plan_file,
        }
        return config.model_copy(update=update)

    def write_config(self, config: RunConfig) -> None:
        """Replace the resolved configuration, and the files that it names, when a run goes on with another one."""
        self._copy_files_of(config)
        replace_file(self.config_file, config_to_toml(config), mode=0o644)

    def _copy_files_of(self, config: RunConfig) -> None:
        for file, copy in ((config.profile, self.profile_file), (config.plan, self.start_plan_file)):
            if file is not None and not (copy.exists() and file.samefile(copy)):
                shutil.copyfile(file, copy)

    def steps(self) -> list[StepRecord]:
        """Read the committed steps in the order they were written."""
        return [StepRecord.from_json(line) for line in read_lines(self.metrics_file)]

    def events(self) -> list[dict[str, Any]]:
        """Read the events in the order they were written."""
        return list(read_lines(self.events_file))

    def failures(self) -> list[FailureRecord]:
        """Read the failures in the order they were written."""
        return [FailureRecord.from_json(event) for event in self.events() if event["event"] == "failure"]

    def outcomes(self) -> list[OutcomeRecord]:
        """Read what came of the decisions, in the order it was written."""
        return [OutcomeRecord.from_json(event) for event in self.events() if event["event"] == "outcome"]

    def write_summary(self, summary: Summary) -> None:
        """Write the summary, whole or not at all."""
        replace_file(self.summary_file, json.dumps(summary.to_json(), indent=2) + "\n", mode=0o644)

    def write_control(self, control: ControlAddress) -> None:
        """Tell the other commands how to reach the live run; only the owner can read it."""
        replace_file(self.control_file, json.dumps(asdict(control)) + "\n", mode=0o600)

    def read_control(self) -> ControlAddress:
        """Return how to reach the live run. Raises ConfigError where the run is not live."""
        try:
            return ControlAddress(**json.loads(self.control_file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise ConfigError(
                f"{self.path}: this run is not live, for it has no {self.control_file.name}; "
                "start it, or give the directory of one that is running"
            ) from None
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{self.control_file}: cannot be read: {error}") from None

    def remove_control(self) -> None:
        """Withdraw what `write_control` wrote, when the run ends."""
        self.control_file.unlink(missing_ok=True)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file of lines; none where it does not exist.

    Raises ConfigError at a line that is not JSON, unless it is an unfinished last one, which a crash may leave.
    """
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            if line.endswith("\n"):
                raise ConfigError(f"{path}, line {number}: is not JSON; the file is damaged") from None


def replace_file(path: Path, text: str, *, mode: int) -> None:
    """Write a file so that a reader, or a crash, sees the old content or the new one and nothing between."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
        file.write(text)
    draft.replace(path)


def open_for_appending(path: Path) -> TextIO:
    """Open a file of lines, taking away an unfinished last line that a crash has left."""
    with path.open("ab+") as file:
        file.seek(0)
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
    return path.open("a", encoding="utf-8")
