"""The configuration that a command is given, as a file of its own or beside a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chameleon_ft.config import read_toml

__all__ = ["config_values"]


def config_values(file: Path) -> dict[str, Any]:
    """Read what the configuration `file` says, or the one beside it, if there is one, where `file` is a job.

    Raises ConfigError where it cannot be read.
    """
    script = Path(str(file).partition(":")[0])
    if script.suffix != ".py":
        return read_toml(file)
    beside = script.with_suffix(".toml")
    return {**(read_toml(beside) if beside.is_file() else {}), "job": str(file)}
