"""Input that `chameleon simulate` rejects."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.simulating import CASE, COMMON, TRACE, simulate, write_inputs
from tests.golden import message


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ("--workers", "8", "--trace", "day.jsonl"),
        (*CASE, "--profile", "p.json"),
        ("--model", "llama2-7c", *CASE[2:]),
        ("--workers", "8", "--trace", "day.jsonl", "--profile", "p.json", "--recompute", "full"),
        ("--model", "shape.json", "--device", "b100", *CASE[4:]),
        (*COMMON, "--workers", "8"),
        (*CASE, "--generate", "bursts"),
        (*COMMON, "--workers", "15", "--trace", "day.jsonl"),
        (*COMMON, "--workers", "0", "--trace", "day.jsonl"),
        (*CASE, "--workers-per-host", "0"),
        (*COMMON, "--workers", "16", "--trace", "day.jsonl"),
        (*COMMON, "--workers", "8", "--trace", "none.jsonl"),
        (*COMMON, "--workers", "8", "--trace", "bad.jsonl"),
        (*CASE, "--nodes", "5"),
        (*COMMON, "--workers", "8", "--generate", "spot", "--nodes", "5"),
        (*CASE, "--policies", "chamaeleon"),
        (*CASE, "--policies", ","),
        (*CASE, "--policies", "restart,restart"),
        (*CASE, "--rate", "0"),
        (*CASE, "--rate", "1e-308"),
        (*CASE, "--days", "-1"),
        (*CASE, "--micro-batches", "0"),
        (*CASE, "--optimizer-redundancy", "0"),
        (*CASE, "--host-memory", "-1"),
        (*CASE, "--host-memory", "1e308"),
        (*CASE, "--assume", "snapshot_every=1.5"),
        (*CASE, "--assume", "restart=1"),
        (*CASE, "--assume", "restart_cost_s=soon"),
        (*CASE, "--assume", "exact_up_to=1.5"),
        (*CASE, "--assume", "exact_up_to=inf"),
        (*CASE, "--assume", "detect_s=nan"),
        (*CASE, "--assume", "detect_s=inf"),
        (*CASE, "--assume", "salvage=2"),
        (*CASE, "--assume", "detect_s=1,detect_s=2"),
        (*CASE, "--assume", "restart_cost_s=-1"),
        (*CASE, "--sweep", "speed=1"),
        (*CASE, "--sweep", "rate"),
        (*CASE, "--sweep", "rate=1,nan"),
        (*CASE, "--sweep", "rate=1,1"),
        (*CASE, "--sweep", "rate=0,1"),
        (*CASE, "--sweep", "rate=1e-308"),
        (*CASE, "--sweep", "memory=1e308"),
        (*CASE, "--sweep", "bandwidth=1e-308"),
        (*CASE, "--sweep", "workers=10"),
        (*CASE, "--sweep", "micro-batches=1.5"),
        (*CASE, "--picture", "a.bmp"),
        (*CASE, "--picture", "no folder/a.svg"),
        (*CASE, "--save-trace", "day.jsonl"),
        (*CASE, "--save-trace", "no folder/a.jsonl"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    (folder / "bad.jsonl").write_text(TRACE.replace('"lost"', '"gone"'))
    error = simulate(capsys, *arguments, code=2)
    assert error.startswith("chameleon simulate: ")
    message(error)
    assert "Traceback" not in error
