"""Checks that look outside the configuration, at files and addresses. None starts a process."""

from __future__ import annotations

import errno
import socket
from pathlib import Path
from typing import TypeGuard

from chameleon_ft.config import Control, RunConfig, TrainConfig
from chameleon_ft.control.start_plan import read_start_plan
from chameleon_ft.errors import ConfigError
from chameleon_ft.profiles import costs_of_run, profile_of_run

# What needs numpy is imported where it is used: `--help` must not wait for it.

__all__ = ["absolute_job", "absolute_path", "check_address", "check_data_source", "check_inputs", "prepare_data_of"]


def absolute_job(reference: str) -> str:
    """Return `reference` with the path of a file made absolute. Raises ConfigError where it names nothing."""
    from chameleon_ft.job import check_job_reference

    check_job_reference(reference)
    location, colon, function = reference.rpartition(":")
    if not colon:
        location, function = reference, ""
    if location.endswith(".py"):
        location = str(absolute_path(Path(location)))
    return f"{location}{colon}{function}"


def absolute_path(path: Path) -> Path:
    """Return `path` so that it means the same from any working directory. Raises ConfigError for an unknown ~user."""
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:
        raise ConfigError(f"{path}: {error}; write the path out") from None


def check_address(control: Control) -> None:
    """Raise ConfigError where the coordinator could not listen, or the others could not tell where it does."""
    if control.host in ("0.0.0.0", "::"):
        raise ConfigError(
            f'control.host = "{control.host}": stands for every address of this host, and the workers need to be told '
            "one; give the one by which the other machines reach it"
        )
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(control.host, control.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # As the server will: a port that only waits for the stragglers of a closed connection is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror as error:
        raise ConfigError(f'control.host = "{control.host}": {error.strerror}; give an address of this host') from None
    except UnicodeError:
        raise ConfigError(
            f'control.host = "{control.host}": is no name of a host; give an address of this one'
        ) from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"control.port = {control.port}: is in use on {control.host}; take another one, or 0 for any free one"
            ) from None
        raise ConfigError(
            f'control.host = "{control.host}": cannot listen there: {error.strerror}; give an address of this host'
        ) from None


def check_inputs(config: RunConfig) -> None:
    """Raise ConfigError where the profile or the plan that `config` names cannot be used with it."""
    if config.profile is not None:
        profile = profile_of_run(config)
        if config.device == "emulated":
            costs_of_run(config, profile, dict.fromkeys(range(config.workers), ""))
    read_start_plan(config)


def check_data_source(config: RunConfig) -> str | None:
    """Return what there is to train on in words, None where the job brings its own data.

    Raises DataError where it is missing, empty, shorter than one sample or has ids that the model does not know.
    """
    if not _reads_data(config):
        return None
    from chameleon_ft.data.corpus import check_data

    data = check_data(config)
    skipped = f", {len(data.skipped)} files left out" if data.skipped else ""
    return f"data: {data.source}: {data.num_tokens:,} tokens, {data.num_samples:,} samples{skipped}"


def prepare_data_of(config: RunConfig) -> None:
    """Put the data into the run directory, `config.output_dir`, in the form that workers read. Raises DataError."""
    if _reads_data(config) and config.output_dir is not None:
        from chameleon_ft.data.corpus import prepare_data

        prepare_data(config, config.output_dir)


def _reads_data(config: RunConfig) -> TypeGuard[TrainConfig]:
    return isinstance(config, TrainConfig)
