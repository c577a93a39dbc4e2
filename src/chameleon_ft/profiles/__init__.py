"""Profiles: what the layers of a model and the links between workers cost, in a file that says what it is true of."""

from __future__ import annotations

from chameleon_ft.profiles.cache import cached_profile, profile_cache, profile_cache_file
from chameleon_ft.profiles.derived import derived_profile
from chameleon_ft.profiles.files import read_profile, write_profile
from chameleon_ft.profiles.of_run import costs_of_run, hosts_of_run, profile_of_run
from chameleon_ft.profiles.profile import AllReduceTime, Fingerprint, LayerTimes, Profile, Spread

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
