"""The run directory: the paths of its files, and their reading and writing, except for plans and timelines."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from chameleon_ft.clock import unix_s
from chameleon_ft.config import RunConfig, config_to_toml, config_type, parse_config, read_recorded_toml
from chameleon_ft.errors import ConfigError, describe_invalid
from chameleon_ft.events.base import Event
from chameleon_ft.events.kinds import BadStep, SampleLeftOut
from chameleon_ft.events.lines import parse_event, parse_step
from chameleon_ft.events.records import FailureRecord, StepRecord
from chameleon_ft.events.summary import Summary, failures_in
from chameleon_ft.storage.run_lock import RunLock

_T = TypeVar("_T")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file of lines; none if it does not exist.

    Raises ConfigError if it cannot be read, and at a line that is not JSON, except for an unfinished last line, which a
    crash may leave.
    """
    for number, line in enumerate(raw_lines(path), start=1):
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):
            if line.endswith(b"\n"):
                raise ConfigError(f"{path}, line {number}: is not JSON; the file is damaged") from None


def readable_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file of lines; what is none is left out. Raises ConfigError if it cannot be read."""
    for line in raw_lines(path):
        with suppress(ValueError, RecursionError):
            if isinstance(found := json.loads(line), dict):
                yield found


def parsed_lines(path: Path, parse: Callable[[bytes], _T]) -> tuple[list[_T], list[str]]:
    """Return the values of the lines of a file in their order, and a message about each line that is left out.

    `parse` raises ConfigError at a damaged line. An unfinished last line, as after a crash, is no damage.

    Raises ConfigError if the file cannot be read.
    """
    values: list[_T] = []
    damaged: list[str] = []
    for number, line in enumerate(raw_lines(path), start=1):
        try:
            values.append(parse(line))
        except ConfigError as error:
            if line.endswith(b"\n"):
                damaged.append(f"{path}, line {number}: {error}")
    return values, damaged


def raw_lines(path: Path) -> list[bytes]:
    """Return the lines of a file with their ends; none if it does not exist. Raises ConfigError if it cannot be read.

    They are bytes: a last line may end within a character, and texts may have other characters that end lines.
    """
    try:
        return path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlAddress:
    """Address of the coordinator of a live run.

    Attributes:
        address: host:port.
        pid: its process on its own host.
        tls: directory with the certificates for the control connections; None: no TLS.
        host: name of that host; empty in files of earlier releases, and filled in by `RunDirectory.write_control`.
        started: when that process started, in clock ticks since the host did; likewise.
    """

    address: str
    token: str
    pid: int
    tls: Path | None = None
    host: str = ""
    started: int | None = None

    def has_process_here(self) -> bool | None:
        """Return whether the process lives; None if it is on another host, or that is not known."""
        if self.host != socket.gethostname() or self.started is None:
            return None
        return _start_of(self.pid) == self.started


class RunDirectory:
    """The directory of one run; docs/files.md describes its files.

    Records are appended a line at a time, so after a crash a file is complete up to its last line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.toml"
        self.start_plan_file = path / "plan.json"
        self.profile_file = path / "profile.json"
        self.metrics_file = path / "metrics.jsonl"
        self.events_file = path / "events.jsonl"
        self.faults_file = path / "faults.jsonl"
        self.summary_file = path / "summary.json"
        self.control_file = path / "control.json"
        self.checkpoints = path / "checkpoints"
        self.terms = path / "terms"
        self.tls = path / "tls"
        self.logs = path / "logs"
        self.incidents = path / "incidents"
        self.plans = path / "plans"
        self.timelines = path / "timelines"

    @classmethod
    def create(cls, path: Path, config: RunConfig) -> RunDirectory:
        """Make the directory and write the resolved configuration into it, with copies of the files that it names.

        Raises ConfigError if `path` exists, with more than a `RunLock`, or cannot be made; then nothing is left of it.
        """
        cls.require_free(path)
        run, is_made = cls(path.absolute()), False
        try:
            run.path.mkdir(parents=True, exist_ok=RunLock.is_alone_in(path))
            run.path.chmod(int(config.output_mode, 8))
            run.checkpoints.mkdir()
            is_made = True
            run.logs.mkdir()
            run._copy_files_of(config)
            replace_file(run.config_file, config_to_toml(config), mode=0o644, is_synced=True)
        except OSError as error:
            # A directory that exists by now is another process's.
            if is_made and not isinstance(error, FileExistsError):
                shutil.rmtree(run.path, ignore_errors=True)
            place = f"{error.filename}: " if error.filename else ""
            raise ConfigError(
                f"--output-dir {path}: cannot be made: {place}{error.strerror}; take another directory"
            ) from None
        return run

    @classmethod
    def require_free(cls, path: Path) -> None:
        """Raise ConfigError if `path` exists, with more than a `RunLock`, or if that cannot be found out."""
        try:
            is_taken = path.exists() and not RunLock.is_alone_in(path)
        except OSError as error:
            raise ConfigError(
                f"--output-dir {path}: cannot be made: {error.strerror}; take another directory"
            ) from None
        if is_taken:
            is_run = cls(path).config_file.is_file()
            instead = f", or continue that run by --resume {path}" if is_run else ""
            raise ConfigError(
                f"--output-dir {path}: exists already, and a run never writes over anything; take another{instead}"
            )

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Return the directory of an earlier run. Raises ConfigError if `path` is not one."""
        run = cls(path.absolute())
        try:
            exists, is_run = path.exists(), run.config_file.is_file()
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be read: {error.strerror}; give the directory that a run printed as its files"
            ) from None
        if not exists:
            raise ConfigError(f"{path}: there is no such directory; give the one that a run printed as its files")
        if not is_run:
            raise ConfigError(
                f"{path}: is not a run directory, because it has no {run.config_file.name}; "
                "give the directory that a run printed as its files"
            )
        return run

    def journal_file(self, term: int) -> Path:
        """Return the journal of the coordinator of a term; see `chameleon_ft.coordinator.journal`."""
        return self.path / f"journal-{term:06}.jsonl"

    def journals(self) -> list[Path]:
        """Return the journals of all terms that there are, the newest last."""
        return sorted(self.path.glob("journal-*.jsonl"))

    def plan_file(self, generation: int) -> Path:
        """Return the file of the plan of a generation."""
        return self.plans / f"generation-{generation:05}.json"

    def last_generation(self) -> int:
        """Return the highest number of a generation that was planned; 0 if there is none."""
        numbers = (path.stem.removeprefix("generation-") for path in self.plans.glob("generation-*.json"))
        return max((int(number) for number in numbers if number.isdecimal()), default=0)

    def timeline_file(self, worker: int) -> Path:
        """Return the file with one RecordedStep of a worker per line."""
        return self.timelines / f"worker-{worker}.jsonl"

    def config(self) -> RunConfig:
        """Read the resolved configuration, with the current paths of its files if the directory was moved."""
        values = read_recorded_toml(self.config_file)
        return self.own(parse_config(config_type(values), values, source=str(self.config_file)))

    def own(self, config: RunConfig) -> RunConfig:
        """Return `config` with the paths of this directory and of its copies of files."""
        profile, plan = config.profile and self.profile_file, config.plan and self.start_plan_file
        return config.model_copy(update={"output_dir": self.path, "profile": profile, "plan": plan})

    def write_config(self, config: RunConfig) -> None:
        """Replace the resolved configuration and the copies of its files when a run resumes with other settings."""
        self._copy_files_of(config)
        replace_file(self.config_file, config_to_toml(config), mode=0o644, is_synced=True)

    def _copy_files_of(self, config: RunConfig) -> None:
        for file, copy in ((config.profile, self.profile_file), (config.plan, self.start_plan_file)):
            if file is not None and not (copy.exists() and file.samefile(copy)):
                shutil.copyfile(file, copy)

    def readable_steps(self) -> tuple[list[StepRecord], list[str]]:
        """Read the committed steps in the order they were written; see `parsed_lines`."""
        return parsed_lines(self.metrics_file, parse_step)

    def readable_events(self) -> tuple[list[Event], list[str]]:
        """Read the events in the order they were written; see `parsed_lines`."""
        return parsed_lines(self.events_file, parse_event)

    def steps(self) -> list[StepRecord]:
        """As `readable_steps`, but raise ConfigError at a damaged line."""
        return _whole(self.readable_steps())

    def events(self) -> list[Event]:
        """As `readable_events`, but raise ConfigError at a damaged line."""
        return _whole(self.readable_events())

    def skipped_steps(self) -> frozenset[int]:
        """Return the steps that were found to be bad, and whose samples were or are to be left out.

        Damaged lines, as a loss of power may leave them, keep no run from being resumed.
        """
        bad = (event for event in self.readable_events()[0] if isinstance(event, BadStep))
        return frozenset(event.step for event in bad if event.action in ("skip", "rollback"))

    def left_out(self) -> frozenset[tuple[int, int, int]]:
        """Return (step, epoch, sample) of the samples that could not be read; see `skipped_steps`."""
        left_out = (event for event in self.readable_events()[0] if isinstance(event, SampleLeftOut))
        return frozenset((event.step, event.epoch, event.sample) for event in left_out)

    def failures(self) -> list[FailureRecord]:
        """Read the failures in the order they were written, with what they cost."""
        return failures_in(self.events())

    def write_summary(self, summary: Summary) -> None:
        """Write the summary atomically."""
        replace_file(self.summary_file, json.dumps(summary.to_json(), indent=2) + "\n", mode=0o644)

    def write_control(self, control: ControlAddress) -> None:
        """Publish the address of the live run to other commands of the same user; only the owner can read the file."""
        control = replace(control, host=socket.gethostname(), started=_start_of(control.pid))
        # A generated directory moves with the run's, and other hosts may see that under another path.
        tls = control.tls and str(control.tls.relative_to(self.path) if control.tls == self.tls else control.tls)
        # After a loss of power, an empty file would keep the run from being resumed.
        text = json.dumps({**asdict(control), "tls": tls}) + "\n"
        replace_file(self.control_file, text, mode=0o600, is_synced=True)

    def read_control(self) -> ControlAddress:
        """Return the address of the coordinator. Raises ConfigError if the run is not live."""
        try:
            found = TypeAdapter(ControlAddress).validate_json(self.control_file.read_bytes())
            return found if found.tls is None else replace(found, tls=self.path / found.tls)
        except FileNotFoundError:
            raise ConfigError(
                f"{self.path}: this run is not live, because it has no {self.control_file.name}; "
                "start it, or give the directory of one that is running"
            ) from None
        except (OSError, ValidationError) as error:
            why = describe_invalid(error).removeprefix(": ") if isinstance(error, ValidationError) else error.strerror
            raise ConfigError(
                f"{self.control_file}: cannot be read: {why}; remove it if no coordinator of this run lives"
            ) from None

    def remove_control(self) -> None:
        """Remove the address when the run ends."""
        self.control_file.unlink(missing_ok=True)


def _start_of(pid: int) -> int | None:
    """Return when a process of this host started, in clock ticks; None if there is none. See proc_pid_stat(5).

    A zombie counts as none: in some containers no process reaps them.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "XZ" else int(fields[18])


