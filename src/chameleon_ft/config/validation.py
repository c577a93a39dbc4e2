"""Configurations as TOML: reading, writing, and validation with one message that lists everything wrong."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

import tomli_w
from pydantic import BaseModel, ValidationError

from chameleon_ft.config.run import LLAMA_JOB, RunConfig, TrainConfig, config_type
from chameleon_ft.config.sections import RELATION_ERROR
from chameleon_ft.errors import ConfigError

_Config = TypeVar("_Config", bound=BaseModel)


def parse_config(model: type[_Config], data: Mapping[str, Any], *, source: str) -> _Config:
    """Validate `data` as `model`.

    Raises ConfigError that names `source` and lists every wrong key with its value and what to change.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _config_error(model, error, source) from None


def parse_fields(model: type[BaseModel], data: Mapping[str, Any], *, source: str) -> None:
    """Check every field of `data` by itself, but not the relations between fields, which flags may still change.

    Raises ConfigError as `parse_config` does.
    """
    try:
        model.model_validate(data)
    except ValidationError as error:
        if any(detail["type"] != RELATION_ERROR for detail in error.errors()):
            raise _config_error(model, error, source) from None


def _config_error(model: type[BaseModel], error: ValidationError, source: str) -> ConfigError:
    lines = list(_lines(model, error))
    if len(lines) == 1:
        return ConfigError(f"{source}: {lines[0]}")
    return ConfigError(f"{source}: {len(lines)} errors:\n" + "\n".join(f"  {line}" for line in lines))


def _lines(model: type[BaseModel], error: ValidationError) -> Iterator[str]:
    for detail in error.errors(include_url=False):
        key = _dotted(detail["loc"])
        if detail["type"] == RELATION_ERROR:
            for field, value, message in detail["ctx"]["problems"]:
                yield f"{key}.{field}".removeprefix(".") + f"{_shown(value)}: {message}"
        elif detail["type"] == "extra_forbidden":
            yield f"{key}: unknown key; {_hint(model, detail['loc'])}"
        elif detail["type"] == "missing":
            yield f"{key}: is missing; add it"
        else:
            message = detail["msg"].replace("Input should be", "should be").replace("String should", "should")
            yield f"{key}{_shown(detail['input'])}: {message}"


def _hint(model: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """Say which key was meant instead of an unknown one: the same in another section, or a similar one."""
    *parents, name = location
    keys = list(_keys(model))
    section = tuple(part for part in parents if isinstance(part, str))
    siblings = [key[-1] for key in keys if key[:-1] == section]
    elsewhere = [key for key in keys if key[-1] == name and key[0] != "failures"]
    if elsewhere:
        return f"did you mean {'.'.join(elsewhere[0])}?"
    if near := difflib.get_close_matches(str(name), siblings, n=1, cutoff=0.5):
        return f"did you mean {_dotted((*parents, near[0]))}?"
    return f"known here: {', '.join(siblings)}"


def _keys(model: type[BaseModel], parents: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every field, those of sections included."""
    for name, info in model.model_fields.items():
        yield (*parents, name)
        for kind in (info.annotation, *get_args(info.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _keys(kind, (*parents, name))


def _dotted(location: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")


def _shown(value: object) -> str:
    if isinstance(value, Mapping | BaseModel):
        return ""
    return f' = "{value}"' if isinstance(value, str) else f" = {value}"


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file. Raises ConfigError that names the file and the place of a mistake in it."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; give the path of a TOML file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; give the path of a TOML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not text: {error}") from None
    except (ValueError, RecursionError) as error:
        # Also a number of too many digits, and too deep nesting.
        raise ConfigError(f"{path}: is not valid TOML: {error}") from None


_RENAMED: Final = {
    ("preflight", "least_free_memory"): "min_free_memory",
    ("preflight", "least_speed"): "min_speed",
    ("preflight", "most_clock_error_s"): "max_clock_error_s",
    ("emulation", "least_message_s"): "min_message_s",
}
"""Settings that older runs have recorded by another name."""
_RENAMED_LLAMA_JOB: Final = "chameleon_ft.models.llama_job:llama_job"


def read_recorded_toml(path: Path) -> dict[str, Any]:
    """Return the configuration that a run has recorded, with the present names of settings and jobs.

    Raises ConfigError as `read_toml`, and if the file is cut: a run records every setting.
    """
    values = read_toml(path)
    if values.get("job") == _RENAMED_LLAMA_JOB:
        values["job"] = LLAMA_JOB
    section, key = ("optimizer", "clip_norm") if config_type(values) is TrainConfig else ("control", "lease_s")
    last = values.get(section)
    if not isinstance(last, Mapping) or key not in last:
        raise ConfigError(
            f"{path}: is incomplete: {section}.{key}, the last setting that a run records, is missing; restore the file"
        )
    for (section, key), name in _RENAMED.items():
        if key in values.get(section, {}):
            values[section][name] = values[section].pop(key)
    return values


def load_config(path: Path) -> RunConfig:
    """Read a configuration, of the type that its sections ask for. Raises ConfigError listing all that is wrong."""
    data = read_toml(path)
    return parse_config(config_type(data), data, source=str(path))


def config_to_toml(config: RunConfig) -> str:
    """Return `config` as TOML with every field resolved, which `load_config` reads back to an equal one.

    Unset fields are left out, and so is the run directory, which may be moved.
    """
    return tomli_w.dumps(config.model_dump(mode="json", exclude={"output_dir"}, exclude_none=True))
