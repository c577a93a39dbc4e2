"""Progress in a terminal during long computations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from chameleon_ft.cli.output import waiting

KERNEL = """
from chameleon_ft.schedule.jit import kernel

@kernel
def add(first, second):
    return first + second
"""
CALL = """
from chameleon_ft.schedule.jit import tell_before_compiling
from own.kernels import add
tell_before_compiling(lambda: print("compiles"))
print(add(1, 2))
"""


def test_only_a_terminal_is_told_what_is_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(variable, raising=False)
    with waiting("planning"):
        pass
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with waiting("planning"):
        pass
    out, err = capsys.readouterr()
    assert out == ""
    assert "planning" in err


def test_compiling_is_told_by_the_process_that_compiles(tmp_path: Path) -> None:
    """And not by a later one, however long it takes to load what was compiled."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own/__init__.py").touch()
    (tmp_path / "own/kernels.py").write_text(KERNEL)
    found = [subprocess.check_output([sys.executable, "-c", CALL], cwd=tmp_path, text=True).split() for _ in range(2)]
    assert found == [["compiles", "3"], ["3"]]
