"""Calls of `chameleon simulate`, and the files that they read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chameleon_ft.cli import main

SHAPE = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_hidden_layers": 6,
    "intermediate_size": 1024,
    "vocab_size": 1000,
    "max_position_embeddings": 256,
}
TRACE = """\
{"chameleon_trace": 1, "workers": 8, "workers_per_host": 2, "duration_s": 86400, "name": "a day"}
{"time_s": 3600.0, "kind": "lost", "workers": [2, 3]}
{"time_s": 7200.0, "kind": "slow", "workers": [6], "speed": 0.6}
{"time_s": 9000.0, "kind": "slow", "workers": [6], "speed": 1.0}
{"time_s": 10800.0, "kind": "back", "workers": [2, 3]}
"""
FAULTS = [
    {"node_id": node, "event_time": day, "event_type": kind, "fault_type": {"Level": "a", "Class": "b", "Desc": "c"}}
    for node, day, kind in (("n1", 1.0, "fault_start"), ("n1", 1.5, "fault_end"), ("n2", 2.0, "fault_start"))
]
COMMON = ("--model", "shape.json", "--device", "h100", "--workers-per-host", "2", "--micro-batches", "8",
          "--assume", "exact_up_to=0")  # fmt: skip
CASE = (*COMMON, "--workers", "8", "--trace", "day.jsonl")


def write_inputs(folder: Path) -> None:
    """Write the files that the command lines of this module name."""
    (folder / "shape.json").write_text(json.dumps(SHAPE))
    (folder / "day.jsonl").write_text(TRACE)
    (folder / "faults.json").write_text(json.dumps(FAULTS))


def simulate(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """Run `chameleon simulate`; what it prints on standard output, or the error where that is expected."""
    found = main(["simulate", *arguments])
    captured = capsys.readouterr()
    assert found == code, captured.err
    return captured.err if code else captured.out
