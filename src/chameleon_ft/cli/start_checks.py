"""Checks before a run starts: its address, its inputs, and the checkpoint that it resumes from."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from typing import Final

from chameleon_ft.config import Control, RunConfig
from chameleon_ft.control.start_plan import read_start_plan
from chameleon_ft.control.wire.address import address_of_host
from chameleon_ft.errors import CheckpointError, ConfigError
from chameleon_ft.observe import RunDirectory, Storage, sound_checkpoint
from chameleon_ft.profiles import costs_of_run, profile_of_run

FIXED: Final = ("job", "model", "data", "optimizer", "seed", "batch", "precision", "fp32_modules")
"""Keys that determine the weights or the numbering of samples; a resumed run has to keep them."""
FIXED_BY_FORK: Final = tuple(key for key in FIXED if key not in ("optimizer", "batch"))
"""Those that a forked run has to keep, too."""


def require_same_model(config: RunConfig, directory: RunDirectory, *, fixed: Sequence[str]) -> None:
    """Raise CheckpointError if `config` changes one of the `fixed` keys of the run in `directory`."""
    stored, wanted = (value.model_dump(include=set(fixed)) for value in (directory.config(), config))
    for key in fixed:
        before, now = stored.get(key), wanted.get(key)
        if before == now:
            continue
        name = key
        if isinstance(before, dict) and isinstance(now, dict):
            field = next(field for field in before if before[field] != now[field])
            name, before, now = f"{key}.{field}", before[field], now[field]
        remedy = f"keep {key} unchanged, or begin a new run"
        if key not in FIXED_BY_FORK:
            remedy += ", or continue from its state in a new directory by --fork --output-dir DIRECTORY"
        raise CheckpointError(
            f"--resume {directory.path}: its checkpoint was written with {name} = {before}, not {now}; {remedy}"
        )


def newest_checkpoint(config: RunConfig, directory: RunDirectory, *, checkpoints: Storage) -> int:
    """Return the step of the newest checkpoint that can be read; raise if there is none, or no step is left."""
    newest, damages = sound_checkpoint(checkpoints)
    if newest is None:
        found = f" ({'; '.join(damages.values())})" if damages else ""
        raise CheckpointError(
            f"--resume {directory.path}: it has no complete checkpoint to resume from{found}; begin a new run, and do "
            "not set checkpoint.every to 0 if it should survive the loss of its coordinator"
        )
    if newest >= config.steps:
        raise ConfigError(
            f"--resume {directory.path}: all of its {config.steps} steps are done; give a larger --steps to continue"
        )
    return newest


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
