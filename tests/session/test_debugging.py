"""A run in a single process trains like one on several workers, where breakpoints work."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from chameleon_ft import Session
from chameleon_ft.errors import ConfigError
from chameleon_ft.events.records import Evaluation
from chameleon_ft.session.configuration import RunRequest
from chameleon_ft.session.start import PreparedRun, prepare_run
from chameleon_ft.storage.files import RunDirectory

JOB = """
from functools import partial
import torch
from torch import nn
from chameleon_ft import Job

class Data:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=generator), torch.randn(4, generator=generator)

class Loss(nn.MSELoss):
    def forward(self, output, target):
        {inside}
        return super().forward(output, target)

def job(lr: float = 0.01):
    layers = [partial(nn.Linear, 8, 8), nn.Tanh, partial(nn.Linear, 8, 4)]
    return Job(
        layers=layers,
        loss=Loss(reduction="sum"),
        dataset=Data(),
        evaluation=Data(),
        metrics={{"error": lambda output, target: (output - target).abs().sum()}},
        optimizer=partial(torch.optim.AdamW, lr=lr),
        clip_norm=1.0,
    )
"""
CHANGES: dict[str, Any] = {
    "workers": 2,
    "parallel": {"dp": 1, "pp": 2},
    "batch": {"micro_batches": 4, "micro_batch_size": 2},
    "job_arguments": {"lr": 0.02},
    "evaluation": {"every": 2, "samples": 7},
}


def job_in(folder: Path, inside: str = "pass") -> Path:
    path = folder / "my_job.py"
    path.write_text(JOB.format(inside=inside))
    return path


def debugged(job: Path, out: Path, **changes: Any) -> tuple[int, PreparedRun]:
    given = {**CHANGES, "steps": 4, "output_dir": str(out), "debug": "single process", **changes}
    prepared = prepare_run(RunRequest(changes=given).of_job(str(job)))

    def launch(*_: object, **__: object) -> int:
        raise AssertionError("no worker is to be started")

    return prepared.start(launch), prepared


def losses(run: RunDirectory) -> list[float]:
    return [record.loss for record in run.readable_steps()[0]]


@pytest.mark.multiprocess
def test_losses_are_those_of_a_run_on_workers_and_a_resume_begins_with_its_checkpoint(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    with Session(job, **CHANGES, steps=4, output_dir=str(tmp_path / "run")) as session:
        trained = [step.loss for step in session]
        evaluations = session.evaluations
    code, prepared = debugged(job, tmp_path / "debugged", steps=6)
    assert code == 0
    assert losses(prepared.directory)[:4] == pytest.approx(trained, rel=1e-7)
    found = [event for event in prepared.directory.readable_events()[0] if isinstance(event, Evaluation)]
    assert [each.step for each in evaluations] == [1, 3]
    for one, other in zip(evaluations, found, strict=False):
        assert (one.step, one.samples, one.terms) == (other.step, other.samples, other.terms) == (other.step, 7, 7.0)
        assert one.loss == pytest.approx(other.loss, rel=1e-6)
        assert one.metrics == pytest.approx(other.metrics, rel=1e-6)

    changes = {"steps": 6, "debug": "single process"}
    resumed = prepare_run(RunRequest(changes=changes, resume=str(tmp_path / "run")))
    assert resumed.start(lambda *_, **__: 1) == 0
    assert losses(resumed.directory)[4:] == pytest.approx(losses(prepared.directory)[4:], rel=1e-7)
    assert prepare_run(RunRequest(changes={"steps": 7}, resume=str(tmp_path / "run"))).config.debug == "off"


def test_a_breakpoint_of_the_loss_stops_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stops: list[int] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append(os.getpid()))
    code, prepared = debugged(job_in(tmp_path, "breakpoint()"), tmp_path / "run")
    assert code == 0
    # Four steps of four micro-batches, and two evaluations: of four, and the last sample once more.
    assert stops == [os.getpid()] * (16 + 2 * 5)
    assert [record.step for record in prepared.directory.readable_steps()[0]] == [0, 1, 2, 3]


@pytest.mark.parametrize(("inside", "code", "status"), [("1 / 0", 1, "failed"), ("raise KeyboardInterrupt", 130, "")])
def test_an_error_is_shown_with_its_traceback_and_an_interrupt_is_no_error(
    inside: str, code: int, status: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, prepared = debugged(job_in(tmp_path, inside), tmp_path / "run")
    assert found == code
    assert ("my_job.py" in capsys.readouterr().err) == bool(status)
    assert prepared.directory.summary_file.exists()


def test_a_wrong_argument_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no argument rate"):
        debugged(job_in(tmp_path), tmp_path / "run", job_arguments={"rate": 1})
    assert not (tmp_path / "run").exists()
