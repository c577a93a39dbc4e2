"""The blocks of the page on evaluation run, as a reader would run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_docs import ROOT, blocks

PAGE = ROOT / "docs" / "evaluation.md"


def output_of(number: int, folder: Path) -> list[str]:
    """Run a block of the page beside its job, and return the lines that it prints."""
    job, *sessions, _ = blocks(PAGE, "python")
    assert len(sessions) == 2
    (folder / "my_job.py").write_text(job)
    script = folder / "session.py"
    script.write_text(sessions[number])
    ended = run_in(folder, sys.executable, script)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip().splitlines()


def run_in(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, env=os.environ, text=True, capture_output=True, check=False, timeout=110)


@pytest.mark.multiprocess
def test_the_session_of_the_page_evaluates_the_job_of_the_page(tmp_path: Path) -> None:
    on_request, best = output_of(0, tmp_path)
    assert 0 < float(on_request) < 1
    assert "Evaluation(" in best
    assert "'accuracy': 0." in best or "'accuracy': 1.0" in best


@pytest.mark.multiprocess
def test_the_callbacks_of_the_page_see_the_best_loss_and_stop_the_run_early(tmp_path: Path) -> None:
    (line,) = output_of(1, tmp_path)
    status, loss = line.split()
    assert status == "interrupted"
    assert 0 < float(loss) < 1


@pytest.mark.multiprocess
def test_the_callbacks_of_the_configuration_note_evaluations_and_stop_the_run_early(tmp_path: Path) -> None:
    job, *_, callbacks = blocks(PAGE, "python")
    (tmp_path / "my_job.py").write_text(job)
    (tmp_path / "my_callbacks.py").write_text(callbacks)
    (tmp_path / "my_job.toml").write_text(blocks(PAGE, "toml")[-1])
    flags = ["--steps=100000", "--workers=1", "--parallel.dp=1", "--parallel.pp=1"]
    ended = run_in(tmp_path, sys.executable, "-m", "chameleon_ft", "run", "my_job.py", *flags)
    assert ended.returncode == 130, ended.stderr
    assert "the run is interrupted" in ended.stdout
    steps = [int(line.split()[0]) for line in (tmp_path / "evaluations.txt").read_text().splitlines()]
    assert len(steps) > 3
    assert steps == [24 + 25 * number for number in range(len(steps))]
