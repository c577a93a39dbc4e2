"""Calls of `chameleon plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chameleon_ft.cli import main

ROOT = Path(__file__).parent.parent.parent
PRESET = ("--model", "llama2-7b", "--device", "h100-80g", "--dp", "2", "--pp", "4")


def plan(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> str:
    """Run `chameleon plan` and return what it prints on standard output, or the error where that is expected."""
    found = main(["plan", *map(str, arguments)])
    captured = capsys.readouterr()
    assert found == code, captured.err
    return captured.err if code == 2 else captured.out


def predicted(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(plan(capsys, *arguments, "--json", code=code))
    return found
