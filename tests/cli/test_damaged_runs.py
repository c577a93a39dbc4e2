"""Commands on run directories of which one file is damaged."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from chameleon_ft.config import Batch, Data, Parallel, TrainConfig
from chameleon_ft.storage.checkpoints import mark_complete
from chameleon_ft.storage.files import ControlAddress, RunDirectory
from chameleon_ft.storage.plans import write_generation
from chameleon_ft.storage.timelines import TimelineLog
from tests.cli.conftest import CommandLine
from tests.report.live.lines import add, stepped
from tests.report.test_comparison import planned, recorded
from tests.report.test_readable import EVENTS
from tests.stored import step_directory

COMMANDS: Final = (
    ("status", "RUN"),
    ("status", "RUN", "--json"),
    ("diagnose", "RUN"),
    ("explain", "RUN"),
    ("explain", "RUN", "--json"),
    ("report", "RUN"),
    ("report", "RUN", "--trace", "step.json", "--json"),
    ("simulate", "--run", "RUN", "--policies", "reroute"),
    ("checkpoint", "RUN"),
    ("drain", "RUN", "--worker", "1"),
    ("stop", "RUN"),
    ("inject", "RUN", "--worker", "1"),
    ("track", "RUN", "--webhook", "http://127.0.0.1:9/"),
    ("train", "--resume", "RUN"),
    ("train", "--resume", "RUN", "--fork", "--output-dir", "fork"),
    ("coordinator", "--standby", "RUN"),
    ("coordinator", "--take-over", "RUN"),
    ("agent", "--run", "RUN", "--wait-s", "0"),
)
FILES: Final = (
    "config.toml",
    "control.json",
    "events.jsonl",
    "metrics.jsonl",
    "journal-000001.jsonl",
    "plans/generation-00001.json",
    "timelines/worker-1.jsonl",
    "checkpoints/step-00000008/complete.json",
    "plans",
    "timelines",
    "checkpoints",
)


def _replaced(by: bytes) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        _remove(path)
        path.write_bytes(by)

    return damage


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _made_a_directory(path: Path) -> None:
    _remove(path)
    path.mkdir()


def _made_a_loop(path: Path) -> None:
    _remove(path)
    path.symlink_to(path.name)


def _cut(path: Path) -> None:
    if path.is_file():
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES: Final[Mapping[str, Callable[[Path], None]]] = {
    "is missing": _remove,
    "is a directory": _made_a_directory,
    "links to itself": _made_a_loop,
    "is empty": _replaced(b""),
    "is cut": _cut,
    "is zeros": _replaced(bytes(200) + b"\n"),
    "is binary": _replaced(b"\xff\xfe\n" * 9),
    "is nested": _replaced(b"[" * 10**5 + b"\n"),
    "is a number": _replaced(b"3\n"),
    "is a list": _replaced(b"[3]\n"),
    "is an object": _replaced(b'{"event": "plan", "step": {}}\n'),
}


@pytest.fixture
def run(tmp_path: Path, text: Path) -> RunDirectory:
    """A run with all kinds of events, and records of two steps."""
    layout = {"parallel": Parallel(dp=2, pp=2), "batch": Batch(micro_batches=6, micro_batch_size=1)}
    config = TrainConfig(workers=4, steps=20, data=Data(path=str(text)), **layout)  # type: ignore[arg-type]
    found = RunDirectory.create(tmp_path / "sound", config)
    add(found, *EVENTS, *(stepped(step, step + 1.0) for step in range(4)))
    found.write_control(ControlAddress(address="127.0.0.1:9", token="t", pid=1))
    found.plans.mkdir()
    write_generation(planned(1), found.plan_file(1))
    for step in (0, 1):
        for part in recorded(planned(1), step):
            TimelineLog(found.timeline_file(part.worker)).append(part)
    found.journal_file(1).write_text('{"at": [1, 2], "state": {}}\n')
    step_directory(found.checkpoints, 8).mkdir()
    mark_complete(found.checkpoints, 8, model="some model", num_layers=0)
    return found


def damaged(run: RunDirectory, tmp_path: Path, command: int) -> Iterator[tuple[Path, str]]:
    """Yield copies of a run, each with one damage, and a description of it: for each command an eighth of all."""
    for number, (name, what) in enumerate(itertools.product(FILES, DAMAGES)):
        if (number + command) % 8 == 0:
            copy = tmp_path / "run"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(run.path, copy)
            DAMAGES[what](copy / name)
            yield copy, f"{name} {what}"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_damaged_file_is_told_by_a_message(
    command: tuple[str, ...], run: RunDirectory, chameleon: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep = time.sleep

    def over(seconds: float) -> None:
        if threading.current_thread() is threading.main_thread():  # not a thread that an earlier test has left behind
            raise KeyboardInterrupt
        sleep(seconds)

    monkeypatch.setattr("time.sleep", over)  # which ends commands that wait for the run
    for path, damage in damaged(run, tmp_path, COMMANDS.index(command)):
        code = chameleon(*(path if each == "RUN" else each for each in command))
        printed = chameleon.capture.readouterr()
        assert "the details are in" not in printed.err, f"{damage}: {printed.err}"
        assert code in (0, 130) or (code in (1, 2, 69) and printed.err), damage
        chameleon.launched.clear()
        shutil.rmtree(tmp_path / "fork", ignore_errors=True)


def test_lines_that_are_left_out_are_counted(run: RunDirectory, chameleon: CommandLine) -> None:
    count = len(run.events_file.read_text().splitlines())
    with run.events_file.open("a") as file:
        file.write('{"event": "decision", "time": 0}\n')
    said = f"a line cannot be read, and is left out: {run.events_file}, line {count + 1}: "
    for command in ("explain", "report"):
        assert chameleon(command, run.path) == 0
        assert said in chameleon.capture.readouterr().out
        assert chameleon(command, run.path, "--json") == 0
        (line,) = json.loads(chameleon.capture.readouterr().out)["damaged_lines"]
        assert f"line {count + 1}: " in line
