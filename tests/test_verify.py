"""The plain loop: it repeats what a hand-written loop does, and notices what it should."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from chameleon_ft.cli import main
from chameleon_ft.config import Batch, Parallel, RunConfig
from chameleon_ft.data import SampleOrder
from chameleon_ft.errors import ConfigError
from chameleon_ft.events.records import StepRecord
from chameleon_ft.job.job import Job
from chameleon_ft.keys import init_key, step_key
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.recorder import Recorder, View
from chameleon_ft.verify.plain_loop import PlainLoop, _share
from chameleon_ft.verify.verification import Verification, repeat_run
from tests.golden import message, refused
from tests.report.records import run_info

STEPS = 6
LAYERS: list[Callable[[], nn.Module]] = [partial(nn.Linear, 3, 8), partial(nn.Dropout, 0.5), partial(nn.Linear, 8, 2)]
SAMPLES = [(torch.randn(3, generator=torch.Generator().manual_seed(i)), torch.tensor(i % 2)) for i in range(10)]


def falling(step: int, *, steps: int) -> float:
    return 0.1 * (1 - step / steps)


def job(config: RunConfig) -> Job:
    """The job that the runs of these tests name."""
    return Job(
        layers=LAYERS,
        loss=nn.CrossEntropyLoss(reduction="sum"),
        dataset=SAMPLES,
        optimizer=partial(torch.optim.SGD, lr=1.0, momentum=0.9),
        learning_rate=partial(falling, steps=config.steps),
        clip_norm=0.5,
    )


def train_by_hand(config: RunConfig, *, steps_of_run: list[int]) -> list[StepRecord]:
    """Train all micro-batches of a step as one batch would be, without any code of the package but its keys."""
    layers = []
    for number, factory in enumerate(LAYERS):
        torch.manual_seed(init_key(config.seed, number))
        layers.append(factory())
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    records = []
    for step, steps in enumerate(steps_of_run):
        ids = SampleOrder(len(SAMPLES), config.seed).ids(step, config.batch.samples)
        total = torch.zeros(())
        for micro_batch in range(config.batch.micro_batches):
            size = config.batch.micro_batch_size
            chosen = [SAMPLES[i] for i in ids[micro_batch * size : (micro_batch + 1) * size]]
            hidden = torch.stack([sample for sample, _ in chosen])
            for number, layer in enumerate(model):
                torch.manual_seed(step_key(config.seed, step=step, micro_batch=micro_batch, layer=number))
                hidden = layer(hidden)
            total = total + nn.functional.cross_entropy(
                hidden, torch.stack([target for _, target in chosen]), reduction="sum"
            )
        loss = total / len(ids)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= min(1.0, 0.5 / norm.item())
        optimizer.param_groups[0]["lr"] = falling(step, steps=steps)
        optimizer.step()
        records.append(
            StepRecord(
                step=step,
                loss=loss.item(),
                grad_norm=norm.item(),
                lr=falling(step, steps=steps),
                samples=len(ids),
                tokens=len(ids),
                step_s=1.0,
                workers=4,
                generation=0,
                time=float(step),
            )
        )
    return records


@pytest.fixture
def config() -> RunConfig:
    # Three micro-batches of two samples: ten samples do not fill two steps, so epochs end within a step.
    return RunConfig(
        job=f"{__file__}:job",
        workers=1,
        parallel=Parallel(dp=1, pp=1),
        steps=STEPS,
        batch=Batch(micro_batches=3, micro_batch_size=2),
        seed=5,
    )


@pytest.fixture
def run(tmp_path: Path, config: RunConfig) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", config)


def record(run: RunDirectory, records: list[StepRecord]) -> None:
    with Recorder(run, View()) as recorder:
        for step in records:
            recorder.record(step)


def test_it_repeats_a_loop_that_is_written_by_hand(run: RunDirectory, config: RunConfig) -> None:
    record(run, train_by_hand(config, steps_of_run=[STEPS] * STEPS))
    result = Verification.of(repeat_run(run), tolerance=1e-5)
    assert result.steps == STEPS
    assert result.max_relative_loss_deviation < 1e-6
    assert result.max_relative_grad_norm_deviation is not None
    assert result.max_relative_grad_norm_deviation < 1e-5


@pytest.mark.parametrize("trained_before", [3, 5])  # the checkpoint of step 3 is resumed; that of step 5 was damaged
def test_a_run_that_was_resumed_with_more_steps_has_two_learning_rates(
    run: RunDirectory, config: RunConfig, trained_before: int
) -> None:
    before = train_by_hand(config, steps_of_run=[5] * trained_before)
    records = train_by_hand(config, steps_of_run=[5, 5, 5, *[STEPS] * (STEPS - 3)])
    with Recorder(run, View()) as recorder:
        recorder.record(dataclasses.replace(run_info(), first_step=0, steps=5))
        for step in before:
            recorder.record(dataclasses.replace(step, time=time.time()))
        recorder.record(dataclasses.replace(run_info(), first_step=trained_before, steps=STEPS))
        for step in records[3:]:
            recorder.record(dataclasses.replace(step, time=time.time()))
    assert Verification.of(repeat_run(run), tolerance=1e-5).max_relative_loss_deviation < 1e-6


def test_the_last_record_of_a_step_that_was_trained_twice_counts(run: RunDirectory, config: RunConfig) -> None:
    records = train_by_hand(config, steps_of_run=[STEPS] * STEPS)
    wrong = dataclasses.replace(records[2], loss=9.0)
    record(run, [*records[:2], wrong, records[1], *records[2:]])
    assert Verification.of(repeat_run(run), tolerance=1e-5).max_relative_loss_deviation < 1e-6


def test_a_limit_repeats_the_first_steps_only(run: RunDirectory, config: RunConfig) -> None:
    record(run, train_by_hand(config, steps_of_run=[STEPS] * STEPS))
    assert [comparison.step for comparison in repeat_run(run, limit=2)] == [0, 1]


def test_a_missing_step_is_named(run: RunDirectory, config: RunConfig) -> None:
    records = train_by_hand(config, steps_of_run=[STEPS] * STEPS)
    record(run, [*records[:2], *records[3:]])
    with refused(ConfigError):
        list(repeat_run(run))


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_damaged_line_is_named(name: str, run: RunDirectory, config: RunConfig) -> None:
    record(run, train_by_hand(config, steps_of_run=[STEPS] * STEPS))
    with (run.path / name).open("ab") as file:
        file.write(bytes(60) + b"\n")
    with refused(ConfigError):
        Verification.of(repeat_run(run), tolerance=1e-5)


def test_a_run_without_steps_cannot_be_verified(run: RunDirectory) -> None:
    with refused(ConfigError):
        Verification.of(repeat_run(run), tolerance=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_a_number_deviates_without_bound(run: RunDirectory, config: RunConfig, value: float) -> None:
    records = train_by_hand(config, steps_of_run=[STEPS] * STEPS)
    record(run, [dataclasses.replace(records[0], loss=value)])
    assert Verification.of(repeat_run(run), tolerance=1e-5).max_relative_loss_deviation == float("inf")


@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (1.001, 1)])
def test_the_command_says_whether_the_losses_agree(
    run: RunDirectory, config: RunConfig, capsys: pytest.CaptureFixture[str], factor: float, code: int
) -> None:
    records = train_by_hand(config, steps_of_run=[STEPS] * STEPS)
    record(run, [dataclasses.replace(step, loss=step.loss * factor) for step in records])
    assert main(["verify", str(run.path)]) == code
    text = capsys.readouterr().out
    assert f"{STEPS} steps repeated" in text
    assert ("OUTSIDE the tolerance of 1e-05, first in step 0" in text) == bool(code)


def test_the_command_prints_json(run: RunDirectory, config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    record(run, train_by_hand(config, steps_of_run=[STEPS] * STEPS))
    assert main(["verify", str(run.path), "--json", "--steps", "4"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert data["steps"] == 4
    assert data["max_relative_loss_deviation"] < 1e-6


def test_the_command_computes_with_the_threads_of_a_worker(
    run: RunDirectory, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(run, train_by_hand(config, steps_of_run=[STEPS] * STEPS))
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    assert main(["verify", str(run.path)]) == 0
    assert threads == [config.threads]


@pytest.mark.parametrize("tolerance", ["nan", "-1", "inf"])
def test_a_tolerance_that_says_nothing_is_refused(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], tolerance: str
) -> None:
    assert main(["verify", str(run.path), f"--tolerance={tolerance}"]) == 2
    assert "--tolerance" in capsys.readouterr().err


def test_an_error_of_the_job_names_its_line(
    tmp_path: Path, config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.py"
    path.write_text("def job():\n    raise FileNotFoundError('the weights are gone')\n")
    run = RunDirectory.create(tmp_path / "run", config.model_copy(update={"job": str(path)}))
    record(run, train_by_hand(config, steps_of_run=[STEPS] * STEPS))
    assert main(["verify", str(run.path)]) == 2
    message = capsys.readouterr().err
    assert "FileNotFoundError: the weights are gone, at " in message
    assert str(path) in message


def test_layers_are_trained_and_terms_counted_as_in_a_run(
    tmp_path: Path, config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """A factory may return a layer that is set to evaluate, and a tensor is a count, too."""
    path = tmp_path / "job.py"
    path.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "import dataclasses\n"
        "from tests import test_verify\n"
        "def job(config):\n"
        "    found = test_verify.job(config)\n"
        "    layers = [lambda layer=layer: layer().eval() for layer in found.layers]\n"
        "    return dataclasses.replace(found, layers=layers, loss_terms=lambda targets: (targets >= 0).sum())\n"
    )
    run = RunDirectory.create(tmp_path / "run", config.model_copy(update={"job": str(path)}))
    record(run, train_by_hand(config, steps_of_run=[STEPS] * STEPS))
    assert main(["verify", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["max_relative_loss_deviation"] < 1e-6


# --- a loop of the user as the judge ---------------------------------------------------------------------------------

LOOP = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from tests.test_verify import STEPS, train_by_hand

def loop(config):
    for record in train_by_hand(config, steps_of_run=[STEPS] * STEPS):
        yield record.loss, record.grad_norm

def losses(config):
    yield from (loss for loss, _ in loop(config))

def other():
    yield from [1.0] * STEPS

def short(config):
    yield from list(losses(config))[:3]

def endless(config):
    yield from losses(config)
    while True:
        yield 0.5

def undefined():
    yield float("nan")

def worded():
    yield "a loss"

def triple():
    yield 1.0, 1.0, 1.0

def failing(config):
    yield next(losses(config))
    raise KeyError("a mistake in the loop")

def returned():
    return 0.5
"""


