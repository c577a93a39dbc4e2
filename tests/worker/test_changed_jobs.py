"""Runs that are resumed with another job than the one that their checkpoint was written by."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from chameleon_ft.errors import CheckpointError, ConfigError
from chameleon_ft.launch.local import train
from chameleon_ft.session.configuration import RunRequest
from chameleon_ft.session.start import prepare_run
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.verify.verification import Verification, repeat_run
from tests.harness import TOLERANCE, Ended
from tests.test_job_record import BLOCKS, JOB

GROWN = ("return 40", "return 48")
# Of another length: Python takes its compiled copy of a file for the file if second and length are equal.
RELU = ("F.gelu", "F.relu6")
OTHER_OPTIMIZER = ("torch.optim.AdamW", "torch.optim.Adamax")
SMALL: dict[str, Any] = {
    "workers": 2,
    "parallel": {"dp": 1, "pp": 2},
    "batch": {"micro_batches": 2, "micro_batch_size": 2},
    "checkpoint": {"every": 2},
}


def write_job(folder: Path, *replacements: tuple[str, str]) -> Path:
    for name, text in (("my_job.py", JOB), ("blocks.py", BLOCKS)):
        for before, after in replacements:
            text = text.replace(before, after)
        (folder / name).write_text(text)
    return folder / "my_job.py"


def resume(run: RunDirectory, **flags: Any) -> Ended:
    prepared = prepare_run(RunRequest(changes=flags, resume=str(run.path), fork="output_dir" in flags))
    return Ended(prepared.start(train), prepared.directory)


def copy_of(run: RunDirectory, path: Path) -> RunDirectory:
    return RunDirectory.open(Path(shutil.copytree(run.path, path)))


@pytest.mark.multiprocess
def test_a_resume_with_another_job_is_refused_or_said(tmp_path: Path) -> None:
    job = str(write_job(tmp_path))
    prepared = prepare_run(RunRequest(changes={**SMALL, "steps": 4, "output_dir": tmp_path / "run", "job": job}))
    assert prepared.start(train) == 0
    run = prepared.directory
    files = sorted(run.path.rglob("*"))

    write_job(tmp_path, OTHER_OPTIMIZER)  # which does not find its state in the checkpoint
    with pytest.raises(CheckpointError, match="exp_inf"):
        resume(run, steps=6)

    write_job(tmp_path, GROWN)
    for flags in ({"steps": 6}, {"steps": 6, "output_dir": tmp_path / "fork"}):
        with pytest.raises(CheckpointError, match=r"40 and is 48.*--accept-changes data"):
            resume(run, **flags)
    assert sorted(run.path.rglob("*")) == files
    assert not (tmp_path / "fork").exists()
    accepted = resume(copy_of(run, tmp_path / "accepted"), steps=6, accept_changes=("data",))
    assert (accepted.code, accepted.steps) == (0, list(range(6)))
    (event,) = accepted.events("job_changed")
    assert event["step"] == 4
    assert any("40" in change and "48" in change for change in event["changes"])
    # The next checkpoint is of that job: the first data are others now.
    write_job(tmp_path)
    with pytest.raises(CheckpointError):
        resume(accepted.run, steps=8)

    write_job(tmp_path, RELU)
    edited = resume(run, steps=6)
    (event,) = edited.events("job_changed")
    assert event["step"] == 4
    assert any("layer 1" in change for change in event["changes"])
    # Only the job as it is now can be repeated: from the checkpoint that it began with, while that is kept.
    assert [each.step for each in repeat_run(run)] == [4, 5]
    assert Verification.of(repeat_run(run), tolerance=TOLERANCE).first_step_outside is None
    again = resume(run, steps=8)
    assert (again.code, again.steps) == (0, list(range(8)))
    assert len(again.events("job_changed")) == 1, "the same job as before"
    with pytest.raises(ConfigError, match="step 4"):
        next(repeat_run(run))