def _whole(read: tuple[list[_T], list[str]]) -> list[_T]:
    values, damaged = read
    if damaged:
        raise ConfigError(f"{damaged[0]}; give a run whose records are whole")
    return values


def replace_file(path: Path, text: str, *, mode: int, is_synced: bool = False) -> None:
    """Replace the content of a file atomically: readers, also after a crash, see the old content or the new one.

    `is_synced`: the content reaches the disk before the name, so that this holds after a crash of the machine, too.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
        file.write(text)
        if is_synced:
            file.flush()
            os.fsync(file.fileno())
    draft.replace(path)


def remove_unfinished_line(descriptor: int) -> None:
    """Remove an unfinished last line, which a crash may leave, from an open file of lines."""
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(0)
        content = file.read()
    os.truncate(descriptor, content.rfind(b"\n") + 1)


def detach(path: Path, *, may_write: Callable[[], bool] = lambda: True) -> None:
    """Replace a file by a copy of it, if there is one, so that processes that have it open do not change it any more.

    `path` names the file all the time. `may_write` is asked right before the copy gets that name. If there is no room
    for the copy, the file stays: a process that still appended a line would do less harm than a run that ends.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        shutil.copyfile(path, draft)
    except FileNotFoundError:
        return
    except OSError as error:
        draft.unlink(missing_ok=True)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return
    if may_write():
        draft.replace(path)
    else:
        draft.unlink()


_FAULT: Final = {"time": float | int, "worker": int, "kind": str}


class FaultLog:
    """File of the times of injected failures; every failing process appends its line in one write.

    Detection is timed against it, so lines that are damaged are left out.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, *, worker: int, kind: str, phase: str | None, step: int | None, at_s: float | None = None) -> None:
        """Record that `worker` fails at `at_s`, in Unix seconds; None: now."""
        at_s = unix_s() if at_s is None else at_s
        line = json.dumps({"time": at_s, "worker": worker, "kind": kind, "phase": phase, "step": step}) + "\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def last(self, worker: int) -> dict[str, Any] | None:
        """Return the newest failure of `worker`, with `time` in Unix seconds; None if there is none."""
        return next((line for line in reversed(self.since(0)) if line["worker"] == worker), None)

    def since(self, time: float) -> list[dict[str, Any]]:
        """Return the failures of all workers from `time` on, in Unix seconds, oldest first."""
        found = (
            line for line in readable_lines(self._path) if all(isinstance(line.get(k), t) for k, t in _FAULT.items())
        )
        return [line for line in found if line["time"] >= time]
