"""A live run is watched and controlled by commands of other processes, and its page by a browser."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from http.client import HTTPConnection, IncompleteRead
from pathlib import Path
from typing import Any

import pytest

from chameleon_ft.config import Checkpoint, Parallel
from chameleon_ft.protocol.address import TOKEN_VARIABLE
from chameleon_ft.storage.checkpoints import complete_checkpoints
from chameleon_ft.storage.files import RunDirectory
from tests.configs import unhurried, write_config
from tests.harness import Command, Ended, every_process_ends, small_config

pytestmark = pytest.mark.multiprocess

STEP = r"^\s+{}\s"  # the line of a step


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """A configuration of a run that goes on until it is ended, and writes no checkpoint before."""
    config = small_config(
        tmp_path, steps=100_000, workers=4, parallel=Parallel(dp=2, pp=2), checkpoint=Checkpoint(every=0)
    )
    return write_config(config, tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def told(*arguments: str | Path, environ: dict[str, str] | None = None) -> str:
    with Command(*arguments, environ=environ) as command:
        assert command.wait() == 0, command.printed
        return command.printed


def status(run: RunDirectory) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(told("status", run.path, "--json"))
    return values


def test_a_live_run_is_watched_saved_and_stopped(endless: Path, run: RunDirectory) -> None:
    with Command("train", endless, "--output-dir", run.path) as training:
        training.read_until(STEP.format(3))
        with every_process_ends(training.session()):
            before = status(run)
            assert before["condition"] == "training"
            assert before["workers"] == {"live": [0, 1, 2, 3]}
            assert (before["checkpoint"], before["steps"]) == (None, 100_000)
            control = run.read_control()
            token = {TOKEN_VARIABLE: control.token}
            from_afar = json.loads(told("status", "--coordinator", control.address, "--json", environ=token))
            assert from_afar["workers"] == before["workers"]
            assert from_afar["last"]["step"] > before["last"]["step"]
            assert (from_afar["condition"], from_afar["checkpoint_damage"]) == ("training", None)
            saved = re.search(r"training would resume with step (\d+)", told("checkpoint", run.path, "--wait"))
            assert saved is not None
            assert complete_checkpoints(run.checkpoints) == [int(saved[1])]
            assert int(saved[1]) > before["last"]["step"]
            assert "after this step with a checkpoint" in told("stop", run.path, "--wait")
            assert training.wait() == 130
    after = status(run)
    assert after["condition"] == "interrupted"
    assert (after["checkpoint"]["step"], after["checkpoint_damage"]) == (len(run.steps()), None)
    assert Ended(130, run).failures == []


def asked(port: int, path: str, values: dict[str, Any] | None = None, *, token: str = "") -> str:
    """Get a path of the page, or post values to it; return the answer to what is done."""
    with closing(HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        headers = {"Authorization": f"Bearer {token}"}
        body = None if values is None else json.dumps(values)
        connection.request("GET" if values is None else "POST", path, body=body, headers=headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        assert answer.status == 200, text
        return text


def test_a_run_is_watched_and_controlled_from_its_page(endless: Path, run: RunDirectory) -> None:
    with Command("train", endless, "--output-dir", run.path, "--page", "127.0.0.1:0") as training:
        port = int(training.read_until(r"page: http://127\.0\.0\.1:(\d+)/")[1])
        training.read_until(STEP.format(3))
        control = json.loads((run.path / "page.json").read_text())
        assert (run.path / "page.json").stat().st_mode & 0o077 == 0
        token = control["token"]
        assert token not in training.printed, "standard output is no terminal"
        state = json.loads(asked(port, "/api/state"))
        assert state["report"]["condition"] == "training"
        assert [row["state"] for row in state["grid"]["workers"]] == ["live"] * 4
        assert "a checkpoint is written" in asked(port, "/api/actions/checkpoint", {}, token=token)
        assert "draining 1" in asked(port, "/api/actions/drain", {"workers": [1]}, token=token)
        training.read_until("worker 1 has left")
        asked(port, "/api/actions/inject", {"worker": 2, "kind": "kill"}, token=token)
        training.read_until("worker 2 lost in step")
        training.read_until("resumed +at step")
        (incident,) = [each for each in json.loads(asked(port, "/api/incidents")) if each["diagnosis"]]
        assert [culprit["worker"] for culprit in incident["diagnosis"]["culprits"]] == [2]
        assert incident["told"][0]["title"].startswith("worker 2 lost in step")
        assert "chameleon_incidents_total 1.0" in asked(port, "/metrics")
        assert complete_checkpoints(run.checkpoints) != []
        asked(port, "/api/actions/finish", {}, token=token)
        assert training.wait() == 130, training.printed
    assert not (run.path / "page.json").exists()
    assert 'chameleon_condition{chameleon_condition="interrupted"} 1.0' in (run.path / "metrics.prom").read_text()
    with pytest.raises(ConnectionRefusedError):
        asked(port, "/metrics")


class Browser:
    """Does what the script of the page does: gets the state, and follows what is added to it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.steps: list[int] = []
        self.condition = ""

    def watch(self, until: Callable[[Browser], object] = lambda _: False) -> None:
        """Open the page, and follow the run until something is so, or the page is gone."""
        whole = json.loads(asked(self._port, "/api/state"))
        assert whole["series"]["step"][: len(self.steps)] == self.steps, "it has what was there before"
        self.steps, self.condition = whole["series"]["step"], whole["report"]["condition"]
        with closing(HTTPConnection("127.0.0.1", self._port, timeout=60)) as connection:
            connection.request("GET", "/api/events?steps={steps}&events={events}".format(**whole["next"]))
            answer, name = connection.getresponse(), ""
            with suppress(ConnectionResetError, IncompleteRead):
                while not until(self) and (line := answer.readline().decode()):
                    if line.startswith("event: "):
                        name = line.removeprefix("event: ").strip()
                    elif line.startswith("data: "):
                        self._take(name, json.loads(line.removeprefix("data: ")))

    def _take(self, name: str, value: dict[str, Any]) -> None:
        if name == "steps":
            self.steps += value["step"]
        elif name == "report":
            self.condition = value["condition"]


