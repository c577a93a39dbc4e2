"""The configuration of a run: read from a file or given as values, overridden, and checked before anything starts.

Modules that load numpy or torch are imported lazily, because `--help` must not wait for them.
"""

from __future__ import annotations

import ast
import errno
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, Self, TypeAlias

from chameleon_ft.config import (
    LLAMA_JOB,
    Control,
    LlamaConfig,
    RunConfig,
    TrainConfig,
    config_type,
    parse_config,
    parse_fields,
    read_toml,
)
from chameleon_ft.errors import CheckpointError, ConfigError
from chameleon_ft.protocol.address import address_of_host, tls_context
from chameleon_ft.storage.checkpoints import named_step, require_complete, sound_checkpoint
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.plans import read_start_plan
from chameleon_ft.storage.profiles import costs_of_run, profile_of_run
from chameleon_ft.storage.stores import Storage, checkpoint_storage

NamedStep: TypeAlias = 'int | Literal["best"] | None'
"""A checkpoint as a user names it; see `named_step` of `storage.checkpoints`."""
CALLBACK: Final = "callback"
"""The kind of function that the setting `callbacks` names, which is also its name where a reference has none."""
AUTO: Final = "auto"
"""The value of `RunRequest.resume` that resumes a run if its directory has a checkpoint, and starts it otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """A run as its user asks for it.

    Attributes:
        file: The configuration file.
        values: The content of the configuration, instead of a file.
        changes: Values that override those of the configuration, sections as dictionaries.
        resume: Directory of the run to resume, or the URL of its store, instead of a configuration; `AUTO`: the run
            that the configuration names, if it has a checkpoint.
        fork: Continue from the state of that run in a new directory, maybe with another batch or optimizer.
        from_step: Continue from the checkpoint of this step, or the best one, instead of the newest one.
        skip_samples: Leave out so many samples before the first step; None: as many as before, if it began there.
        name: Name of a new run; by default that of the file.
    """

    file: Path | None = None
    values: Mapping[str, Any] | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    resume: str | None = None
    fork: bool = False
    from_step: NamedStep = None
    skip_samples: int | None = None
    name: str | None = None

    def of_job(self, job: str) -> Self:
        """Return the request for a job of the user; a new run reads the configuration beside its file if none is given.

        Raises ConfigError if there is no such job.
        """
        script, file = Path(job.partition(":")[0]), self.file
        is_new = self.resume in (None, AUTO)
        if not self.is_configured and is_new and (beside := script.with_suffix(".toml")).is_file():
            file = beside
        return replace(self, file=file, changes={**self.changes, "job": absolute_job(job)}, name=script.stem)

    @property
    def is_configured(self) -> bool:
        """Whether a configuration is given beside the changes."""
        return self.file is not None or self.values is not None

    @property
    def usual_name(self) -> str:
        """The name of a new run."""
        return self.name or ("llama" if self.file is None else self.file.stem)

    def given_config(self) -> RunConfig:
        """Return the validated configuration, with paths as they are given. Raises ConfigError."""
        values = dict(self.values or {}) if self.file is None else read_toml(self.file)
        return overridden(values, self.changes, source="the configuration" if self.file is None else str(self.file))

    def config(self) -> RunConfig:
        """Return the validated configuration, with absolute paths. Raises ConfigError."""
        return with_absolute_paths(self.given_config())


def overridden(values: Mapping[str, Any], changes: Mapping[str, Any], *, source: str) -> RunConfig:
    """Return the validated configuration: `values`, read from `source`, overridden by `changes`. Raises ConfigError."""
    job = changes.get("job") or values.get("job", LLAMA_JOB)
    model = config_type({**values, "job": job})
    parse_fields(model, values, source=source)
    merged = dict(values)
    for key, value in changes.items():
        merged[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
    return parse_config(model, {**merged, "job": job}, source=f"{source} with the flags given" if changes else source)


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return a configuration that does not depend on the working directory. Raises ConfigError for a missing job."""
    changes: dict[str, Any] = {"job": absolute_job(config.job)}
    changes["callbacks"] = tuple(_absolute_callback(each) for each in config.callbacks)
    for name in ("profile", "plan"):
        if (path := getattr(config, name)) is not None:
            changes[name] = _absolute_path(path)
    if (tls := config.control.tls) not in ("off", "generate"):
        directory = _absolute_path(Path(tls))
        tls_context(directory, server=True)
        changes["control"] = config.control.model_copy(update={"tls": str(directory)})
    if isinstance(config, TrainConfig):
        data = config.data
        mixture = tuple(each.model_copy(update={"path": str(_absolute_path(Path(each.path)))}) for each in data.mixture)
        path = str(_absolute_path(Path(data.path))) if data.path else ""
        changes["data"] = data.model_copy(update={"path": path, "mixture": mixture})
        if config.model.hf:
            changes["model"] = _with_sizes(config.model)
    return config.model_copy(update=changes)


def refuse_job_arguments(given: Mapping[str, str]) -> None:
    """Raise ConfigError if there are arguments for a job, and no configuration that has one."""
    for name in given:
        raise ConfigError(f"--job.{name}: is an argument of a job; give the Python file of that, or a configuration")


