"""The examination of a host, on a real one, and its way to the coordinator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chameleon_ft.cli.main import main
from chameleon_ft.config import Preflight
from chameleon_ft.protocol.messages import Examine
from chameleon_ft.worker.preflight import examine
from tests.configs import write_config
from tests.harness import Command, small_config


def an_order(*, measures: bool) -> Examine:
    return Examine(device="cpu", backend="gloo", workers=2, share_devices=False, measures=measures)


def test_a_cpu_is_fit() -> None:
    report = examine(an_order(measures=True))
    assert report.problem == ""
    assert report.matmul_flops > 1e8
    assert report.copy_bytes_per_s > 1e7
    assert {"python", "torch", "chameleon"} <= dict(report.versions).keys()


def test_speeds_are_measured_only_if_that_is_asked_for() -> None:
    report = examine(an_order(measures=False))
    assert (report.matmul_flops, report.copy_bytes_per_s) == (0.0, 0.0)


def test_a_device_that_is_missing_is_a_problem() -> None:
    report = examine(an_order(measures=True).model_copy(update={"device": "xpu"}))
    assert 'device = "xpu"' in report.problem
    assert report.devices == ()


def test_the_command_prints_what_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preflight"]) == 0
    assert "matrix products" in capsys.readouterr().out
    assert main(["preflight", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problem"] == ""
    assert main(["preflight", "--device", "xpu"]) == 1
    assert "no worker can run here" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--device", "emulated"], ["--workers", "0"]])
def test_a_wrong_flag_of_the_command_is_refused(flags: list[str]) -> None:
    assert main(["preflight", *flags]) == 2


@pytest.mark.multiprocess
def test_a_host_that_is_not_admitted_is_told_why(tmp_path: Path) -> None:
    config, run = small_config(tmp_path, preflight=Preflight(max_clock_error_s=1e-9)), tmp_path / "run"
    with Command("coordinator", write_config(config, tmp_path), "--output-dir", run) as coordinator:
        coordinator.read_until("waiting for")
        with Command("agent", "--run", run, "--workers", 6) as agent:
            assert agent.wait() == 1
            assert "is not admitted: its clock is" in agent.printed
        coordinator.read_until("is not admitted: its clock is")
        assert coordinator.is_running
