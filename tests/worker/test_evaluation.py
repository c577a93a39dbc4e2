"""Evaluation during training: by a plain loop with the weights of checkpoints, also after a worker was lost in it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from chameleon_ft import load_checkpoint
from chameleon_ft.config import Batch, Checkpoint, Evaluation, Parallel, RunConfig
from chameleon_ft.data import read_sample
from chameleon_ft.errors import ConfigError
from chameleon_ft.events.records import Evaluation as Evaluated
from chameleon_ft.job.job import Job
from chameleon_ft.job.reference import load_job
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, Route
from chameleon_ft.schedule import OperationKind, best_program, forwards_of
from chameleon_ft.storage.checkpoints import named_step
from chameleon_ft.worker.execution.evaluation import EvaluationBatches
from chameleon_ft.worker.inspection import inspect_job
from tests.harness import PATIENT, Ended, fails, train_here
from tests.strategies import equal_costs

JOB = """
import random

import torch
from torch import nn
from torch.nn import functional

from chameleon_ft import Job

CLASSES = 5


class Tokens:
    # The weight of a sample is that of its targets that are not -1; one sample has none.
    def __init__(self, count, first):
        self.count, self.first = count, first

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        targets = torch.arange(4).add(index + self.first) % CLASSES
        targets[: index % 5] = -1
        return torch.rand(4, 6) + targets.unsqueeze(1) + random.random(), targets


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, CLASSES)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x):
        if not self.training:
            self.seen += 1
        return self.linear(x).transpose(0, 1)


def loss(output, targets):
    logits = output.transpose(0, 1).flatten(0, 1)
    return functional.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction="sum")


def right(output, targets):
    return (output.transpose(0, 1).argmax(-1) == targets).sum()


