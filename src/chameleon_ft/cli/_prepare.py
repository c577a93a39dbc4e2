"""From a command line to a run that may start: its configuration, checked, and its directory."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Optional, Protocol

import tyro

from chameleon_ft.cli._flags import Parsed, optional_argument, parse_with_flags, with_new_flags
from chameleon_ft.cli._preflight import (
    absolute_job,
    absolute_path,
    check_address,
    check_data_source,
    check_inputs,
    prepare_data_of,
)
from chameleon_ft.config import (
    LLAMA_JOB,
    RENAMED_KEYS,
    RunConfig,
    TrainConfig,
    config_type,
    parse_config,
    parse_fields,
    read_recorded_toml,
    read_toml,
)
from chameleon_ft.errors import CheckpointError, ConfigError
from chameleon_ft.observe import RunDirectory, complete_checkpoints

__all__ = ["ConfigFile", "PreparedRun", "Resume", "Start", "StartArguments", "prepare_run"]

# Optional, for tyro knows that form without loading a type checker, which takes a tenth of a second.
ConfigFile = Annotated[
    Optional[Path],  # noqa: UP045
    tyro.conf.Positional,
    optional_argument("[CONFIG]", "TOML file with the configuration; a flag overrides what it says."),
]
Resume = Annotated[
    Optional[Path],  # noqa: UP045
    optional_argument("RUN", "Directory of a run to go on with from its newest checkpoint, also with other workers."),
]

_RENAMED_FLAGS = {f"--{old}".replace("_", "-"): f"--{new}".replace("_", "-") for old, new in RENAMED_KEYS.items()}
_FIXED = ("job", "model", "data", "optimizer", "seed", "batch")


class StartArguments:
    """Base of the arguments of a command that starts a run: a frozen dataclass with `config` and `resume`."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    config: Path | None
    resume: Path | None

    without: ClassVar[tuple[str, ...]] = ()
    """Fields of the configuration that have no flag, because the command sets them."""

    def config_file(self) -> Path | None:
        """Return the configuration file, if there is one."""
        return self.config

    def job(self) -> str | None:
        """Return the reference of the job, where that is an argument of its own."""
        return None

    def name(self) -> str:
        """Return the word that names the run."""
        file = self.config_file()
        return "llama" if file is None else file.stem


