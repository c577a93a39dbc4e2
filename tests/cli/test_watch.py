"""Commands that show a run, and that control a live one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from chameleon_ft.cli.commands.watch import sparkline
from chameleon_ft.storage.files import ControlAddress, RunDirectory
from tests.cli.conftest import CommandLine, nothing_listens
from tests.golden import message
from tests.report.live.lines import add, event, failed, new_run, started, stepped


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = new_run(tmp_path)
    add(run, started(), stepped(0, 1.0), stepped(1, 2.0), failed(3, 2.5), event("checkpoint", 3.0, step=1))
    add(run, event("finished", 4.0, status="interrupted", reason="interrupted by the user"))
    return run


def test_the_status_is_told(chameleon: CommandLine, run: RunDirectory) -> None:
    assert chameleon("status", run.path) == 0
    told = " ".join(chameleon.capture.readouterr().out.split())
    for part in (
        str(run.path),
        "interrupted: interrupted by the user",
        "1 of 20 (10.0%), loss 2.0000",
        "1.000 s a step, 400 tokens/s",
        "workers 1 lost (3)",
        "1 worker lost in 1 incident",
        "of step 1, ",
    ):
        assert part in told
    assert "the newest checkpoint:" in told, "it is not there"


def test_the_status_is_json(chameleon: CommandLine, run: RunDirectory) -> None:
    assert chameleon("status", run.path, "--json") == 0
    values = json.loads(chameleon.capture.readouterr().out)
    assert (values["condition"], values["last"]["step"], values["workers"]["lost"]) == ("interrupted", 1, [3])
    assert "is missing" in values["checkpoint_damage"]


def test_damaged_lines_are_left_out_of_the_status_and_counted(chameleon: CommandLine, run: RunDirectory) -> None:
    add(run, {"event": "checkpoint", "time": 5.0}, {**stepped(2, 5.0), "workers": "all"})
    assert chameleon("status", run.path) == 0
    told = " ".join(chameleon.capture.readouterr().out.split())
    assert "1 of 20 (10.0%)" in told
    assert "2 lines cannot be read, and are left out; the first: " in told
    assert chameleon("status", run.path, "--json") == 0
    damaged = json.loads(chameleon.capture.readouterr().out)["damaged_lines"]
    assert [line.partition(", ")[2].partition(";")[0] for line in damaged] == [
        "line 3: workers: Input should be a valid integer",
        "line 5: step: Field required",
    ]


def test_a_run_that_has_not_begun_has_a_status(chameleon: CommandLine, tmp_path: Path) -> None:
    assert chameleon("status", new_run(tmp_path).path) == 0
    assert "waiting: training has not begun" in chameleon.capture.readouterr().out


@pytest.mark.parametrize("command", ["status", "watch", "stop", "checkpoint"])
def test_what_is_no_run_is_refused(chameleon: CommandLine, command: str, tmp_path: Path) -> None:
    message(chameleon.refused(command, tmp_path / "none"))


@pytest.mark.parametrize("command", ["stop", "checkpoint"])
def test_what_is_over_is_not_controlled(chameleon: CommandLine, command: str, run: RunDirectory) -> None:
    message(chameleon.refused(command, run.path))


def test_what_is_no_terminal_is_not_watched_in(chameleon: CommandLine, run: RunDirectory) -> None:
    message(chameleon.refused("watch", run.path))


def test_a_curve_has_a_line() -> None:
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁" or sparkline([3.0, 2.0, 1.0])[::2] == "█▁"


def test_a_run_is_stopped_and_saved(chameleon: CommandLine, run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def checkpoint(run: RunDirectory) -> int:
        asked.append("checkpoint")
        return 7

    def wait_until_saved(
        run: RunDirectory, committed: int, *, after: int, delayed: Callable[[str], None]
    ) -> int | None:
        asked.append((committed, after))
        delayed("the disk is full")
        return None if len(asked) > 3 else 8

    module = ModuleType("chameleon_ft.launch.live_run")
    values = {
        "stop": lambda run, *, at_once: asked.append(("stop", at_once)),
        "wait_until_over": lambda run: asked.append("over"),
        "checkpoint": checkpoint,
        "count_events": lambda run: len(run.events()),
        "wait_until_saved": wait_until_saved,
    }
    for name, value in values.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "chameleon_ft.launch.live_run", module)
    run.write_control(ControlAddress(address="127.0.0.1:4000", token="secret", pid=1))
    events = len(run.events())
    assert chameleon("checkpoint", run.path) == 0
    assert chameleon("checkpoint", run.path, "--wait") == 0
    printed = chameleon.capture.readouterr().out
    assert "the checkpoint cannot be marked as complete yet: the disk is full; it will be as soon as" in printed
    assert "training would resume with step 8" in printed
    assert chameleon("checkpoint", run.path, "--wait") == 1
    assert "the run is over without it" in chameleon.capture.readouterr().out
    assert asked == ["checkpoint", "checkpoint", (7, events), "checkpoint", (7, events)]
    asked.clear()
    assert chameleon("stop", run.path) == 0
    assert chameleon("stop", run.path, "--now", "--wait") == 0
    assert asked == [("stop", False), ("stop", True), "over"]


@pytest.mark.parametrize("command", ["status", "watch"])
def test_a_run_is_named_once(
    chameleon: CommandLine, run: RunDirectory, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    message(chameleon.refused(command))
    message(chameleon.refused(command, run.path, "--coordinator", "127.0.0.1:1"))
    message(chameleon.refused(command, run.path, "--token", "secret"))
    told = chameleon.refused(command, run.path, "--token", "secret", "--tls", run.path)
    assert "--token and --tls: for --coordinator" in told
    message(chameleon.refused(command, "--coordinator", "127.0.0.1:1"))
    message(chameleon.refused(command, "--coordinator", "nowhere"))
    monkeypatch.setenv("CHAMELEON_TOKEN", "token")
    chameleon.knocks.append(nothing_listens)
    told = chameleon.refused(command, "--coordinator", "127.0.0.1:1", code=1)
    assert "no coordinator answers at 127.0.0.1:1" in told
