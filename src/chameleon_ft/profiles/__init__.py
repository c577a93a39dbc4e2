"""Profiles: costs of the layers of a model and of the links between workers, with the conditions that they hold for."""

from __future__ import annotations

from chameleon_ft.profiles.files import (
    cached_profile,
    costs_of_run,
    hosts_of_run,
    profile_cache,
    profile_cache_file,
    profile_of_run,
    read_profile,
    write_profile,
)
from chameleon_ft.profiles.profile import AllReduceTime, Fingerprint, LayerTimes, Profile, Spread, derived_profile

__all__ = [
    "AllReduceTime",
    "Fingerprint",
    "LayerTimes",
    "Profile",
    "Spread",
    "cached_profile",
    "costs_of_run",
    "derived_profile",
    "hosts_of_run",
    "profile_cache",
    "profile_cache_file",
    "profile_of_run",
    "read_profile",
    "write_profile",
]
