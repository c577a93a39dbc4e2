"""Configurations of real runs, beside `tests.harness.small_config`."""

from __future__ import annotations

from pathlib import Path

from chameleon_ft.config import Failure, RunConfig, config_to_toml
from tests.backends import on_backend


def write_config(config: RunConfig, directory: Path) -> Path:
    """Write a configuration as a file, for commands, and return its path."""
    path = directory / "config.toml"
    path.write_text(config_to_toml(on_backend(config)))
    return path


def unhurried(workers: int, *, speed: float = 0.1) -> tuple[Failure, ...]:
    """Return what has workers compute at a share of their speed, and sleep for the rest, from the third step on.

    For runs that train while a test waits for something else: all that they take of the processors, others lack.
    """
    return tuple(Failure(step=2, worker=worker, kind="slow", factor=speed) for worker in range(workers))
