"""How every command reads its flags, and what it says of them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

import chameleon_ft
from chameleon_ft.cli import arguments as foreign_flags
from chameleon_ft.cli import main
from chameleon_ft.config import TrainConfig
from chameleon_ft.cost.presets import DEVICES, MODELS, STATE_POLICIES, Recompute
from tests.cli.conftest import CommandLine
from tests.golden import message


def shown(chameleon: CommandLine, command: str) -> str:
    """The help of a command."""
    assert chameleon(command, "--help") == 0
    return chameleon.capture.readouterr().out


def words(text: str) -> str:
    """A message without the frame that tyro puts around it."""
    return re.sub(r"[│\s]+", " ", text)


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "--dp", "two"),
        ("plan", "--dp", "None"),
        ("plan", "--dp", "1.5"),
        ("train", "--steps", "many"),
        ("simulate", "--workers", "8", "--days", "all"),
        ("verify", "run", "--tolerance", "no"),
        ("plan", "--planner", "best"),
        ("inject", "run", "--worker", "1", "--phase", "now"),
    ],
)
def test_a_wrong_value_is_named_with_what_it_should_be(arguments: tuple[str, ...], chameleon: CommandLine) -> None:
    assert chameleon(*arguments) == 2
    printed = words(chameleon.capture.readouterr().err)
    message(printed)
    assert "None" not in printed.replace('"None"', "")


def test_no_help_of_an_argument_breaks_in_the_middle_of_a_line() -> None:
    # tyro keeps the line breaks of a docstring below a field; a longer text is the `help` of `tyro.conf.arg`.
    files = sorted((Path(chameleon_ft.__file__).parent / "cli").rglob("*.py"))
    broken = [
        f"{file.name}: {docstring}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and node.name.endswith("Arguments")
        for statement in node.body[1:]
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and "\n" in (docstring := str(statement.value.value))
    ]
    assert broken == []


def test_the_flags_of_a_published_model_are_the_same_wherever_there_are_any(chameleon: CommandLine) -> None:
    titled = [shown(chameleon, command).partition("preset options") for command in ("profile", "plan", "simulate")]
    helps = {words(text.partition("hosts options")[0]) for _, found, text in titled if found}
    assert len(helps) == 1
    (text,) = helps
    for name in (*MODELS, *DEVICES, *STATE_POLICIES, *Recompute):
        assert name in text


@pytest.mark.parametrize("columns", ["60", "100"])
def test_the_help_fits_the_terminal(columns: str, chameleon: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    introduction = shown(chameleon, "profile").partition("╭")[0].splitlines()
    assert len(introduction) > 5
    assert max(map(len, introduction)) <= int(columns)


# --- flags of other tools --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "--lr", "0.1"),
        ("train", "--learning_rate=0.1"),
        ("train", "--optimizer.schedule", "wsd"),
        ("train", "--precision", "fp16"),
        ("train", "--precision=fp16"),
        ("train", "--fp16"),
        ("train", "--from-step", "5"),
        ("train", "--epochs", "3"),
        ("run", "job.py", "--lr", "0.1"),
        ("run", "job.py", "--max-steps", "3"),
    ],
)
def test_a_flag_of_another_tool_points_to_what_there_is(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    message(capsys.readouterr().err)


def test_flags_that_are_pointed_to_exist() -> None:
    known = {f"--{name}" for name in ("resume", "from-step", "output-dir", "page")}
    for section, info in TrainConfig.model_fields.items():
        kind = info.annotation
        known.add(f"--{section}")
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            known |= {f"--{section}.{name}" for name in kind.model_fields}
    known = {flag.replace("_", "-") for flag in known}
    texts = [*foreign_flags._HERE.values(), *foreign_flags._OF_LLAMA.values()]
    named = {found for text in texts for found in re.findall(r"--[a-z][a-z.-]*[a-z]", text)}
    assert named <= known