def _with_sizes(model: LlamaConfig) -> LlamaConfig:
    """Return the section of a model of transformers with the numbers of its ids and layers. Raises ConfigError."""
    file = _absolute_path(Path(model.hf)) / "config.json"
    try:
        sizes = json.loads(file.read_text(encoding="utf-8"))
        sizes = sizes.get("text_config", sizes)
        vocabulary, layers = int(sizes["vocab_size"]), int(sizes.get("num_hidden_layers") or sizes["n_layer"])
    except OSError as error:
        raise ConfigError(f"model.hf: {file} cannot be read: {error.strerror}; give the folder of a model") from None
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ConfigError(f"model.hf: {file} does not say how large the model is: {error!r}") from None
    return model.model_copy(update={"hf": str(file.parent), "vocab_size": vocabulary, "num_layers": layers})


def read_config_values(file: Path, job_arguments: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """Return the values of a configuration file; for a job, those of the configuration beside it, if there is one.

    `job_arguments` go over those of the file.

    Raises ConfigError if the file cannot be read, or a value is of a wrong type or out of range.
    """
    script = Path(str(file).partition(":")[0])
    if script.suffix != ".py":
        values, source = read_toml(file), file
    else:
        beside = script.with_suffix(".toml")
        values, source = {**(read_toml(beside) if beside.is_file() else {}), "job": str(file)}, beside
    parse_fields(config_type(values), values, source=str(source))
    if job_arguments:
        values["job_arguments"] = {**values.get("job_arguments", {}), **job_arguments}
    return values


def split_callback(text: str) -> tuple[str, dict[str, Any]]:
    """Return the reference and the arguments of a setting such as "my_job.py:Best(patience=3)". Raises ConfigError."""
    reference, bracket, arguments = text.partition("(")
    if not bracket:
        return text, {}
    try:
        match ast.parse(f"f({arguments}", mode="eval").body:
            case ast.Call(func=ast.Name(), args=[], keywords=keywords) if all(each.arg for each in keywords):
                return reference, {str(each.arg): ast.literal_eval(each.value) for each in keywords}
    except (SyntaxError, ValueError):
        pass
    raise ConfigError(
        f'{CALLBACK} "{text}": write a function or a class, and its arguments as in '
        '"chameleon_ft:EarlyStop(patience=3)"'
    )


def _absolute_callback(text: str) -> str:
    """Return the setting of a callback with its file path, if any, made absolute. Raises ConfigError."""
    reference, _ = split_callback(text)
    return absolute_job(reference, kind=CALLBACK) + text.removeprefix(reference)


def absolute_job(reference: str, kind: str = "job") -> str:
    """Return a job reference with its file path, if any, made absolute. Raises ConfigError if there is no such job."""
    from chameleon_ft.job.reference import check_job_reference

    check_job_reference(reference, kind)
    location, colon, function = reference.rpartition(":")
    if not colon:
        location, function = reference, ""
    if location.endswith(".py"):
        location = str(_absolute_path(Path(location)))
    return f"{location}{colon}{function}"


def _absolute_path(path: Path) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:
        # There is no user of the name after the tilde.
        raise ConfigError(f"{path}: {error}; write the path out") from None


def check_inputs(config: RunConfig) -> None:
    """Raise ConfigError if the profile or the plan that `config` names cannot be used with it."""
    if config.profile is not None:
        profile = profile_of_run(config)
        if config.is_emulated:
            costs_of_run(config, profile, dict.fromkeys(range(config.workers), ""))
    read_start_plan(config)


def check_address(control: Control) -> None:
    """Raise ConfigError if the coordinator cannot listen on the address, or workers cannot connect to it."""
    host = f'control.host = "{control.host}"'
    if control.host in ("0.0.0.0", "::"):
        raise ConfigError(
            f"{host}: means every address of this host, but the workers need a single one; give the address at "
            "which the other machines reach this host"
        )
    own = address_of_host(control.host)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(own, control.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # Like the server, accept a port whose last connection is still in TIME_WAIT.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror as error:
        raise ConfigError(f"{host}: {error.strerror}; give an address of this host") from None
    except UnicodeError:
        raise ConfigError(f"{host}: is not a host name; give an address of this host") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"control.port = {control.port}: is in use on {control.host}; choose another, or 0 for any free port"
            ) from None
        raise ConfigError(f"{host}: cannot listen there: {error.strerror}; give an address of this host") from None


def prepare_data_of(config: RunConfig, *, may_differ: bool = False) -> None:
    """Write the data into the run directory as workers read it, maybe other than before. Raises DataError."""
    if isinstance(config, TrainConfig) and config.output_dir is not None:
        from chameleon_ft.data.corpus import check_data, prepare_data

        if may_differ:
            check_data(config)
        prepare_data(config, config.output_dir, may_differ=may_differ)


def checkpoint_of(run: RunDirectory, named: NamedStep) -> tuple[Storage, int]:
    """Return the place of a run's checkpoints, and the step of the one that is named, or of the newest.

    Raises CheckpointError if there is none, or it is visibly damaged.
    """
    config = run.config()
    checkpoints = checkpoint_storage(config, run)
    step = named_step(checkpoints, named, criterion=config.checkpoint.keep_best)
    if step is None and (step := sound_checkpoint(checkpoints)[0]) is None:
        raise CheckpointError(
            f"{run.path}: there is no complete checkpoint; have one written while the run is live by `chameleon "
            "checkpoint`, or set checkpoint.every"
        )
    require_complete(checkpoints, step)
    return checkpoints, step
