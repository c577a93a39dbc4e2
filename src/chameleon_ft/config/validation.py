"""Turning what a user wrote into a configuration, or into one message that lists everything wrong with it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from chameleon_ft.config.run import LLAMA_JOB, RunConfig, TrainConfig
from chameleon_ft.errors import ConfigError

__all__ = ["config_type", "parse_config", "parse_fields"]

_Config = TypeVar("_Config", bound=BaseModel)
_RELATION = "relation"  # the error type that Section raises
_MISSING = object()


def config_type(data: Mapping[str, Any]) -> type[RunConfig]:
    """Return the type that describes `data`: `TrainConfig` for the Llama, and where it has a section of that one's."""
    own = set(TrainConfig.model_fields) - set(RunConfig.model_fields)
    return TrainConfig if own & set(data) or data.get("job", LLAMA_JOB) == LLAMA_JOB else RunConfig


def parse_config(model: type[_Config], data: Mapping[str, Any], *, source: str) -> _Config:
    """Validate `data` as `model`.

    Raises ConfigError that names `source` and lists every wrong key with its value and what to change.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _config_error(model, data, error, source) from None


def parse_fields(model: type[BaseModel], data: Mapping[str, Any], *, source: str) -> None:
    """Check every field of `data` by itself and leave aside how they relate, which flags may still change.

    Raises ConfigError as `parse_config` does.
    """
    try:
        model.model_validate(data)
    except ValidationError as error:
        if any(detail["type"] != _RELATION for detail in error.errors()):
            raise _config_error(model, data, error, source) from None


def _config_error(model: type[BaseModel], data: Mapping[str, Any], error: ValidationError, source: str) -> ConfigError:
    lines = list(_lines(model, data, error))
    if len(lines) == 1:
        return ConfigError(f"{source}: {lines[0]}")
    return ConfigError(f"{source}: {len(lines)} errors:\n" + "\n".join(f"  {line}" for line in lines))


def _lines(model: type[BaseModel], data: Mapping[str, Any], error: ValidationError) -> Iterator[str]:
    for detail in error.errors(include_url=False):
        location = detail["loc"]
        if detail["type"] == _RELATION:
            for field, message in detail["ctx"]["problems"]:
                key = ".".join(part for part in (_dotted(location), field) if part)
                yield f"{key}{_shown(_value(model, data, key))}: {message}"
        elif detail["type"] == "extra_forbidden":
            yield _unknown_key(model, location)
        elif detail["type"] == "missing":
            yield f"{_dotted(location)}: is missing; add it"
        else:
            message = detail["msg"].replace("Input should be", "should be").replace("String should", "should")
            yield f"{_dotted(location)}{_shown(detail['input'])}: {message}"


def _unknown_key(model: type[BaseModel], location: tuple[int | str, ...]) -> str:
    *parents, name = location
    section = _section_at(model, parents)
    known = list(section.model_fields)
    prefix = _dotted(tuple(parents))
    if elsewhere := _keys_named(model, str(name)):
        hint = f"did you mean {elsewhere[0]}?"
    elif near := difflib.get_close_matches(str(name), known, n=1, cutoff=0.5):
        hint = f"did you mean {prefix + '.' if prefix else ''}{near[0]}?"
    else:
        hint = f"known here: {', '.join(known)}"
    return f"{_dotted(location)}: unknown key; {hint}"


def _section_at(model: type[BaseModel], parents: list[int | str]) -> type[BaseModel]:
    for part in parents:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        model = next(kind for kind in candidates if isinstance(kind, type) and issubclass(kind, BaseModel))
    return model


def _keys_named(model: type[BaseModel], name: str, prefix: str = "") -> list[str]:
    """Return the dotted keys of all fields called `name`: a key put into the wrong section is a common slip."""
    found = []
    for field, info in model.model_fields.items():
        if field == name:
            found.append(prefix + field)
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            found += _keys_named(info.annotation, name, f"{prefix}{field}.")
    return found


def _value(model: type[BaseModel], data: Mapping[str, Any], key: str) -> object:
    """Return the value at a dotted key, which may be a default that `data` does not mention."""
    value: Any = data
    defaults: Any = model.model_construct()
    for part in key.replace("[", ".").replace("]", "").split("."):
        if isinstance(value, Mapping):
            value = value.get(part, _MISSING)
        elif isinstance(value, list | tuple):
            value = value[int(part)]
        else:
            value = getattr(value, part, _MISSING)
        defaults = getattr(defaults, part, _MISSING)
    return defaults if value is _MISSING else value


def _dotted(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _shown(value: object) -> str:
    if value is _MISSING or isinstance(value, Mapping | BaseModel):
        return ""
    return f' = "{value}"' if isinstance(value, str) else f" = {value}"
