"""The address of the page, which is taken before anything else is begun."""

from __future__ import annotations

import importlib
import importlib.util
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from chameleon_ft.cli.page_flag import DEFAULT_ADDRESS, with_page_address
from tests.cli.conftest import CommandLine
from tests.observe.live.lines import new_run

importlib.import_module("chameleon_ft.launch.page")  # before there is a stand-in for the package


@pytest.fixture
def taken() -> Iterator[str]:
    """An address at which another process listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_page_without_an_address_has_the_default_one() -> None:
    default = f"--page={DEFAULT_ADDRESS}"
    assert with_page_address(["--page"]) == [default]
    assert with_page_address(["--page", "--steps", "5"]) == [default, "--steps", "5"]
    assert with_page_address(["--page", "config.toml"]) == [default, "config.toml"]
    for own in (["--page", "0.0.0.0:80"], ["--page=:80"], ["--page", "8080"], ["--page", "[::1]:80"], ["config.toml"]):
        assert with_page_address(own) == own


def test_an_address_that_is_taken_is_refused_before_anything_begins(
    chameleon: CommandLine, own_model: Path, taken: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    error = chameleon.refused("run", own_model, "--output-dir", out, "--page", taken)
    assert f"--page {taken}: cannot listen there: Address already in use; give another HOST:PORT" in error
    assert not out.exists()
    assert f"--page {taken}" in chameleon.refused("page", new_run(tmp_path).path, "--listen", taken)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("localhost:http", "write it as HOST:PORT"),
        ("no.such.host.invalid:80", "cannot listen"),
        ("9:99999", "HOST:PORT"),
    ],
)
def test_what_is_no_address_is_refused(chameleon: CommandLine, address: str, expected: str, tmp_path: Path) -> None:
    assert expected in chameleon.refused("page", new_run(tmp_path).path, "--listen", address)


def test_libraries_that_are_missing_are_named(
    chameleon: CommandLine, own_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else object())
    error = chameleon.refused("run", own_model, "--output-dir", tmp_path / "out", "--page", "127.0.0.1:0")
    assert "--page: uvicorn is not installed; run `pip install 'chameleon-ft[page]'`" in error


def test_a_run_that_goes_on_has_its_page_elsewhere(chameleon: CommandLine, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert "chameleon page RUN" in chameleon.refused("coordinator", "--take-over", run.path, "--page", "127.0.0.1:0")
