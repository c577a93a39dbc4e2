"""The command itself: help, exit codes, and what it loads."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

import chameleon_ft
from chameleon_ft.cli import main
from chameleon_ft.cli.main import COMMANDS
from chameleon_ft.errors import CheckpointError, ConfigError, ControlError
from tests.golden import message

_HELPS = """
import contextlib, io, json, os, sys
import chameleon_ft.config, chameleon_ft.cli.arguments  # once, before each help is printed in a process of its own
from chameleon_ft.cli import main

for command in sys.argv[1:]:
    if os.fork():
        os.wait()
        continue
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            ended = main([*command.split(), "--help"])
    except SystemExit as ending:
        ended = ending.code
    heavy = {"torch", "scipy", "rich", "websockets", "transformers"} & set(sys.modules)
    print(json.dumps([command, ended or 0, sorted(heavy), "usage: chameleon" in printed.getvalue()]), flush=True)
    os._exit(0)
"""


def test_help_is_printed_without_loading_what_it_does_not_need() -> None:
    commands = ["", *COMMANDS]
    result = subprocess.run([sys.executable, "-c", _HELPS, *commands], check=True, capture_output=True, text=True)
    assert result.stderr == ""
    assert [json.loads(line) for line in result.stdout.splitlines()] == [[each, 0, [], True] for each in commands]


def test_every_command_is_in_the_help_and_has_a_module(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert f"\n  {command} " in text
        assert callable(importlib.import_module(f"chameleon_ft.cli.commands.{command}").main)


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"chameleon {chameleon_ft.__version__}\n"


def test_nothing_to_do_is_answered_with_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["trian", "xyz"])
def test_an_unknown_command_is_named_with_the_nearest(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command]) == 2
    message(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("mend this"), 2),
        (CheckpointError("mend this"), 2),
        (ControlError("mend this"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_become_messages_and_exit_codes(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: object) -> int:
        raise error

    monkeypatch.setattr(importlib.import_module("chameleon_ft.cli.commands.train"), "main", fail)
    assert main(["train"]) == code
    expected = "" if isinstance(error, KeyboardInterrupt) else "chameleon train: mend this\n"
    assert capsys.readouterr().err == expected


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"'{sys.executable}' -m chameleon_ft train --help | head -c 1"
    result = subprocess.run(command, shell=True, check=True, capture_output=True, text=True)
    assert result.stderr == ""
