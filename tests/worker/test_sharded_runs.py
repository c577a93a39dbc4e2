"""Real runs whose holders share the optimizer's state: through losses, a return to a checkpoint, and a resume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

from chameleon_ft.config import Checkpoint, FailurePhase, Parallel, RunConfig, TrainConfig
from chameleon_ft.events.lines import Record
from chameleon_ft.events.records import JoinRecord
from chameleon_ft.job.job import Job, ModelParameters
from chameleon_ft.launch.live_run import inject
from chameleon_ft.models.llama import llama_job
from chameleon_ft.optim import combined, matrices
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.worker.checkpoint import read_layer
from tests.configs import unhurried
from tests.harness import (
    assert_as_the_plain_loop,
    assert_trained_as_if_nothing_failed,
    fails,
    in_thread,
    resume_here,
    small_config,
    train_here,
)
from tests.histories import StoppingView

pytestmark = pytest.mark.multiprocess


def sharing(redundancy: int | Literal["auto"] = "auto") -> Parallel:
    return Parallel(dp=3, pp=2, optimizer_redundancy=redundancy)


def of_matrices(own: ModelParameters) -> torch.optim.Optimizer:
    """Return an optimizer that updates matrices as a whole, and another one of elements, as one."""
    others = partial(torch.optim.AdamW, lr=1e-3)
    # Not Muon, which rounds to bfloat16, and so makes more of a sum in another order than other optimizers.
    return combined(own, {"0.*": others, matrices: partial(torch.optim.Adafactor, lr=0.01), "*": others})


def job_of_matrices(config: TrainConfig) -> Job:
    return replace(llama_job(config), optimizer=of_matrices, learning_rate=None)


def frozen(factory: Callable[[], nn.Module]) -> nn.Module:
    return factory().requires_grad_(False)


def job_with_a_frozen_stage(config: TrainConfig) -> Job:
    """Has a first stage that is not trained, and a layer above it that is not either."""
    job = llama_job(config)
    layers = [layer if number == 2 else partial(frozen, layer) for number, layer in enumerate(job.layers)]
    return replace(job, layers=layers)


@pytest.mark.parametrize(
    ("phase", "job"),
    [("backward", ""), ("optimizer", f"{__file__}:job_with_a_frozen_stage"), ("gather", f"{__file__}:job_of_matrices")],
)
def test_a_kill_leaves_one_owner_of_each_slice(tmp_path: Path, phase: FailurePhase, job: str) -> None:
    own = {"job": job} if job else {}
    config = small_config(tmp_path, parallel=sharing(2), failures=(fails(3, step=4, phase=phase),), **own)
    ended = train_here(config, tmp_path / "run")
    assert_trained_as_if_nothing_failed(ended)
    (failure,) = ended.failures
    assert (failure.worker, failure.policy) == (3, "reroute")
    # In the last two phases the step is applied: what has not been received of it is sent once more.
    assert failure.resume_step == (4 if phase == "backward" else 5)


OWN_OPTIMIZER = """
import torch
from dataclasses import replace
from chameleon_ft.models.llama import llama_job

class Mine(torch.optim.SGD):
    pass

def job(config):
    return replace(llama_job(config), optimizer=lambda parameters: Mine(parameters, lr=1e-2), learning_rate=None)
"""


def test_an_optimizer_that_is_not_known_is_kept_whole_and_the_run_says_so(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(OWN_OPTIMIZER)
    ended = train_here(small_config(tmp_path, job=str(path), parallel=sharing(), steps=4), tmp_path / "run")
    assert ended.code == 0
    (event,) = ended.events("optimizer_undivided")
    assert event["optimizer"] == "Mine"
    assert "Job(elementwise=True)" in event["message"]
    assert ended.summary["samples_repeated"] == 0


@dataclass
class KillsNextOwner(StoppingView):
    """Kills the other owner once slices have two again, and ends the run some steps after that."""

    def show(self, record: Record) -> None:
        super().show(record)
        if isinstance(record, JoinRecord) and record.policy == "redundancy":
            in_thread(lambda: inject(self.run, worker=3, kind="kill", phase="gather", step=None))()


def test_the_other_owner_is_lost_once_slices_have_two_again(tmp_path: Path) -> None:
    config = small_config(tmp_path, steps=10_000, parallel=sharing(2), failures=(fails(1, step=2),))
    run = RunDirectory(tmp_path / "run")
    view = KillsNextOwner(run, lambda ended: len(ended.failures) == 2, more_steps=2)
    ended = train_here(config, run.path, view=view)
    assert [failure.worker for failure in ended.failures] == [1, 3]
    assert [failure.policy for failure in ended.failures] == ["reroute", "reroute"]
    assert_as_the_plain_loop(ended, steps=60)


def test_without_redundancy_a_loss_returns_to_a_checkpoint(tmp_path: Path) -> None:
    # Slow steps, so that a checkpoint is written by then.
    failures = (*unhurried(6, speed=0.25), fails(3, step=13, phase="gather"))
    config = small_config(tmp_path, steps=16, parallel=sharing(1), checkpoint=Checkpoint(every=3), failures=failures)
    ended = train_here(config, tmp_path / "run")
    assert ended.code == 0, ended.summary["reason"]
    (failure,) = ended.failures
    assert failure.policy == "checkpoint"
    assert "the optimizer's state of layers 2-3 is lost" in failure.action
    assert_as_the_plain_loop(ended)


def test_a_run_resumes_in_bf16_with_other_owners(tmp_path: Path) -> None:
    def resumed(name: str, first: Parallel, other: Parallel) -> list[torch.Tensor]:
        directory = tmp_path / name
        directory.mkdir()
        config: RunConfig = small_config(directory, steps=3, parallel=first, precision="bf16")
        ended = train_here(config, directory / "run")
        ended = resume_here(ended, parallel=other, steps=6)
        assert ended.code == 0
        states = [read_layer(ended.run.checkpoints, 6, layer) for layer in range(4)]
        return [state[key] for state in states for key in sorted(state) if key.startswith("module/")]

    every = Parallel(dp=3, pp=2)
    expected = resumed("plain", every, every)
    for one, other in zip(resumed("slices", sharing(2), sharing(1)), expected, strict=True):
        assert torch.equal(one, other)
