"""Profiles that are kept for the next command: hit, miss, and what they are told apart by."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from chameleon_ft.cost.presets import device, model_shape
from chameleon_ft.cost.profile import Profile, derived_profile
from chameleon_ft.storage.profiles import cached_profile, profile_cache, profile_cache_file, read_profile

PROFILE = derived_profile(model_shape("llama2-7b"), device("h100-80g"), micro_batch_size=1)
FINGERPRINT = PROFILE.fingerprint


class Measured:
    """Measures a profile, and counts how often."""

    def __init__(self, profile: Profile = PROFILE) -> None:
        self.profile = profile
        self.times = 0

    def __call__(self) -> Profile:
        self.times += 1
        return self.profile


def test_a_profile_is_measured_once(tmp_path: Path) -> None:
    measure, file = Measured(), tmp_path / "not" / "there" / "p.json"
    assert cached_profile(file, FINGERPRINT, measure) == PROFILE
    assert cached_profile(file, FINGERPRINT, measure) == PROFILE
    assert measure.times == 1
    assert [path.name for path in file.parent.iterdir()] == ["p.json"], "no draft is left"


@pytest.mark.parametrize(
    "changed",
    [
        replace(FINGERPRINT, model="another"),
        replace(FINGERPRINT, micro_batch_size=2),
        replace(FINGERPRINT, device="another"),
        replace(FINGERPRINT, threads=3),
        replace(FINGERPRINT, versions={"torch": "9"}),
    ],
)
def test_another_fingerprint_is_another_profile(tmp_path: Path, changed: object) -> None:
    assert isinstance(changed, type(FINGERPRINT))
    file = profile_cache_file(tmp_path, FINGERPRINT, backend="gloo")
    assert file == profile_cache_file(tmp_path, replace(FINGERPRINT), backend="gloo")
    assert file != profile_cache_file(tmp_path, changed, backend="gloo")
    assert file != profile_cache_file(tmp_path, FINGERPRINT, backend="nccl")
    # Even if a file were of another fingerprint than its name says.
    cached_profile(file, FINGERPRINT, Measured())
    other = Measured(replace(PROFILE, fingerprint=changed))
    assert cached_profile(file, changed, other).fingerprint == changed
    assert other.times == 1
    assert read_profile(file).fingerprint == changed


def test_a_damaged_file_is_measured_again(tmp_path: Path) -> None:
    file, measure = tmp_path / "p.json", Measured()
    file.write_text("{")
    assert cached_profile(file, FINGERPRINT, measure) == PROFILE
    assert measure.times == 1
    assert read_profile(file) == PROFILE


def test_a_profile_that_cannot_be_kept_is_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert cached_profile(tmp_path / "file" / "p.json", FINGERPRINT, Measured()) == PROFILE


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"XDG_CACHE_HOME": "/c", "HOME": "/h"}, "/c/chameleon-ft/profiles"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/chameleon-ft/profiles"),
        ({"HOME": "/h"}, "/h/.cache/chameleon-ft/profiles"),
    ],
)
def test_the_cache_is_where_the_platform_has_it(environ: dict[str, str], expected: str) -> None:
    assert profile_cache(environ) == Path(expected)
