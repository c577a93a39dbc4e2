"""Configurations as TOML."""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path
from typing import Any

import tomli_w

from chameleon_ft.config.renamed import RENAMED_KEYS, with_new_keys
from chameleon_ft.config.run import RunConfig
from chameleon_ft.config.validation import config_type, parse_config
from chameleon_ft.errors import ConfigError

__all__ = ["config_to_toml", "load_config", "read_recorded_toml", "read_toml"]

_logger = logging.getLogger(__name__)


def read_toml(path: Path) -> dict[str, Any]:
    """Return the configuration in a TOML file, and warn of keys that have a new name.

    Raises ConfigError that names the file and the place of a mistake in it.
    """
    values, old = with_new_keys(_content(path))
    for key in old:
        _logger.warning("%s: %s is deprecated, and gone in the next release; use %s", path, key, RENAMED_KEYS[key])
    return values


def read_recorded_toml(path: Path) -> dict[str, Any]:
    """Return the configuration that a run has recorded, which may be of an earlier release. Raises as `read_toml`."""
    return with_new_keys(_content(path))[0]


def _content(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; give the path of a TOML file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; give the path of a TOML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not text: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not valid TOML: {error}") from None


def load_config(path: Path) -> RunConfig:
    """Read a configuration, of the type that its sections ask for. Raises ConfigError listing all that is wrong."""
    data = read_toml(path)
    return parse_config(config_type(data), data, source=str(path))


def config_to_toml(config: RunConfig) -> str:
    """Return `config` as TOML with every field resolved, which `load_config` reads back to an equal one.

    The run directory itself is left out, so that a run may be moved; and what is not set.
    """
    return tomli_w.dumps(config.model_dump(mode="json", exclude={"output_dir"}, exclude_none=True))
