"""Who was turned away is written down, and of very many not all."""

from __future__ import annotations

from pathlib import Path

from chameleon_ft.config import RunConfig
from chameleon_ft.control.refusals import Refusals
from chameleon_ft.observe import NullView, Recorder, RunDirectory


def test_of_very_many_ever_fewer_are_written_down(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", RunConfig())
    with Recorder(run, NullView()) as recorder:
        refusals = Refusals(recorder)
        for number in range(300):
            refusals.add(f"10.0.0.{number}", "the token is wrong")
    found = [event for event in run.events() if event["event"] == "refused"]
    assert [event["count"] for event in found] == [*range(1, 101), 128, 256]
    assert (found[0]["address"], found[0]["reason"]) == ("10.0.0.0", "the token is wrong")
