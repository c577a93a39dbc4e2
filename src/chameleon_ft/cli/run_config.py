"""The configuration of a run, from a file or an earlier run and the flags of a command.

Modules that load numpy or torch are imported lazily, because `--help` must not wait for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chameleon_ft.config import LLAMA_JOB, RunConfig, TrainConfig, config_type, parse_config, parse_fields, read_toml
from chameleon_ft.control.wire.tls import tls_context
from chameleon_ft.errors import ConfigError


def configured(values: Mapping[str, Any], flags: Mapping[str, Any], *, job: str | None, source: str) -> RunConfig:
    """Return the validated configuration: `values`, read from `source`, overridden by `flags`.

    Paths become absolute, so that the configuration does not depend on the working directory.
    """
    config = overridden(values, flags, job=job, source=source)
    changes: dict[str, Any] = {"job": absolute_job(config.job)}
    for name in ("profile", "plan"):
        if (path := getattr(config, name)) is not None:
            changes[name] = _absolute_path(path)
    if (tls := config.control.tls) not in ("off", "generate"):
        directory = _absolute_path(Path(tls))
        tls_context(directory, server=True)
        changes["control"] = config.control.model_copy(update={"tls": str(directory)})
    if isinstance(config, TrainConfig) and config.data.path:
        path = _absolute_path(Path(config.data.path))
        changes["data"] = config.data.model_copy(update={"path": str(path)})
    return config.model_copy(update=changes)


def overridden(values: Mapping[str, Any], flags: Mapping[str, Any], *, job: str | None, source: str) -> RunConfig:
    """Return the validated configuration with all paths as they are given; see `configured`."""
    job = job or flags.get("job") or values.get("job", LLAMA_JOB)
    model = config_type({**values, "job": job})
    parse_fields(model, values, source=source)
    merged = dict(values)
    for key, value in flags.items():
        merged[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
    return parse_config(model, {**merged, "job": job}, source=f"{source} with the flags given" if flags else source)


def read_config_values(file: Path) -> dict[str, Any]:
    """Return the values of a configuration file; for a job, those of the configuration beside it, if there is one.

    Raises ConfigError if the file cannot be read, or a value is of a wrong type or out of range.
    """
    script = Path(str(file).partition(":")[0])
    if script.suffix != ".py":
        values, source = read_toml(file), file
    else:
        beside = script.with_suffix(".toml")
        values, source = {**(read_toml(beside) if beside.is_file() else {}), "job": str(file)}, beside
    parse_fields(config_type(values), values, source=str(source))
    return values


def absolute_job(reference: str) -> str:
    """Return a job reference with its file path, if any, made absolute. Raises ConfigError if there is no such job."""
    from chameleon_ft.job import check_job_reference

    check_job_reference(reference)
    location, colon, function = reference.rpartition(":")
    if not colon:
        location, function = reference, ""
    if location.endswith(".py"):
        location = str(_absolute_path(Path(location)))
    return f"{location}{colon}{function}"


def _absolute_path(path: Path) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:  # an unknown ~user
        raise ConfigError(f"{path}: {error}; write the path out") from None
