"""Configurations as TOML."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from chameleon_ft.config.run import RunConfig, TrainConfig
from chameleon_ft.config.validation import config_type, parse_config
from chameleon_ft.errors import ConfigError


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
    except (ValueError, RecursionError) as error:  # also for a number of too many digits, and too deep nesting
        raise ConfigError(f"{path}: is not valid TOML: {error}") from None


def read_recorded_toml(path: Path) -> dict[str, Any]:
    """Return the configuration that a run has recorded.

    Raises ConfigError as `read_toml`, and if the file is cut: a run records every setting.
    """
    values = read_toml(path)
    section, key = ("optimizer", "clip_norm") if config_type(values) is TrainConfig else ("control", "lease_s")
    last = values.get(section)
    if not isinstance(last, Mapping) or key not in last:
        raise ConfigError(
            f"{path}: is incomplete: {section}.{key}, the last setting that a run records, is missing; restore the file"
        )
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
