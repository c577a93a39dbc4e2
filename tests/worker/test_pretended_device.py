"""Whole runs on a pretended accelerator, whose tensors cannot be mixed with those of the host."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from torch.utils import backend_registration

from chameleon_ft.config import Batch, Checkpoint, Failure, Health, Parallel, Recovery, RunConfig, config_to_toml
from chameleon_ft.launch.live_run import drain
from chameleon_ft.storage.checkpoints import complete_checkpoints
from chameleon_ft.storage.files import RunDirectory
from tests.backends import ENVIRON
from tests.harness import Command
from tests.stored import event_lines

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"), reason="another version of torch"
)


def job(folder: Path, **changes: Any) -> Path:
    """Write the example of an own model as a job for four workers that share the device; return its file."""
    fields: dict[str, Any] = {
        "device": "npu",
        "share_devices": True,
        "workers": 4,
        "batch": Batch(micro_batches=4, micro_batch_size=2),
        **changes,
    }
    config = RunConfig(job=str(folder / "job.py"), **fields)
    (folder / "job.toml").write_text(config_to_toml(config), encoding="utf-8")
    return Path(shutil.copy(ROOT / "examples" / "own_model.py", folder / "job.py"))


def assert_as_the_plain_loop(run: RunDirectory) -> None:
    """Compare its losses with those of the plain loop, on the same device."""
    with Command("verify", run.path, environ=ENVIRON) as verifying:
        assert verifying.wait() == 0, verifying.printed


@pytest.mark.multiprocess
def test_an_interrupted_step_is_completed_on_a_device(tmp_path: Path) -> None:
    file = job(
        tmp_path,
        steps=8,
        parallel=Parallel(dp=2, pp=2),
        checkpoint=Checkpoint(every=5),
        health=Health(detect_slow=False, check_every=2),
        recovery=Recovery(policy="reroute"),
        failures=(Failure(worker=3, step=3, phase="backward"),),
    )
    run = RunDirectory(tmp_path / "run")
    with Command("run", file, "--output-dir", run.path, environ=ENVIRON) as training:
        training.read_until("has not been run on any Ascend NPU yet")
        assert training.wait() == 0, training.printed
    (failure,) = run.failures()
    assert failure.is_salvaged
    assert set(complete_checkpoints(run.checkpoints)) >= {5}
    assert_as_the_plain_loop(run)


@pytest.mark.multiprocess
def test_layers_on_a_device_move_while_it_trains(tmp_path: Path) -> None:
    file = job(
        tmp_path,
        steps=30,
        parallel=Parallel(dp=1, pp=4),
        precision="bf16",
        checkpoint=Checkpoint(every=0),
        recovery=Recovery(policy="chameleon"),
    )
    run = RunDirectory(tmp_path / "run")
    with Command("run", file, "--output-dir", run.path, environ=ENVIRON) as training:
        training.read_until(r"^\s+2\s")  # the line of a step
        drain(run, workers=[3])
        assert training.wait() == 0, training.printed
    (join,) = [event for event in event_lines(run) if event["event"] == "join"]
    assert join["drained"] == [3]
    assert join["moved_bytes"] > 0
    assert_as_the_plain_loop(run)
