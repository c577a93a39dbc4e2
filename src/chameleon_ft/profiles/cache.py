"""Profiles that were measured for a command and are kept for the next one, by what they are true of."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from chameleon_ft.errors import ProfileError
from chameleon_ft.profiles.files import read_profile, write_profile
from chameleon_ft.profiles.profile import Fingerprint, Profile

__all__ = ["cached_profile", "profile_cache", "profile_cache_file"]

_logger = logging.getLogger(__name__)


def profile_cache(environ: Mapping[str, str]) -> Path:
    """The user's folder of cached profiles, by the XDG base directory specification: $XDG_CACHE_HOME or ~/.cache."""
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    # The specification has relative paths ignored.
    base = base if base.is_absolute() else Path(environ.get("HOME", "~")).expanduser() / ".cache"
    return base / "chameleon-ft" / "profiles"


def profile_cache_file(folder: Path, fingerprint: Fingerprint, *, backend: str) -> Path:
    """The file of a profile: another one for every fingerprint and for every library that carried the messages."""
    key = json.dumps([dataclasses.asdict(fingerprint), backend], sort_keys=True)
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def cached_profile(file: Path, fingerprint: Fingerprint, measure: Callable[[], Profile]) -> Profile:
    """Return the profile in `file`, or measure it and keep it there.

    A file that is damaged or of another fingerprint is replaced. A profile that cannot be kept is returned all the
    same. Raises what `measure` raises.
    """
    try:
        found = read_profile(file)
        if found.fingerprint == fingerprint:
            return found
        _logger.info("profile %s is of %s, not of %s", file, found.fingerprint, fingerprint)
    except ProfileError as error:
        _logger.info("no profile in the cache: %s", error)
    profile = measure()
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_profile(profile, draft)
        draft.replace(file)
    except (OSError, ProfileError) as error:
        _logger.warning("the profile cannot be kept: %s", error)
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
    return profile
