"""Input that `chameleon simulate` rejects."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.simulating import CASE, COMMON, TRACE, simulate, write_inputs


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workers", "8", "--trace", "day.jsonl"), "give a published --model and its --device, or a --profile"),
        ((*CASE, "--profile", "p.json"), "--profile p.json determines this already; leave one of them out"),
        (("--model", "llama2-7c", *CASE[2:]), "llama2-7b"),
        (
            ("--workers", "8", "--trace", "day.jsonl", "--profile", "p.json", "--recompute", "full"),
            "--recompute full: --profile p.json determines this already",
        ),
        (("--model", "shape.json", "--device", "b100", *CASE[4:]), "h100-80g"),
        ((*COMMON, "--workers", "8"), "give a --trace, or --generate bursts|poisson|weibull|spot"),
        ((*CASE, "--generate", "bursts"), "leave one of them out"),
        (
            (*COMMON, "--workers", "15", "--trace", "day.jsonl"),
            "should be a multiple of the 2 workers of a host",
        ),
        (
            (*COMMON, "--workers", "0", "--trace", "day.jsonl"),
            "--workers 0: should be greater than 0",
        ),
        ((*CASE, "--workers-per-host", "0"), "should be greater than 0"),
        ((*COMMON, "--workers", "16", "--trace", "day.jsonl"), "not of 8: take at most 4, or generate a larger one"),
        ((*COMMON, "--workers", "8", "--trace", "none.jsonl"), "none.jsonl: cannot be read"),
        ((*COMMON, "--workers", "8", "--trace", "bad.jsonl"), "line 2"),
        ((*CASE, "--nodes", "5"), "5"),
        ((*COMMON, "--workers", "8", "--generate", "spot", "--nodes", "5"), "leave it out"),
        ((*CASE, "--policies", "chamaeleon"), "did you mean 'chameleon'"),
        ((*CASE, "--policies", ","), "name one or more of chameleon"),
        ((*CASE, "--policies", "restart,restart"), "names restart twice"),
        ((*CASE, "--rate", "0"), "--rate 0: should be greater than or equal to"),
        ((*CASE, "--rate", "1e-308"), "--rate 1e-308: should be greater than or equal to"),
        ((*CASE, "--days", "-1"), "--days -1: should be greater than 0"),
        ((*CASE, "--micro-batches", "0"), "--micro-batches 0: should be greater than 0"),
        ((*CASE, "--optimizer-redundancy", "0"), "--optimizer-redundancy 0: should be greater than 0"),
        ((*CASE, "--host-memory", "-1"), "--host-memory -1: should be greater than or equal to"),
        ((*CASE, "--host-memory", "1e308"), "--host-memory 1e+308: should be less than or equal to"),
        ((*CASE, "--assume", "snapshot_every=1.5"), "should be NAME=NUMBER"),
        ((*CASE, "--assume", "restart=1"), "with NAME one of detect_s"),
        ((*CASE, "--assume", "restart_cost_s=soon"), "should be NAME=NUMBER"),
        ((*CASE, "--assume", "exact_up_to=1.5"), "should be NAME=NUMBER"),
        ((*CASE, "--assume", "exact_up_to=inf"), "should be NAME=NUMBER"),
        ((*CASE, "--assume", "detect_s=nan"), "should be NAME=NUMBER"),
        ((*CASE, "--assume", "detect_s=inf"), "detect_s must be zero or a positive number"),
        ((*CASE, "--assume", "salvage=2"), "--assume salvage=2: should be 0 or 1"),
        ((*CASE, "--assume", "detect_s=1,detect_s=2"), "names detect_s twice"),
        ((*CASE, "--assume", "restart_cost_s=-1"), "restart_cost_s must be zero or a positive number"),
        ((*CASE, "--sweep", "speed=1"), "should be rate|workers|memory|bandwidth|micro-batches=VALUE"),
        ((*CASE, "--sweep", "rate"), "should be rate|workers"),
        ((*CASE, "--sweep", "rate=1,nan"), "should be rate|workers"),
        ((*CASE, "--sweep", "rate=1,1"), "has a value twice"),
        ((*CASE, "--sweep", "rate=0,1"), "take numbers above 0"),
        ((*CASE, "--sweep", "rate=1e-308"), "rate=1e-308: take numbers from 1e-09 to 1e+09"),
        ((*CASE, "--sweep", "memory=1e308"), "memory=1e+308: take numbers from 1e-09 to 1e+09"),
        ((*CASE, "--sweep", "bandwidth=1e-308"), "bandwidth=1e-308: take numbers from 1e-09 to 1e+09"),
        ((*CASE, "--sweep", "workers=10"), "take multiples of the 2 workers of a host, 8 at most"),
        ((*CASE, "--sweep", "micro-batches=1.5"), "take whole numbers"),
        ((*CASE, "--picture", "a.bmp"), ".svg, .png, .pdf"),
        ((*CASE, "--picture", "no folder/a.svg"), "no such folder; give a file in a folder that exists"),
        ((*CASE, "--save-trace", "day.jsonl"), "exists already"),
        ((*CASE, "--save-trace", "no folder/a.jsonl"), "no folder/a.jsonl: the trace cannot be written there"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    (folder / "bad.jsonl").write_text(TRACE.replace('"lost"', '"gone"'))
    error = simulate(capsys, *arguments, code=2)
    assert error.startswith("chameleon simulate: ")
    assert message in error
    assert "Traceback" not in error
