"""The pretended library of the pretended accelerator: its contract, and whole runs over it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

from chameleon_ft.config import Checkpoint, Failure, Health, Parallel, Recovery
from chameleon_ft.storage.files import RunDirectory
from tests.backends import ENVIRON
from tests.harness import Command
from tests.worker.test_pretended_device import ROOT, assert_as_the_plain_loop, job

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"), reason="another version of torch"
)


def test_the_contract() -> None:
    """Run `tests/pretended/contract.py` in a process whose accelerator is the pretended one."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/pretended/contract.py"]
    done = subprocess.run(
        words, cwd=ROOT, env={**os.environ, **ENVIRON}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.multiprocess
def test_an_interrupted_step_is_completed_over_the_library(tmp_path: Path) -> None:
    file = job(
        tmp_path,
        steps=6,
        parallel=Parallel(dp=2, pp=2),
        checkpoint=Checkpoint(every=0),
        health=Health(detect_slow=False, check_every=2),
        recovery=Recovery(policy="reroute"),
        failures=(Failure(worker=3, step=3, phase="backward"),),
    )
    # Only processes with the package know the name.
    configuration = file.with_suffix(".toml")
    configuration.write_text(configuration.read_text().replace('"gloo"', '"pretended-nccl"', 1))
    run = RunDirectory(tmp_path / "run")
    with Command("run", file, "--output-dir", run.path, environ=ENVIRON) as training:
        assert training.wait() == 0, training.printed
    (failure,) = run.failures()
    assert failure.is_salvaged
    assert_as_the_plain_loop(run)
