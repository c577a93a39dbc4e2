"""Configurations as TOML; renamed keys are accepted for one more release."""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import tomli_w

from chameleon_ft.config.run import RunConfig, TrainConfig
from chameleon_ft.config.validation import config_type, parse_config
from chameleon_ft.errors import ConfigError

__all__ = ["RENAMED_KEYS", "config_to_toml", "load_config", "present_name", "read_recorded_toml", "read_toml"]

_logger = logging.getLogger(__name__)

RENAMED_KEYS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "out": "output_dir",
        "data.kind": "data.format",
        "recovery.host_share": "recovery.host_failure_fraction",
        "recovery.restart_s": "recovery.restart_cost_s",
        "timeouts.collective_s": "timeouts.collective_timeout_s",
        "timeouts.heartbeat_s": "timeouts.heartbeat_timeout_s",
    }
)
"""Old dotted key -> new one, in the same section."""


def read_toml(path: Path) -> dict[str, Any]:
    """Return the configuration in a TOML file, and warn of names that are deprecated.

    Raises ConfigError that names the file and the place of a mistake in it.
    """
    values, renamed = _with_new_names(_content(path))
    for old, new in renamed.items():
        _logger.warning("%s: %s is deprecated, and gone in the next release; use %s", path, old, new)
    return values


def read_recorded_toml(path: Path) -> dict[str, Any]:
    """Return the configuration that a run has recorded, perhaps in an earlier release.

    Raises ConfigError as `read_toml`, and if the file is cut: a run records every setting.
    """
    values = _with_new_names(_content(path))[0]
    section, key = ("optimizer", "clip_norm") if config_type(values) is TrainConfig else ("control", "lease_s")
    last = values.get(section)
    if not isinstance(last, Mapping) or key not in last:
        raise ConfigError(
            f"{path}: is incomplete: {section}.{key}, the last setting that a run records, is missing; restore the "
            "file, or add that setting if an earlier version of chameleon has written it"
        )
    return values


def present_name(name: str, section: str, *, source: str) -> str:
    """Return the present name of a key of `section`, and warn if `name` is an old one."""
    new = RENAMED_KEYS.get(f"{section}.{name}")
    if new is None:
        return name
    new = new.rpartition(".")[2]
    _logger.warning("%s: %s is deprecated, and gone in the next release; use %s", source, name, new)
    return new


def _content(path: Path) -> dict[str, Any]:
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


def _with_new_names(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values under their new names, and the old names that were found, with the new ones.

    An old key beside its new one stays, to be refused as unknown.
    """
    current = {key: dict(value) if isinstance(value, Mapping) else value for key, value in values.items()}
    found = {}
    for old, new in RENAMED_KEYS.items():
        section, _, old_name = old.rpartition(".")
        own, new_name = current.get(section) if section else current, new.rpartition(".")[2]
        if isinstance(own, dict) and old_name in own and new_name not in own:
            own[new_name] = own.pop(old_name)
            found[old] = new
    recovery = current.get("recovery")
    if isinstance(recovery, dict) and recovery.get("policy") == "mend":
        recovery["policy"] = "repair"
        found['recovery.policy = "mend"'] = '"repair"'
    return current, found


def load_config(path: Path) -> RunConfig:
    """Read a configuration, of the type that its sections ask for. Raises ConfigError listing all that is wrong."""
    data = read_toml(path)
    return parse_config(config_type(data), data, source=str(path))


def config_to_toml(config: RunConfig) -> str:
    """Return `config` as TOML with every field resolved, which `load_config` reads back to an equal one.

    Unset fields are left out, and so is the run directory, which may be moved.
    """
    return tomli_w.dumps(config.model_dump(mode="json", exclude={"output_dir"}, exclude_none=True))
