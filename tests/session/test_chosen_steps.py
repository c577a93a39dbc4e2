"""A checkpoint of a chosen step is loaded as weights, and training goes on from it as it did before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from chameleon_ft import Session, load_checkpoint
from chameleon_ft.errors import CheckpointError, ConfigError
from chameleon_ft.session.export import export_weights
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.weights import SINGLE
from tests.golden import refused
from tests.session.test_debugging import CHANGES, job_in


@pytest.mark.multiprocess
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_of_a_step_and_training_from_it(tmp_path: Path, precision: str) -> None:
    job, out = job_in(tmp_path), tmp_path / "run"
    averaged = "lambda own: ema(torch.optim.AdamW(own, lr=lr), 0.9)"
    text = job.read_text().replace("partial(torch.optim.AdamW, lr=lr)", averaged)
    job.write_text(f"from chameleon_ft.optim import ema\n{text}")
    # Two holders of each layer share its optimizer state.
    layout = {"workers": 2, "parallel": {"dp": 2, "pp": 1}, "precision": precision}
    with Session(job, **{**CHANGES, **layout, "checkpoint.every": 0}, steps=4, output_dir=str(out)) as run:
        run.wait()
    with Session(resume=out, steps=7) as run:
        losses = [step.loss for step in run]
        newest = run.state_dict()
    found = load_checkpoint(out, 4)
    assert found.keys() == load_checkpoint(out).keys() == newest.keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert torch.equal(load_checkpoint(out)["2.bias"], newest["2.bias"])
    assert not torch.equal(found["2.bias"], newest["2.bias"])
    averages = load_checkpoint(out, average="ema")
    assert averages.keys() == newest.keys()
    export_weights(RunDirectory.open(out), tmp_path / "averages", average="ema")
    exported = load_file(tmp_path / "averages" / SINGLE)
    assert all(torch.equal(exported[f"layers.{name}"], value) for name, value in averages.items())
    # It begins at the first update, and stays behind.
    moved = {name: torch.dist(newest[name], found[name]) for name in newest}
    assert all(0 < torch.dist(averages[name], newest[name]) < 3 * moved[name] for name in averages)
    with refused(ConfigError):
        load_checkpoint(out, average="median")
    with pytest.raises(CheckpointError, match="4, 7"):
        load_checkpoint(out, 3)

    with Session(resume=out, from_step=4) as again:
        assert [step.loss for step in again] == pytest.approx(losses, rel=1e-6)
    with Session(resume=out, fork=True, from_step=4, output_dir=str(tmp_path / "fork")) as fork:
        assert [step.loss for step in fork] == pytest.approx(losses, rel=1e-6)
