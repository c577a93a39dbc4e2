"""`chameleon ray` without a cluster: what it refuses."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from chameleon_ft.cli.main import main
from chameleon_ft.launch import ray as launch_ray
from tests.golden import message


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration whose text is short: that of the library takes seconds to find."""
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 200)
    file = tmp_path / "small.toml"
    file.write_text(f'workers = 4\nsteps = 20\n[data]\npath = "{tmp_path / "text.txt"}"\n')
    return file


def refused(capsys: pytest.CaptureFixture[str], config: Path, *arguments: str) -> str:
    """Return what the command says, which must leave no run behind."""
    run = config.with_name("run")
    assert main(["ray", str(config), "--output-dir", str(run), *arguments]) == 2
    assert not run.exists()
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_an_address_at_which_nothing_listens(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    pytest.importorskip("ray")
    address = f"127.0.0.1:{free_port()}"
    error = refused(capsys, config, "--address", address)
    assert f"--address {address}: no Ray cluster answers (Connection refused); start one by `ray start --head`" in error


def test_the_address_in_the_environment_counts(
    capsys: pytest.CaptureFixture[str], config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    assert "no Ray cluster answers (Connection refused)" in refused(capsys, config)


@pytest.mark.parametrize("address", ["ray://head:10001", "local", "head"])
def test_addresses_of_another_kind(capsys: pytest.CaptureFixture[str], config: Path, address: str) -> None:
    pytest.importorskip("ray")
    message(refused(capsys, config, "--address", address))


@pytest.mark.parametrize(
    "flags", [("--resource", "trainer"), ("--resource", "GPU=2"), ("--workers-per-node", "0"), ("--wait", "-1")]
)
def test_flags_that_cannot_be(capsys: pytest.CaptureFixture[str], config: Path, flags: tuple[str, ...]) -> None:
    message(refused(capsys, config, *flags))


def test_without_ray_the_extra_is_named(
    capsys: pytest.CaptureFixture[str], config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(launch_ray, "driver", raising=False)
    monkeypatch.delitem(sys.modules, "chameleon_ft.launch.ray.driver", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "Ray is not installed; install it by `pip install 'chameleon-ft[ray]'`" in refused(capsys, config)
