"""Progress in a terminal during long computations."""

from __future__ import annotations

import threading

import pytest

from chameleon_ft.cli.output import compile_kernels, waiting
from chameleon_ft.recovery.warm_up import COMPILING


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


def test_compiling_is_told_where_it_takes_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_kernels(lambda: None, long_s=3600.0)
    assert capsys.readouterr() == ("", "")
    told = threading.Event()
    said: list[object] = []

    def say(*words: object, **how: object) -> None:
        said.extend(words)
        told.set()

    monkeypatch.setattr("builtins.print", say)

    def compile_until_it_is_told() -> None:
        told.wait()

    compile_kernels(compile_until_it_is_told, long_s=0.0)
    assert said == [COMPILING]
