"""Runs from Python: what a session refuses at once, and runs that it starts, follows, ends and resumes."""

from __future__ import annotations

import gc
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from chameleon_ft import Job, RunConfig, Session
from chameleon_ft.config import TrainConfig
from chameleon_ft.errors import CheckpointError, ConfigError, LiveRunError, RunFailedError
from chameleon_ft.session.configuration import RunRequest
from chameleon_ft.session.session import _request

ROOT = Path(__file__).parent.parent.parent
JOB = """
import os
from functools import partial

import torch
from torch import nn
from torch.utils.data import TensorDataset

from chameleon_ft import Job


class Loss(nn.MSELoss):
    def forward(self, output, target):
        if os.path.exists("{trouble}"):
            raise ValueError("no loss today")
        return super().forward(output, target)


def job():
    torch.manual_seed(1)
    x = torch.randn(64, 8)
    return Job(
        layers=[partial(nn.Linear, 8, 16), nn.Tanh, partial(nn.Linear, 16, 16), partial(nn.Linear, 16, 1)],
        loss=Loss(reduction="sum"),
        dataset=TensorDataset(x, x.sum(1, keepdim=True)),
        optimizer=partial(torch.optim.SGD, lr=0.01),
    )
"""
SMALL: dict[str, Any] = {
    "workers": 2,
    "parallel": {"dp": 2, "pp": 1},
    "batch": {"micro_batches": 2, "micro_batch_size": 4},
    "snapshots.every": 0,
    "health.detect_slow": False,
    "preflight.min_speed": 0.0,
}


@pytest.fixture
def trouble(tmp_path: Path) -> Path:
    """A file with which the loss of the job raises an error."""
    return tmp_path / "trouble"


@pytest.fixture
def job(tmp_path: Path, trouble: Path) -> Path:
    path = tmp_path / "my_job.py"
    path.write_text(JOB.format(trouble=trouble))
    return path


@pytest.fixture
def all_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check at the end of a test that the processes of its runs end."""
    monkeypatch.setenv("CHAMELEON_TEST_OF", str(tmp_path))
    yield
    _, left = psutil.wait_procs(list(processes_of(tmp_path)), timeout=30)
    for process in left:
        process.kill()
    assert not left, f"still there: {left}"


def processes_of(test: Path) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get("CHAMELEON_TEST_OF") == str(test):
                yield process


def some_job() -> Job:
    raise NotImplementedError


def requested(*arguments: Any, **changes: Any) -> RunRequest:
    job, config = (*arguments, None, None)[:2]
    return _request(job, config, changes, resume=None, fork=False)


def test_a_session_is_configured_by_a_file_values_or_a_config_and_by_changes(job: Path, tmp_path: Path) -> None:
    beside = job.with_suffix(".toml")
    beside.write_text("steps = 30\nseed = 4\n")
    other = tmp_path / "other.toml"
    other.write_text("steps = 50\n")
    assert requested(job, **{"parallel.dp": 2, "parallel.pp": 2}).config().steps == 30
    assert requested(str(job), other, seed=5).config().seed == 5
    assert requested(job, {"steps": 40}).config().steps == 40
    assert requested(job, RunConfig(steps=20), seed=6).config().model_dump(include={"steps", "seed"}) == {
        "steps": 20,
        "seed": 6,
    }
    of_job = {"job.lr": 0.1, "job.norm": None}
    assert requested(job, other, **of_job).config().job_arguments == {"lr": 0.1, "norm": "none"}
    found = requested(None, TrainConfig(steps=70), **{"model.dim": 64}).config()
    assert isinstance(found, TrainConfig)
    assert (found.steps, found.model.dim) == (70, 64)


def test_a_job_may_be_a_function_that_workers_can_import(tmp_path: Path) -> None:
    assert requested(some_job).config().job == f"{__name__}:some_job"

    def local() -> Job:
        raise NotImplementedError

    for wrong in (local, lambda: None, type("Class", (), {})()):
        with pytest.raises(ConfigError, match="workers cannot import it"):
            requested(wrong)


def test_bad_input_is_refused_before_anything_starts(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    wrong: list[dict[str, Any]] = [
        {"workers": 7},
        {"stepz": 7},
        {"job": "nowhere.py"},
        {"config": "nowhere.toml"},
        {"address": "127.0.0.1:1", "steps": 3},
    ]
    for arguments in wrong:
        with pytest.raises(ConfigError):
            Session(**{"job": job, **arguments})
    with pytest.raises(ConfigError), Session(resume="nowhere"):
        pass
    assert sorted(tmp_path.iterdir()) == before


def test_a_process_of_a_run_starts_no_session(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAMELEON_LAUNCHED_BY_SESSION", "1")
    with pytest.raises(ConfigError, match="__main__"):
        Session(job)


def documented_session() -> str:
    """Return the first lines of Python of the first page that begin a session."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "getting-started.md").read_text(), re.DOTALL)
    return next(str(block) for block in blocks if "with Session(" in block)


