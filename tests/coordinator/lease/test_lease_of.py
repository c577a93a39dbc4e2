"""The choice of the lease by the configuration."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from chameleon_ft.config import Control, RunConfig
from chameleon_ft.coordinator.lease import lease_of
from chameleon_ft.errors import ConfigError
from chameleon_ft.storage.files import RunDirectory
from tests.coordinator.lease.api_server import api_server
from tests.coordinator.lease.places import claim_of, without_renewals


def config_with(lease: str) -> RunConfig:
    return RunConfig(control=Control(lease=lease))


def test_by_default_the_lease_is_in_the_run_directory(tmp_path: Path) -> None:
    assert asyncio.run(lease_of(RunConfig(), RunDirectory(tmp_path)).claim(claim_of(1)))
    assert (tmp_path / "terms" / "000001.json").exists()


@pytest.mark.parametrize("lease", ["files", "kubernetes"])
def test_a_run_is_one_by_whatever_path_it_is_reached(
    lease: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with api_server(tmp_path / "api") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        (tmp_path / "run").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "run")
        assert asyncio.run(lease_of(config_with(lease), RunDirectory(tmp_path / "run")).claim(claim_of(1)))
        newest = asyncio.run(lease_of(config_with(lease), RunDirectory(tmp_path / "link")).newest())
    assert without_renewals(newest) == claim_of(1)


def test_an_environment_that_lacks_something_is_an_error_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="KUBERNETES_SERVICE_HOST"):
        lease_of(config_with("kubernetes"), RunDirectory(tmp_path))
    with pytest.raises(ConfigError, match="write it as HOST:PORT"):
        lease_of(config_with("etcd://a:99999"), RunDirectory(tmp_path))
