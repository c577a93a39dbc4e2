"""The log of the library: silent in a program that uses it, on standard error at the command line."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chameleon_ft.cli import main
from chameleon_ft.cli.main import take_log_level
from chameleon_ft.config import TrainConfig
from chameleon_ft.errors import ConfigError
from chameleon_ft.events.kinds import HostJoined
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.recorder import Recorder, View
from tests.golden import refused
from tests.report.records import failure_record, step_record


@pytest.fixture(autouse=True)
def logger() -> Iterator[logging.Logger]:
    """The logger of the package, left as it was."""
    found = logging.getLogger("chameleon_ft")
    handlers, level = list(found.handlers), found.level
    yield found
    found.handlers[:] = handlers
    found.setLevel(level)


@pytest.mark.parametrize(
    ("arguments", "environ", "expected"),
    [
        (["plan"], {}, (["plan"], "warning")),
        (["plan"], {"CHAMELEON_LOG_LEVEL": "INFO"}, (["plan"], "info")),
        (["plan"], {"CHAMELEON_LOG_LEVEL": ""}, (["plan"], "warning")),
        (["--log-level", "debug", "plan", "a"], {"CHAMELEON_LOG_LEVEL": "info"}, (["plan", "a"], "debug")),
        (["plan", "a", "--log-level=Error", "b"], {}, (["plan", "a", "b"], "error")),
    ],
)
def test_the_flag_goes_over_the_environment(
    arguments: list[str], environ: dict[str, str], expected: tuple[list[str], str]
) -> None:
    assert take_log_level(arguments, environ) == expected


@pytest.mark.parametrize("arguments", [["--log-level", "loud", "plan"], ["plan", "--log-level"]])
def test_an_unknown_level_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "should be one of debug, info, warning, error" in capsys.readouterr().err
    with refused(ConfigError):
        take_log_level([], {"CHAMELEON_LOG_LEVEL": "loud"})


def test_the_command_line_has_one_handler_of_its_own(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    for level in ("error", "info"):
        assert main(["--log-level", level, "report", "no such run"]) == 2
    assert len([each for each in logger.handlers if type(each).__name__ == "_StandardError"]) == 1
    capsys.readouterr()
    logger.getChild("part").info("heard")
    logger.getChild("part").debug("not heard")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(" INFO chameleon_ft.part: heard")


def test_events_and_steps_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = RunDirectory.create(tmp_path / "run", TrainConfig())
    with caplog.at_level(logging.DEBUG, logger="chameleon_ft"), Recorder(run, View()) as recorder:
        recorder.record(step_record(0, loss=2.5))
        recorder.record(failure_record(1))
        recorder.record(HostJoined(host="a", workers=(1, 2)))
    assert {record.name for record in caplog.records} == {"chameleon_ft.storage.recorder"}
    step, failure, event = (record.getMessage() for record in caplog.records)
    assert step.startswith("step 0: loss 2.5")
    assert failure.startswith("failure: worker=3, step=1, cause=SIGKILL")
    assert event == "host_joined: host=a"


def test_a_program_that_uses_the_library_hears_nothing() -> None:
    code = "import chameleon_ft, logging; logging.getLogger('chameleon_ft.part').error('said')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("", "")
