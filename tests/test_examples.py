"""The example of a user's own model is its plain loop made into a job, and it learns."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from chameleon_ft.config import RunConfig
from chameleon_ft.data import SampleOrder
from chameleon_ft.data.samples import load_micro_batch
from chameleon_ft.job.job import Job
from chameleon_ft.job.reference import load_job
from chameleon_ft.models.build import build_layer
from chameleon_ft.models.checks import boundary_specs

EXAMPLES = Path(__file__).parents[1] / "examples"


def load_example() -> Job:
    return load_job(f"{EXAMPLES / 'own_model.py'}:job", RunConfig())


def train_plainly(job: Job, *, steps: int, batch_size: int) -> nn.Module:
    model = nn.Sequential(*(build_layer(job, layer, 0) for layer in range(job.num_layers)))
    optimizer = job.optimizer(list(model.parameters()))
    order = SampleOrder(len(job.dataset), 0)
    for step in range(steps):
        inputs, targets = load_micro_batch(job.dataset, order, step * batch_size, batch_size)
        optimizer.zero_grad()
        (job.loss(model(inputs), targets) / float(job.loss_terms(targets))).backward()
        assert job.clip_norm is not None
        nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
    return model


def test_it_classifies_unseen_samples_after_short_training() -> None:
    model = train_plainly(load_example(), steps=80, batch_size=16)
    unseen = load_job(f"{EXAMPLES / 'own_model.py'}:job", RunConfig()).dataset
    inputs, targets = (torch.stack(each) for each in zip(*(unseen[i] for i in range(50_000, 50_400)), strict=True))
    with torch.no_grad():
        accuracy = float((model(inputs).argmax(1) == targets).float().mean())

    assert accuracy > 0.95  # one in four by chance


def test_it_has_layers_enough_for_several_stages() -> None:
    job = load_example()

    assert [spec.leaves[0].shape for spec in boundary_specs(job, 2)][:2] == [(2, 8, 12, 12)] * 2
    assert job.num_layers >= 6


def test_it_differs_from_the_plain_loop_in_the_loop_alone() -> None:
    def model_and_data(name: str, end: str) -> str:
        source = (EXAMPLES / name).read_text(encoding="utf-8")
        return source[source.index("SIZE = ") : source.index(end)]

    assert model_and_data("own_model.py", "def job") == model_and_data("own_model_plain.py", "def main")