def judge(run: RunDirectory, config: RunConfig, name: str, *flags: str) -> int:
    record(run, train_by_hand(config, steps_of_run=[STEPS] * STEPS))
    path = run.path.parent / "plain.py"
    path.write_text(LOOP)
    return main(["verify", str(run.path), "--against", f"{path}{name}", "--json", *flags])


@pytest.mark.parametrize(
    ("name", "flags", "code", "outside"),
    [
        ("", (), 0, []),
        (":losses", (), 0, []),
        (":endless", (), 0, []),
        (":other", (), 1, ["loss"]),
        (":short", ("--steps", "3"), 0, []),
    ],
)
def test_a_loop_of_the_user_is_the_judge(
    run: RunDirectory,
    config: RunConfig,
    capsys: pytest.CaptureFixture[str],
    name: str,
    flags: tuple[str, ...],
    code: int,
    outside: list[str],
) -> None:
    assert judge(run, config, name, *flags) == code
    data = json.loads(capsys.readouterr().out)
    assert data["outside"] == outside
    assert (data["max_relative_grad_norm_deviation"] is None) == bool(name)


@pytest.mark.parametrize(
    "name", [":short", ":undefined", ":worded", ":triple", ":failing", ":returned", ":absent", ".txt"]
)
def test_a_loop_that_cannot_judge_is_refused(
    run: RunDirectory, config: RunConfig, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert judge(run, config, name) == 2
    error = capsys.readouterr().err
    message(error)
    assert "Traceback" not in error


def test_a_layer_that_uses_a_tied_parameter_twice_goes_on_using_one() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight

    first, other = Twice(), Twice()
    _share(other, other.get_parameter("first.weight"), first.get_parameter("first.weight"))
    assert other.first.weight is other.second.weight is first.first.weight


def test_gradients_of_parameters_that_the_optimizer_leaves_out_are_those_of_the_step() -> None:
    made = Job(
        layers=[partial(nn.Linear, 4, 4, bias=False)] * 2,
        loss=nn.MSELoss(reduction="sum"),
        dataset=[(torch.ones(4), torch.ones(4))] * 4,
        optimizer=lambda parameters: torch.optim.SGD(parameters[1:], lr=0.0),
    )
    batch = Batch(micro_batches=1, micro_batch_size=2)
    loop = PlainLoop(RunConfig(job="mine.py", workers=1, parallel=Parallel(dp=1, pp=1), batch=batch), made)
    assert loop.run_step(0, made).grad_norm == loop.run_step(1, made).grad_norm
