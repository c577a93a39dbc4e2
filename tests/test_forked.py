"""Commands of tests that are forked are like those that start an interpreter."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import chameleon_ft
from tests.forked import ForkedCommand
from tests.harness import Command

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("own_interpreter", [False, True])
def test_a_command_has_its_arguments_and_environment_and_an_exit_code(*, own_interpreter: bool) -> None:
    with Command("--version", own_interpreter=own_interpreter) as command:
        assert os.getsid(command.pid) == command.pid
        assert command.wait() == 0
        assert command.printed == f"chameleon {chameleon_ft.__version__}\n"
        assert not command.is_running
    with Command("train", "--no-such-flag", own_interpreter=own_interpreter) as command:
        assert command.wait() == 2
    with Command("--version", environ={"CHAMELEON_LOG_LEVEL": "loud"}, own_interpreter=own_interpreter) as command:
        assert command.wait() == 2
        assert "CHAMELEON_LOG_LEVEL loud: should be one of" in command.printed


def test_it_runs_in_the_directory_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here.toml").write_text("no_such_key = 1")
    monkeypatch.chdir(tmp_path)
    with Command("train", "here.toml") as command:
        assert command.wait() == 2
        assert "no_such_key" in command.printed


def test_it_is_forked_if_nothing_speaks_against_it() -> None:
    with Command("status", "--help") as command:
        assert isinstance(command._process, ForkedCommand)
        command.signal(signal.SIGKILL)
        assert command.wait() in (0, -signal.SIGKILL)
    for changes in ({"own_interpreter": True}, {"prefix": ("nohup",)}, {"environ": {"PYTHONPATH": "src"}}):
        with Command("--version", **changes) as command:
            assert not isinstance(command._process, ForkedCommand)
            command.wait()