def test_the_page_of_a_coordinator_that_is_killed_is_back_with_its_successor(tmp_path: Path, run: RunDirectory) -> None:
    # All of its steps are points of a curve.
    slow = unhurried(2, speed=0.05)
    config = small_config(tmp_path, steps=100_000, workers=2, parallel=Parallel(dp=2, pp=1), failures=slow)
    begin = ("coordinator", write_config(config, tmp_path), "--output-dir", run.path, "--page", "127.0.0.1:0")
    with ExitStack() as stack:
        first = stack.enter_context(Command(*begin))
        port = int(first.read_until(r"page: http://127\.0\.0\.1:(\d+)/")[1])
        first.read_until("waiting for 2 workers")
        agent = stack.enter_context(Command("agent", "--run", run.path, "--workers", "2"))

        def killed_after_some_steps(seen: Browser) -> bool:
            if len(seen.steps) > 5:
                first.signal(signal.SIGKILL)
            return False

        browser, token = Browser(port), json.loads((run.path / "page.json").read_text())["token"]
        browser.watch(until=killed_after_some_steps)
        assert browser.condition == "training"
        assert first.wait() == -signal.SIGKILL
        with pytest.raises(ConnectionRefusedError):
            browser.watch()
        before = len(browser.steps)
        page = ("--page", f"127.0.0.1:{port}")
        second = stack.enter_context(Command("coordinator", "--take-over", run.path, *page))
        second.read_until(f"page: http://127.0.0.1:{port}/")
        browser.watch(until=lambda seen: len(seen.steps) > before + 5 and seen.condition == "training")
        assert browser.steps == [*range(len(browser.steps))], "none is missing, and none is there twice"
        asked(port, "/api/actions/finish", {}, token=token)
        assert second.wait() == 130, second.printed
        assert agent.wait() == 0, agent.printed
    assert not (run.path / "page.json").exists()
    assert Ended(130, run).failures == []
