"""The address of the page, which is taken before anything else is begun."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import json
import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast
from urllib.request import urlopen

import pytest

from chameleon_ft.cli.arguments import DEFAULT_ADDRESS, page_beside, with_page_address
from chameleon_ft.config import RunConfig
from chameleon_ft.errors import ConfigError
from chameleon_ft.session.joining import JoinRequest
from chameleon_ft.storage.files import RunDirectory
from tests.cli.conftest import CommandLine
from tests.golden import message
from tests.report.live.lines import add, event, new_run, started, stepped

PageServer = importlib.import_module(
    "chameleon_ft.launch.page"
).PageServer  # before there is a stand-in for the package


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


@pytest.mark.parametrize("address", ["localhost:http", "no.such.host.invalid:80", "9:99999"])
def test_what_is_no_address_is_refused(chameleon: CommandLine, address: str, tmp_path: Path) -> None:
    message(chameleon.refused("page", new_run(tmp_path).path, "--listen", address))


def test_libraries_that_are_missing_are_named(
    chameleon: CommandLine, own_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else object())
    error = chameleon.refused("run", own_model, "--output-dir", tmp_path / "out", "--page", "127.0.0.1:0")
    assert "--page: uvicorn is not installed; run `pip install 'chameleon-ft[page]'`" in error


def test_the_address_is_free_again_when_a_command_is_refused() -> None:
    pages: list[Any] = []

    def refused() -> None:
        with page_beside("127.0.0.1:0") as shown:
            pages.append(cast(Any, shown).__self__)
            raise ConfigError("no such run")

    with pytest.raises(ConfigError):
        refused()
    host, _, port = pages[0].address.rpartition(":")
    socket.create_server((host, int(port))).close()


@pytest.mark.parametrize("flag", ["--take-over", "--standby"])
def test_a_run_that_goes_on_has_its_page_there_with_the_token_of_before(
    chameleon: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flag: str
) -> None:
    run = new_run(tmp_path)
    lost = {"address": "10.0.0.1:8790", "token": "of before", "pid": 1}
    (run.path / "page.json").write_text(json.dumps(lost))
    pages: list[dict[str, str]] = []

    def look(config: RunConfig, *, run: RunDirectory, host: str | None = None) -> int:
        pages.append(json.loads((run.path / "page.json").read_text()))
        with urlopen(f"http://{pages[0]['address']}/api/state", timeout=60) as answer:
            assert json.load(answer)["report"]["condition"] == "waiting"
        return 0

    monkeypatch.setattr("chameleon_ft.launch.coordinator.take_over", look)
    monkeypatch.setattr("chameleon_ft.launch.coordinator.stand_by", look)
    monkeypatch.setattr("chameleon_ft.cli.commands.coordinator.lost_run", RunDirectory.open)
    monkeypatch.setattr(JoinRequest, "find_coordinator", lambda _: ("127.0.0.1:1", "token", None))
    assert chameleon("coordinator", flag, run.path, "--page", "127.0.0.1:0") == 0
    assert [page["token"] for page in pages] == ["of before"]
    assert not (run.path / "page.json").exists()


def test_a_page_leaves_the_file_of_another_one(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    with PageServer("127.0.0.1:0").beside(run):
        other = json.dumps({"address": "10.0.0.1:8790", "token": "t", "pid": 1})
        (run.path / "page.json").write_text(other)
    assert (run.path / "page.json").read_text() == other


@pytest.mark.parametrize("is_known", [False, True])
def test_a_token_that_cannot_be_written_is_not_looked_for_in_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_known: bool
) -> None:
    run = new_run(tmp_path)
    file = run.path / "page.json"
    if is_known:
        file.write_text(json.dumps({"token": "of before"}))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(PageServer.__module__ + ".replace_file", refuse)
    with closing(PageServer("127.0.0.1:0")) as server:
        server.announce(run)
    printed = capsys.readouterr().out
    assert server.token not in printed, "it goes to no log"
    if is_known:
        assert printed.endswith(f"(the token for its buttons is in {file})\n")
        return
    remedy = f"to use them, run `chameleon page {run.path}` on a terminal, which shows the token"
    assert f"cannot be written to {file} (Read-only file system); {remedy}" in printed


def test_the_page_of_a_run_that_has_finished_stays_until_that_is_scraped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, scraped = new_run(tmp_path), list[str]()
    add(run, started(), stepped(0, 1.0), event("finished", 2.0, status="finished", reason="all steps are trained"))
    with closing(PageServer("127.0.0.1:0")) as server:

        def scrape(*_: object, **__: object) -> None:
            with urlopen(f"http://{server.address}/metrics", timeout=60) as answer:
                scraped.append(answer.read().decode())

        with server.beside(run):
            monkeypatch.setattr("chameleon_ft.launch.page.print", scrape, raising=False)
    assert len(scraped) == 1
    line = 'chameleon_condition{chameleon_condition="finished"} 1.0'
    assert line in scraped[0]
    assert line in (run.path / "metrics.prom").read_text()
