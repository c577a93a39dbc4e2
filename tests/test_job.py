"""A job says what is wrong with it, and is found by its reference."""

from __future__ import annotations

import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from chameleon_ft.config import LLAMA_JOB, Data, LlamaConfig, RunConfig, TrainConfig
from chameleon_ft.data import SampleOrder, prepare_data
from chameleon_ft.data.samples import load_micro_batch
from chameleon_ft.errors import ConfigError
from chameleon_ft.job.job import Job
from chameleon_ft.job.reference import check_job_reference, load_job
from chameleon_ft.models.build import build_layer
from chameleon_ft.trees import BoundarySpec
from tests.golden import refused

RUN = RunConfig()


class Numbers:
    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((2,), float(index)), torch.tensor(index)


def make_job(**fields: Any) -> Job:
    given: dict[str, Any] = {
        "layers": [partial(nn.Linear, 2, 2), partial(nn.Linear, 2, 1)],
        "loss": partial(nn.functional.mse_loss, reduction="sum"),
        "dataset": Numbers(4),
        "optimizer": torch.optim.SGD,
    }
    return Job(**(given | fields))


def test_a_job_counts_one_term_for_each_sample_and_takes_layers_for_alike() -> None:
    job = make_job()

    assert job.loss_terms(torch.zeros(3, 2)) == 3
    assert job.num_layers == 2
    assert job.relative_costs == (1.0, 1.0)
    assert make_job(layer_costs=[1, 2.5]).relative_costs == (1.0, 2.5)


@pytest.mark.parametrize(
    "tied",
    [
        [((0, "weight"),)],
        [((0, "weight"), (0, "bias"))],
        [((0, "weight"), (2, "weight"))],
        [((0, "weight"), (1, "weight")), ((0, "bias"), (1, "weight"))],
    ],
)
def test_what_is_tied_is_in_different_layers_and_in_one_group(tied: Any) -> None:
    with refused(ConfigError):
        make_job(tied=tied)


def test_what_layers_share_is_found_by_these_layers() -> None:
    job = make_job(tied=[[(1, "weight"), (0, "weight")]])

    assert job.tied_with({0, 1}) == (((1, "weight"), (0, "weight")),)
    assert job.tied_with({0}) == ()


def test_a_class_is_a_factory() -> None:
    assert make_job(layers=[nn.Identity]).num_layers == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"layers": []},
        {"layers": [nn.Linear(2, 2)]},
        {"layers": [nn.Identity, None]},
        {"layers": nn.Identity},
        {"layers": nn.Sequential(nn.Identity())},
        {"loss": 1.0},
        {"loss_terms": 4},
        {"optimizer": None},
        {"optimizer": torch.optim.SGD([torch.zeros(1)])},
        {"learning_rate": 0.1},
        {"boundaries": [1]},
        {"dataset": iter([])},
        {"dataset": Numbers(0)},
        {"clip_norm": 0.0},
        {"clip_norm": float("nan")},
        {"layer_costs": [1.0]},
        {"layer_costs": 3},
        {"layer_costs": [1.0, "a"]},
        {"clip_norm": "high"},
        {"tied": 3},
        {"tied": [(0, "weight"), (1, "weight")]},
        {"layer_costs": [1.0, 0.0]},
        {"layer_costs": [1.0, float("inf")]},
    ],
)
def test_a_job_that_cannot_be_trained_says_what_to_change(fields: dict[str, Any]) -> None:
    with refused(ConfigError):
        make_job(**fields)


def test_a_boundary_has_elements() -> None:
    assert BoundarySpec((2, 3), torch.bfloat16).num_bytes == 12
    assert BoundarySpec((), torch.float32).num_bytes == 4
    with refused(ConfigError):
        BoundarySpec((2, 0), torch.float32)


JOB_FILE = """
from torch import nn
import torch
from neighbour import COUNT

class Layer(nn.Identity):
    pass

class Ones:
    def __len__(self):
        return COUNT
    def __getitem__(self, index):
        return torch.ones(1), torch.ones(1)

def job():
    from chameleon_ft import Job
    return Job(layers=[Layer], loss=nn.functional.mse_loss, dataset=Ones(), optimizer=torch.optim.SGD)

def configured(config):
    assert config.steps == 100
    return job()

def with_defaults(count=1, *, more=2):
    assert count == 1
    return job()

def wrong():
    return 3

number = 3
"""


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "neighbour", raising=False)
    (tmp_path / "neighbour.py").write_text("COUNT = 5")
    path = tmp_path / "my-model.py"
    path.write_text(JOB_FILE)
    return path


def test_a_file_is_loaded_like_a_script(job_file: Path) -> None:
    assert len(load_job(f"{job_file}:job", RUN).dataset) == 5
    assert len(load_job(str(job_file), RUN).dataset) == 5
    assert len(load_job(f"{job_file}:configured", RUN).dataset) == 5
    assert len(load_job(f"{job_file}:with_defaults", RUN).dataset) == 5


