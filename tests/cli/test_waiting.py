"""What a terminal shows while something takes long."""

from __future__ import annotations

import pytest

from chameleon_ft.cli._waiting import waiting


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
