"""Runs whose judge is a loop that a user would write, with the weights at its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chameleon_ft.cli import main
from chameleon_ft.config import Batch, Checkpoint, Failure, Parallel, RunConfig
from tests.harness import Ended, train_here

JOB = """
import torch
from torch import nn
from torch.nn import functional

from chameleon_ft import Job
from chameleon_ft.data import SampleOrder, read_sample
from chameleon_ft.keys import init_key

LAYERS = [lambda: nn.Linear(6, 8), lambda: nn.Sequential(nn.Tanh(), nn.Linear(8, 3))]

class Samples:
    def __len__(self):
        return 30
    def __getitem__(self, index):
        return torch.rand(6) + index % 3, torch.tensor(index % 3)

def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)

def loss(output, targets):
    return functional.cross_entropy(output, targets, reduction="sum")

def job():
    return Job(layers=LAYERS, loss=loss, dataset=Samples(), optimizer=optimizer, clip_norm=0.5)

def loop(config, decay=0.01):
    layers = []
    for layer, factory in enumerate(LAYERS):
        torch.manual_seed(init_key(config.seed, layer))
        layers.append(factory())
    model = nn.Sequential(*layers)
    updates = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=decay)
    order = SampleOrder(30, config.seed)
    for step in range(config.steps):
        ids = order.ids(step, config.batch.samples)
        epochs = [(step * len(ids) + place) // 30 for place in range(len(ids))]
        samples = [read_sample(Samples(), index, seed=config.seed, epoch=epoch) for index, epoch in zip(ids, epochs)]
        inputs, targets = (torch.stack(column) for column in zip(*samples))
        mean = loss(model(inputs), targets) / len(ids)
        updates.zero_grad()
        mean.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        updates.step()
        yield mean, norm
    return model.state_dict()

def other_weights(config):
    weights = yield from loop(config)
    return {name: value + 0.1 for name, value in weights.items()}

def other_names(config):
    weights = yield from loop(config)
    return {name.replace(".weight", ".w"): value for name, value in weights.items()}

def last_yielded(config):
    yield (yield from loop(config))
"""


@pytest.mark.multiprocess
def test_a_loop_of_the_user_judges_losses_gradient_norms_and_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slices of the optimizer's state are put together, also under bf16, where they have the masters."""
    path = tmp_path / "a_job.py"
    path.write_text(JOB)

    def judged(ended: Ended, name: str) -> tuple[int, dict[str, Any], str]:
        code = main(["verify", str(ended.run.path), "--against", f"{path}:{name}", "--json"])
        output = capsys.readouterr()
        return code, json.loads(output.out or "{}"), output.err

    config = RunConfig(
        job=f"{path}:job",
        workers=3,
        parallel=Parallel(dp=3, pp=1, optimizer_redundancy=1),
        batch=Batch(micro_batches=3, micro_batch_size=2),
        steps=6,
        seed=5,
        checkpoint=Checkpoint(every=3),
        failures=(Failure(step=4, worker=1, phase="backward"),),
    )
    ended = train_here(config, tmp_path / "run")
    assert ended.code == 0
    for name in ("loop", "last_yielded"):
        code, found, _ = judged(ended, name)
        assert (code, found["outside"], found["weights"]["step"]) == (0, [], 6)
        assert found["max_relative_loss_deviation"] < 1e-6
        assert found["weights"]["deviation"] < 1e-5
    code, found, _ = judged(ended, "other_weights")
    assert (code, found["outside"]) == (1, ["weights"])
    code, _, message = judged(ended, "other_names")
    assert code == 2
    assert ".weight" in message or ".w" in message

    lower = config.model_copy(update={"precision": "bf16", "steps": 4, "failures": ()})
    code, found, _ = judged(train_here(lower, tmp_path / "lower"), "loop")  # which computes in float32
    assert found["weights"]["step"] == 4
    assert found["weights"]["deviation"] < 0.05