@pytest.mark.multiprocess
@pytest.mark.usefixtures("all_end")
def test_the_documented_lines_train_through_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(documented_session(), found)
    run = found["run"]
    assert run.status == "finished"
    assert [event.name for event in run.events].count("failure") == 1
    numbers = [int(line.split()[0]) for line in capsys.readouterr().out.splitlines()]
    assert numbers == list(range(0, run.config.steps, 10))
    assert found["weights"].keys() == run.state_dict().keys()
    assert all(name.partition(".")[0].isdecimal() for name in found["weights"])


@pytest.mark.multiprocess
@pytest.mark.usefixtures("all_end")
def test_a_run_that_is_not_finished_ends_with_a_checkpoint_and_is_resumed(job: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with Session(job, steps=100_000, output_dir=out, **SMALL) as run:
        numbers = [step.number for step, _ in zip(run, range(5), strict=False)]
        assert numbers == [0, 1, 2, 3, 4]
        assert not run.is_over
        saved = run.checkpoint()
        assert saved is not None
        assert saved > 4
        assert not run.report().is_over
        control = run._watcher.run.read_control()
        with Session(address=control.address, token=control.token) as followed:
            assert next(iter(followed)).number == 0
            assert followed.drain([1], wait=False) == (1,)
        with Session(address=str(out)) as followed:
            assert next(iter(followed)).number == 0
        with pytest.raises(LiveRunError), Session(resume=out):
            pass
    assert run.status == "interrupted"
    with pytest.raises(CheckpointError), Session(resume=out, seed=9):
        pass
    trained = max(step.step for step in run._watcher.run.steps()) + 1
    with pytest.raises(ConfigError, match="live"):
        run.inject(0)
    with Session(resume=out, steps=trained + 3) as resumed:
        assert [step.number for step in resumed] == [trained, trained + 1, trained + 2]
        assert resumed.wait() == "finished"


@pytest.mark.multiprocess
@pytest.mark.usefixtures("all_end")
def test_an_error_of_the_job_is_raised_here(job: Path, trouble: Path, tmp_path: Path) -> None:
    trouble.touch()
    with pytest.raises(ConfigError, match="no loss today"), Session(job, output_dir=tmp_path / "a", **SMALL) as run:
        run.wait()
    assert not (tmp_path / "a").exists()
    trouble.unlink()
    run = Session(job, steps=100_000, output_dir=tmp_path / "b", **SMALL)

    def train_into_trouble() -> None:
        with run:
            for step in run:
                if step.number == 3:
                    trouble.touch()

    with pytest.raises(RunFailedError, match="no loss today"):
        train_into_trouble()
    assert run.status == "failed"


@pytest.mark.multiprocess
@pytest.mark.usefixtures("all_end")
def test_a_session_that_is_left_by_an_error_or_dropped_leaves_no_process(job: Path, tmp_path: Path) -> None:
    def interrupt() -> None:
        with Session(job, steps=100_000, output_dir=tmp_path / "a", **SMALL) as run:
            next(iter(run))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert list(processes_of(tmp_path)) == []
    dropped = Session(job, steps=100_000, output_dir=tmp_path / "b", **SMALL)
    dropped.__enter__()
    next(iter(dropped))
    assert list(processes_of(tmp_path)) != []
    del dropped
    gc.collect()