class Start(Protocol):
    """What starts the processes of a run and returns its exit code."""

    def __call__(self, config: RunConfig, *, run: RunDirectory, resume: bool) -> int: ...


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run that may start."""

    config: RunConfig
    """With `output_dir` as the run directory."""
    directory: RunDirectory
    resume: bool

    def start(self, entry: Start) -> int:
        """Start the run by `entry` and return its exit code.

        Raises ConfigError where the job itself turns out to be wrong, which only running its code can tell. Then, and
        when it is interrupted as early, the directory of a new run is gone again and not in the way of the next try.
        """
        try:
            return entry(self.config, run=self.directory, resume=self.resume)
        except (ConfigError, KeyboardInterrupt):
            if not self.resume and not self.directory.metrics_file.exists():
                shutil.rmtree(self.directory.path)
            raise


def prepare_run(own: type[StartArguments], arguments: Sequence[str], *, command: str) -> PreparedRun:
    """Read file and flags, check everything that can be checked beforehand, and make or open the run directory.

    Raises ConfigError or CheckpointError with what to change. Ends the process at --help.
    """
    arguments = with_new_flags(arguments, _RENAMED_FLAGS, command=command)
    if {"-h", "--help"} & set(arguments):
        model = RunConfig if own.without else TrainConfig
        parse_with_flags(own, model, arguments, command=command, defaults={}, without=own.without)
    # What the command line names decides which file the flags go over; the wider model knows all of them.
    first = parse_with_flags(own, TrainConfig, arguments, command=command, defaults={}, without=own.without)
    if first.own.resume is None:
        return _new_run(first, arguments, command=command)
    return _resumed_run(first, first.own.resume, arguments, command=command)


def _new_run(first: Parsed[StartArguments], arguments: Sequence[str], *, command: str) -> PreparedRun:
    file = first.own.config_file()
    values = {} if file is None else read_toml(file)
    source = "the configuration" if file is None else str(file)
    config = _config(first, values, arguments, command=command, source=source)
    out = config.output_dir or Path("runs") / f"{first.own.name()}-{time.strftime('%Y%m%d-%H%M%S')}"
    config = config.model_copy(update={"output_dir": out.absolute()})
    check_address(config.control)
    RunDirectory.require_free(out)
    if (data := check_data_source(config)) is not None:
        print(data)
    check_inputs(config)
    directory = RunDirectory.create(out, config)
    config = directory.own(config)
    prepare_data_of(config)
    return PreparedRun(config, directory, resume=False)


def _resumed_run(first: Parsed[StartArguments], path: Path, arguments: Sequence[str], *, command: str) -> PreparedRun:
    if first.own.config is not None or first.values["output_dir"] is not None:
        raise ConfigError(
            f"--resume {path}: takes configuration and directory from that run; "
            "leave out the configuration file and --output-dir, and give what is to change as flags"
        )
    directory = RunDirectory.open(path)
    _refuse_live_run(directory)
    values = read_recorded_toml(directory.config_file)
    # These have happened, and the workers that they name may not be there again.
    values.pop("failures", None)
    # It was for the workers of then.
    values.pop("plan", None)
    if "profile" in values:
        values["profile"] = str(directory.profile_file)
    config = _config(first, values, arguments, command=command, source=str(directory.config_file))
    config = config.model_copy(update={"output_dir": directory.path})
    check_inputs(config)
    _refuse_another_model(config, directory)
    _require_steps_left(config, directory)
    check_address(config.control)
    prepare_data_of(config)
    return PreparedRun(config, directory, resume=True)


def _config(
    first: Parsed[StartArguments], values: dict[str, Any], arguments: Sequence[str], *, command: str, source: str
) -> RunConfig:
    """Return the validated configuration of `values`, which `source` gave, and the flags over them."""
    flag_job = first.values.get("job", LLAMA_JOB)
    job = first.own.job() or (flag_job if flag_job != LLAMA_JOB else values.get("job", LLAMA_JOB))
    model = config_type({**values, "job": job})
    parse_fields(model, values, source=source)
    own = type(first.own)
    given = parse_with_flags(own, model, arguments, command=command, defaults=values, without=own.without)
    if any(argument.startswith("--") for argument in arguments):
        source += " with the flags given"
    return _with_absolute_paths(parse_config(model, {**given.values, "job": job}, source=source))


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return `config` so that it means the same from any working directory."""
    config = config.model_copy(update={"job": absolute_job(config.job)})
    for name in ("profile", "plan"):
        if (file := getattr(config, name)) is not None:
            config = config.model_copy(update={name: absolute_path(file)})
    if isinstance(config, TrainConfig) and config.data.path:
        path = str(absolute_path(Path(config.data.path)))
        config = config.model_copy(update={"data": config.data.model_copy(update={"path": path})})
    return config


def _refuse_live_run(directory: RunDirectory) -> None:
    try:
        pid = directory.read_control().pid
        os.kill(pid, 0)
    except (ConfigError, ProcessLookupError):
        return
    except PermissionError:
        pass  # it lives, and belongs to someone else
    raise ConfigError(
        f"--resume {directory.path}: this run is still going on in process {pid}; wait for its end or end it first"
    )


def _refuse_another_model(config: RunConfig, directory: RunDirectory) -> None:
    """Refuse to change on the way what the weights, or the numbering of the samples, depend on."""
    stored, asked = (value.model_dump(include=set(_FIXED)) for value in (directory.config(), config))
    for key in _FIXED:
        if stored.get(key) != asked.get(key):
            raise CheckpointError(
                f"--resume {directory.path}: its checkpoint is of a run with {_difference(key, stored, asked)}; "
                f"leave {key} as it was, or begin a new run"
            )


def _require_steps_left(config: RunConfig, directory: RunDirectory) -> None:
    checkpoints = complete_checkpoints(directory.checkpoints)
    if not checkpoints:
        raise CheckpointError(
            f"--resume {directory.path}: it has no complete checkpoint to go on from; begin a new run, "
            "with checkpoint.every set if it should survive the loss of every holder of a layer"
        )
    if checkpoints[-1] >= config.steps:
        raise ConfigError(
            f"--resume {directory.path}: all of its {config.steps} steps are done; give a larger --steps to train on"
        )


def _difference(key: str, stored: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    before, now = stored.get(key), asked.get(key)
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return f"{key} = {before}, and {now} is asked for"
    field = next(name for name in before if before[name] != now[name])
    return f"{key}.{field} = {before[field]}, and {now[field]} is asked for"
