"""Profiles as JSON files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from chameleon_ft.errors import ConfigError, ProfileError
from chameleon_ft.profiles.profile import Profile

__all__ = ["read_profile", "write_profile"]


class _File(BaseModel):
    """The whole file. What is in it is as strict as this."""

    model_config = ConfigDict(extra="forbid", strict=True, ser_json_inf_nan="constants")

    format: Literal["chameleon-profile-1"] = "chameleon-profile-1"
    profile: Profile


def read_profile(path: Path) -> Profile:
    """Read what `write_profile` wrote.

    Raises:
        ProfileError: no such file, or not a profile; the message names the field and what is wrong with it.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ProfileError(f"profile {path}: cannot be read: {error.strerror}") from None
    try:
        return _File.model_validate_json(content).profile
    except ValidationError as error:
        raise ProfileError(f"profile {path}: {_first_problem(error)}; give a file of `chameleon profile`") from None
    except ConfigError as error:
        raise ProfileError(f"profile {path}: {error}") from None


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile for people and programs to read. Raises ProfileError where that fails."""
    content = _File.model_construct(profile=profile).model_dump_json(indent=1)
    try:
        path.write_text(content + "\n", encoding="utf-8")
    except OSError as error:
        raise ProfileError(f"profile {path}: cannot be written: {error.strerror}") from None


def _first_problem(error: ValidationError) -> str:
    first: Any = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"]))
    what = "is missing" if first["type"] == "missing" else str(first["msg"])
    return f"{where}: {what}" if where else what