def job():
    return Job(
        layers=[lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5)), nn.Tanh, lambda: nn.Linear(8, 8), Counting],
        loss=loss,
        loss_terms=lambda targets: (targets != -1).sum(),
        dataset=Tokens(40, 0),
        evaluation=Tokens(17, 3),
        metrics={"accuracy": right},
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    )
"""


def config_of(path: Path, **changes: Any) -> RunConfig:
    path.with_name("a_job.py").write_text(JOB)
    fields: dict[str, Any] = {
        "job": str(path.with_name("a_job.py")),
        "workers": 4,
        "parallel": Parallel(dp=2, pp=2),
        "steps": 6,
        "seed": 5,
        "batch": Batch(micro_batches=4, micro_batch_size=3),
        "checkpoint": Checkpoint(every=2, keep=10),
        "evaluation": Evaluation(every=2),
        "snapshots": {"every": 0},
        "health": {"detect_slow": False},
        "preflight": {"min_speed": 0.0},
        "timeouts": PATIENT,
        "recovery": {"policy": "reroute"},
    }
    return RunConfig(**{**fields, **changes})


def evaluations(ended: Ended) -> dict[int, Evaluated]:
    return {event.step: event for event in ended.run.events() if isinstance(event, Evaluated)}


def plain(ended: Ended, step: int) -> tuple[float, float, float]:
    """Return loss, accuracy and terms by a loop over samples, with the weights of the checkpoint after a step."""
    config = ended.run.config()
    job = load_job(config.job, config)
    model = nn.Sequential(*(factory() for factory in job.layers))
    model.load_state_dict(load_checkpoint(ended.run.path, step + 1))
    model.eval().double()
    loss = right = terms = 0.0
    assert job.evaluation is not None
    for index in range(len(job.evaluation)):
        x, targets = (each.unsqueeze(0) for each in read_sample(job.evaluation, index, seed=config.seed))
        with torch.no_grad():
            output = model(x.double())
        loss += float(job.loss(output, targets))
        right += float(job.metrics["accuracy"](output, targets))
        terms += float(job.loss_terms(targets))
    return loss / terms, right / terms, terms


@pytest.mark.multiprocess
def test_evaluations_are_those_of_a_plain_loop_and_training_does_not_depend_on_them(tmp_path: Path) -> None:
    """Workers are lost in the evaluation after step 3, and in that after the last step."""
    lost = [fails(2, step=3, phase="evaluation"), fails(1, step=5, phase="evaluation")]
    ended = train_here(config_of(tmp_path / "one", failures=lost), tmp_path / "one")
    assert ended.code == 0
    assert ended.lost == {1, 2}
    assert [event["step"] for event in ended.events("evaluation")] == [1, 3, 5]
    # The steps before the loss are the same in all.
    until = {"steps": 4, "checkpoint": Checkpoint(every=0)}
    without = train_here(config_of(tmp_path / "two", evaluation=Evaluation(), **until), tmp_path / "two")
    for run, step in ((without, 3), (ended, 5)):
        event, (loss, accuracy, terms) = evaluations(ended)[step], plain(run, step)
        assert event.loss == pytest.approx(loss, rel=1e-6)
        assert event.metrics["accuracy"] == pytest.approx(accuracy, rel=1e-6)
        assert event.samples == 17
        assert event.terms == pytest.approx(terms)
        assert event.perplexity == pytest.approx(math.exp(loss), rel=1e-5)
    until["checkpoint"] = Checkpoint(every=0, keep=1, keep_best="max accuracy")
    evaluated = train_here(config_of(tmp_path / "three", evaluation=Evaluation(every=1), **until), tmp_path / "three")
    assert [each.loss for each in without.run.steps()] == [each.loss for each in evaluated.run.steps()]
    assert sorted(evaluations(evaluated)) == [0, 1, 2, 3]
    one, other = (load_checkpoint(each.run.path, 4) for each in (without, evaluated))
    assert all(torch.equal(one[name], other[name]) for name in one)
    # One is left out where that before it is still being written.
    written = [event["step"] for event in evaluated.events("checkpoint")]
    accuracy_of = {step: evaluations(evaluated)[step - 1].metrics["accuracy"] or 0.0 for step in written}
    best = max(sorted(accuracy_of), key=lambda step: accuracy_of[step])
    assert named_step(evaluated.run.checkpoints, "best", criterion="max accuracy") == best
    assert load_checkpoint(evaluated.run.path, "best").keys() == one.keys()


@pytest.mark.parametrize("samples", range(1, 14))
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_weights_of_micro_batches_count_every_sample_once(samples: int, size: int) -> None:
    batches = EvaluationBatches(samples, size)
    counts = torch.zeros(samples, dtype=torch.float64)
    for number in range(batches.count):
        for position in range(number * size, (number + 1) * size):
            counts[min(position, samples - 1)] += batches.weight(number)
    assert torch.allclose(counts, torch.ones(samples, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("count", [1, 3, 4, 6, 8, 11])
def test_the_forwards_of_an_evaluation_have_the_routes_of_the_step(count: int) -> None:
    stages = [LayerRange(0, 1), LayerRange(1, 2)]
    placement = Placement(2, {worker: (stages[worker % 2],) for worker in range(4)})
    routes = [
        Route(number, (Hop(number // 2 * 2, stages[0]), Hop(number // 2 * 2 + 1, stages[1]))) for number in range(4)
    ]
    program = best_program(Plan(placement, tuple(routes)), equal_costs(layers=2, micro_batches=4, workers=4)).program
    found = {worker: forwards_of(program.of(worker), micro_batches=4, count=count) for worker in range(4)}
    assert all(each.kind is OperationKind.FORWARD for own in found.values() for each in own)
    numbers = sorted(each.micro_batch for worker in (0, 2) for each in found[worker])
    assert numbers == list(range(count))
    for first, second in ((0, 1), (2, 3)):
        assert [each.micro_batch for each in found[first]] == [each.micro_batch for each in found[second]]
        assert all((each.send_to, each.receive_from) == (second, None) for each in found[first])
    assert abs(len(found[0]) - len(found[2])) <= 1


def some_job(**changes: Any) -> Job:
    fields: dict[str, Any] = {
        "layers": [lambda: nn.Linear(2, 1)],
        "loss": nn.MSELoss(reduction="sum"),
        "dataset": [(torch.ones(2), torch.ones(1))] * 4,
        "optimizer": torch.optim.SGD,
    }
    return Job(**{**fields, **changes})


def metric(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).abs().sum()


@pytest.mark.parametrize(
    "changes",
    [
        {"evaluation": []},
        {"evaluation": 3},
        {"metrics": {"distance": metric}},
        {"evaluation": [1], "metrics": {"loss": metric}},
        {"evaluation": [1], "metrics": {"a distance": metric}},
        {"evaluation": [1], "metrics": {"distance": 3}},
    ],
)
def test_a_job_with_a_wrong_evaluation_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        some_job(**changes)


@pytest.mark.parametrize(
    ("change", "by"),
    [
        ('"accuracy"', '"precision"'),
        ("evaluation=Tokens(17, 3)", "evaluation=[(torch.ones(4, 7), torch.ones(4))]"),
        ('accuracy": right', 'accuracy": lambda output, targets: output'),
        ('        evaluation=Tokens(17, 3),\n        metrics={"accuracy": right},\n', ""),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_the_run(tmp_path: Path, change: str, by: str) -> None:
    config = config_of(tmp_path / "run")
    job = Path(config.job)
    assert change in JOB
    config = config.model_copy(update={"checkpoint": Checkpoint(keep_best="max accuracy")})
    job.write_text(JOB.replace(change, by))
    with pytest.raises(ConfigError):
        inspect_job(config)
