"""The benchmark of a GPU, rehearsed on a CPU: the parts that start no run, and the report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import _faulty_job, _gpu_parts, gpu
from benchmarks._gpu_faults import FAULTY_JOB
from benchmarks._gpu_parts import SMALL, Result, Subject, config_of
from chameleon_ft.cluster import Link
from chameleon_ft.config import LlamaConfig
from chameleon_ft.job.job import Job
from chameleon_ft.session.configuration import prepare_data_of
from chameleon_ft.storage.profiles import profile_of_run, read_profile
from chameleon_ft.worker.inspection import inspect_job
from chameleon_ft.worker.profiling import profile
from chameleon_ft.worker.profiling.links import MeasuredLinks

TINY = LlamaConfig(dim=16, num_layers=3, num_heads=2, num_kv_heads=1, ffn_dim=32, seq_len=8)


def subject(folder: Path, **sizes: Any) -> Subject:
    return Subject(device="cpu", size=replace(SMALL, **sizes), folder=folder, command="a command", timeout_s=60)


def rehearse(monkeypatch: pytest.MonkeyPatch, folder: Path, *parts: str) -> int:
    arguments = ["gpu.py", "--device", "cpu", "--small", "--parts", *parts, "--out", str(folder), "--commit", "abc"]
    monkeypatch.setattr("sys.argv", arguments)
    return gpu.main()


def test_a_part_that_fails_is_in_the_report_and_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(_: Subject) -> Result:
        raise SystemExit("the run took too long")

    monkeypatch.setattr(gpu, "_PARTS", {**gpu._PARTS, "salvage": failing})
    monkeypatch.setattr(gpu, "SMALL", replace(SMALL, checksum_bytes=1_000_000, optimizer_elements=40_000))

    assert rehearse(monkeypatch, tmp_path / "report", "checksums", "salvage", "optimizer") == 1

    found = json.loads((tmp_path / "report" / "report.json").read_text(encoding="utf-8"))
    assert found["is_rehearsal"]
    assert found["provenance"].keys() >= {"device", "driver", "torch", "commit", "command", "time"}
    assert found["provenance"]["commit"] == "abc"
    checksums, salvage, optimizer = found["parts"]
    assert checksums["differing"] == 0
    assert checksums["compared"] > 0
    assert "the run took too long" in salvage["error"]
    assert not salvage["passed"]
    assert 0 < optimizer["deviations"]["ours, fused"] < 1e-6
    text = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out == text
    assert "A rehearsal" in text
    assert "**Failed**" in text
    assert text.index("## checksums") < text.index("## salvage") < text.index("## optimizer")


def test_a_limit_that_is_missed_is_told_from_one_that_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_gpu_parts, "checksum_of_sums", lambda data: int(torch.randint(1 << 30, ())))
    monkeypatch.setattr(gpu, "SMALL", replace(SMALL, checksum_bytes=4_000))
    assert rehearse(monkeypatch, tmp_path / "report", "checksums") == 1
    (part,) = json.loads((tmp_path / "report" / "report.json").read_text(encoding="utf-8"))["parts"]
    assert not part["passed"]
    assert part["differing"] > 0


def test_the_profile_of_one_block_stands_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links = MeasuredLinks(Link(1e-5, 1e9), ())
    monkeypatch.setattr(profile, "measure_local_links", lambda *_, **__: links)
    own = subject(tmp_path, models={"tiny": TINY}, repeats=1)

    found = _gpu_parts.profiles(own)

    assert [row[:2] for row in found.rows] == [("tiny", "embedding"), ("tiny", "block"), ("tiny", "head")]
    written = read_profile(tmp_path / "tiny.json")
    assert [layer.name for layer in written.layers] == ["embedding 0", "block 1", "block 2", "block 3", "head 4"]
    assert len({layer.param_bytes for layer in written.layers[1:4]}) == 1
    # A run of the whole model accepts it.
    config = config_of(own, TINY, in_bf16=True).model_copy(
        update={"output_dir": tmp_path / "data" / "tiny", "profile": tmp_path / "tiny.json"}
    )
    assert profile_of_run(config).fingerprint == inspect_job(config).profiled_as(config)


def test_a_fault_of_a_step_befalls_the_first_process_that_begins_it(tmp_path: Path) -> None:
    config = config_of(subject(tmp_path), TINY, job=FAULTY_JOB).model_copy(update={"output_dir": tmp_path})
    prepare_data_of(config)
    first, second = (_faulty_job.job(config) for _ in range(2))
    tokens = torch.zeros(1, TINY.seq_len, dtype=torch.long)

    def begin(job: Job, step: int) -> None:
        assert job.learning_rate is not None
        job.learning_rate(step - 1)  # of the update before
        job.layers[0]()(tokens)

    begin(first, 3)
    with pytest.raises(RuntimeError):
        begin(first, 4)
    begin(second, 4)
    with pytest.raises(IndexError):
        begin(second, 8)


def test_a_device_that_is_not_there_is_a_wrong_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.accelerator.is_available():
        pytest.skip("it may be there")
    monkeypatch.setattr("sys.argv", ["gpu.py", "--device", "xpu"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert '--device xpu: device = "xpu": torch' in capsys.readouterr().err