def test_a_module_is_also_looked_for_in_the_working_directory(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job_file.rename(job_file.with_name("model_in_working_directory.py"))
    monkeypatch.chdir(job_file.parent)

    assert len(load_job("model_in_working_directory:job", RUN).dataset) == 5


def test_what_a_file_defines_is_one_thing_however_often_it_is_loaded(job_file: Path) -> None:
    first, second = (load_job(f"{job_file}:job", RUN).layers[0]() for _ in range(2))

    assert type(first) is type(second)
    assert type(pickle.loads(pickle.dumps(first))) is type(first)


DRAWN_JOB = """
import random
import numpy as np
import torch
from torch import nn
from chameleon_ft import Job

EARLY = torch.randn(3)

def job():
    data = [(torch.randn(3) + EARLY, torch.tensor([random.random(), np.random.rand()])) for _ in range(4)]
    model = nn.Linear(3, 3)
    return Job(layers=[lambda: model], loss=nn.MSELoss(reduction="sum"), dataset=data, optimizer=torch.optim.SGD)
"""


def test_what_a_job_draws_itself_is_equal_in_all_processes(tmp_path: Path) -> None:
    for name in ("one", "other"):  # two files, as in two processes
        (tmp_path / f"{name}.py").write_text(DRAWN_JOB)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)

    first, again, other = (load_job(str(tmp_path / f"{name}.py"), RUN) for name in ("one", "one", "other"))

    assert torch.equal(torch.rand(2), expected), "the caller's generator goes on as it was"
    for job in (again, other):
        assert torch.equal(job.layers[0]().get_parameter("weight"), first.layers[0]().get_parameter("weight"))
        for index in range(4):
            for one, two in zip(job.dataset[index], first.dataset[index], strict=True):
                assert torch.equal(one, two)
    seeded = load_job(str(tmp_path / "one.py"), RUN.model_copy(update={"seed": 1}))
    assert not torch.equal(seeded.dataset[0][0], first.dataset[0][0])


@pytest.mark.parametrize(
    "reference",
    [
        "no_such_file.py:job",
        "__main__:job",
        "no_such_package.module:job",
        "chameleon_ft.nothing_here",
        ":job",
        ".relative:job",
        "path/to/file:job",
        "a:b:c",
    ],
)
def test_a_reference_to_nothing_is_refused(reference: str) -> None:
    for use in (check_job_reference, lambda reference: load_job(reference, RUN)):
        with refused(ConfigError):
            use(reference)


def test_what_a_package_lacks_itself_is_not_taken_for_a_wrong_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_a_package").mkdir()
    (tmp_path / "half_a_package" / "__init__.py").write_text("import what_is_not_installed")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(ModuleNotFoundError, match="what_is_not_installed"):
        load_job("half_a_package.model:job", RUN)


@pytest.mark.parametrize(
    "name",
    [
        "nothing",
        "number",
        "wrong",
    ],
)
def test_a_name_that_gives_no_job_is_refused(job_file: Path, name: str) -> None:
    with refused(ConfigError):
        load_job(f"{job_file}:{name}", RUN)


def test_a_file_that_fails_is_loaded_anew_once_it_is_repaired(job_file: Path) -> None:
    job_file.write_text("raise RuntimeError('mine')")
    with refused(RuntimeError):
        load_job(f"{job_file}:job", RUN)

    job_file.write_text(JOB_FILE + "# repaired")
    assert load_job(f"{job_file}:job", RUN).num_layers == 1


def test_checking_a_reference_imports_no_torch() -> None:
    code = (
        "import sys; from chameleon_ft.job.job import Job; from chameleon_ft.job.reference import check_job_reference;"
        f"check_job_reference({LLAMA_JOB!r}); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_job_of_the_llama(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox " * 20)
    config = TrainConfig(
        data=Data(path=str(text)),
        model=LlamaConfig(dim=16, num_heads=2, num_kv_heads=1, num_layers=2, ffn_dim=32, seq_len=8),
        output_dir=tmp_path / "run",
    )
    prepare_data(config, tmp_path / "run")
    job = load_job(config.job, config)

    assert job.num_layers == 4
    assert len(job.dataset) == 400 // 9
    assert job.loss_terms(job.dataset[0][1]) == 8
    assert job.clip_norm == config.optimizer.clip_norm
    assert job.learning_rate is not None
    assert job.learning_rate(config.optimizer.warmup_steps - 1) == config.optimizer.lr
    assert job.learning_rate(config.steps - 1) == pytest.approx(config.optimizer.min_lr)
    layers = [build_layer(job, layer, 0) for layer in range(4)]
    parameters = [p for layer in layers for p in layer.parameters()]
    assert job.optimizer(parameters).param_groups[0]["weight_decay"] == config.optimizer.weight_decay

    unclipped = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"clip_norm": 0.0})})
    assert load_job(config.job, unclipped).clip_norm is None


def test_a_job_trains_in_a_plain_loop(tmp_path: Path) -> None:
    """Everything that a loop needs is in the job: this is the one that `verify` repeats a run with, in short."""
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 200)
    config = TrainConfig(
        data=Data(path=str(text)),
        model=LlamaConfig(dim=16, num_heads=2, num_kv_heads=1, num_layers=1, ffn_dim=32, seq_len=16),
    )
    job = load_job(config.job, config)
    model = nn.Sequential(*(build_layer(job, layer, 0) for layer in range(job.num_layers)))
    optimizer = job.optimizer(list(model.parameters()))
    order = SampleOrder(len(job.dataset), 0)
    losses = []
    for step in range(30):
        inputs, targets = load_micro_batch(job.dataset, order, 4 * step, 4)
        optimizer.zero_grad()
        loss = job.loss(model(inputs), targets) / float(job.loss_terms(targets))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))

    assert losses[0] == pytest.approx(5.5, abs=0.2)  # near ln 256: it knows nothing yet
    assert losses[-1] < 4  # and now at least which letters there are
