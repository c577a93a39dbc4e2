"""The functions of a job are called once before a run, and what they return is checked."""

from __future__ import annotations

import itertools
import math
import os
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, Subset

from chameleon_ft.config import RunConfig
from chameleon_ft.data import SampleOrder
from chameleon_ft.errors import ConfigError
from chameleon_ft.job.job import Job
from chameleon_ft.models import sample_checks
from chameleon_ft.models.build import param_bytes
from chameleon_ft.models.checks import (
    boundary_specs,
    check_loss,
    check_separate_parameters,
)
from chameleon_ft.models.optimizer import state_bytes, undivided_optimizer
from chameleon_ft.models.optimizer_checks import check_learning_rate
from chameleon_ft.models.precision import loss_and_terms, terms_of
from chameleon_ft.models.sample_checks import SampleReads
from chameleon_ft.optim import scheduler
from chameleon_ft.trees import BoundarySpec, boundary_of
from chameleon_ft.worker.inspection import inspect_job
from tests.golden import refused

OUTPUT = BoundarySpec((2, 4), torch.float32)
CPU = torch.device("cpu")


def job(**changes: Any) -> Job:
    fields: dict[str, Any] = {
        "layers": [partial(nn.Linear, 4, 4)],
        "loss": partial(functional.cross_entropy, reduction="sum"),
        "dataset": [(torch.zeros(4), torch.tensor(index)) for index in range(3)],
        "optimizer": torch.optim.SGD,
    }
    return Job(**{**fields, **changes})


@pytest.mark.parametrize(
    "loss",
    [
        partial(functional.cross_entropy, reduction="none"),
        lambda output, targets: 3.0,
        lambda output, targets: functional.cross_entropy(output.detach(), targets),
        lambda output: output.sum(),
    ],
    ids=["of each term", "no tensor", "detached", "of one argument"],
)
def test_a_loss_that_trains_nothing_is_refused(loss: Callable[..., Any]) -> None:
    with refused(ConfigError):
        check_loss(job(loss=loss), OUTPUT, 2, device=CPU)


@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        (0, 0.0),
        (2.25, 2.25),
        (torch.tensor(0.75, dtype=torch.bfloat16), 0.75),
        (torch.tensor(True), 1.0),
        (np.float32(0.5), 0.5),
        (torch.tensor(2**40 + 1), 2.0**40 + 1),
    ],
)
def test_terms_are_any_number(terms: Any, expected: float) -> None:
    check_loss(job(loss_terms=lambda targets: terms), OUTPUT, 2, device=CPU)
    assert terms_of(job(loss_terms=lambda targets: terms), torch.zeros(2)) == expected


@pytest.mark.parametrize("terms", [-1, -0.25, math.nan, math.inf, "many", None, torch.ones(2), 1j])
def test_what_counts_no_terms_is_refused(terms: Any) -> None:
    with refused(ConfigError):
        check_loss(job(loss_terms=lambda targets: terms), OUTPUT, 2, device=CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_without_terms_loss_and_gradient_are_zero_whatever_the_loss(dtype: torch.dtype) -> None:
    output = torch.full((2, 4), math.inf, dtype=dtype, requires_grad=True)
    divided = job(loss=lambda output, targets: output.abs().sum() / 0, loss_terms=lambda targets: 0)
    loss, terms = loss_and_terms(divided, output, torch.zeros(2))
    loss.backward()
    assert (loss.item(), terms) == (0.0, 0.0)
    assert output.grad is not None
    assert not output.grad.any()


class _OfOutput(nn.Module):
    """A loss with a parameter and a buffer; it may count its calls."""

    def __init__(self, *, frozen: bool, counts: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()), requires_grad=not frozen)
        self.register_buffer("weight", torch.ones(4))
        self.counts, self.calls, self.last = counts, 0, torch.zeros(())

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        self.calls += self.counts
        self.last = output.detach().mean()
        return functional.cross_entropy(output * self.scale, targets, self.get_buffer("weight"), reduction="sum")


def test_a_loss_that_is_trained_itself_is_refused_however_it_is_given() -> None:
    learned = _OfOutput(frozen=False)
    given: list[Callable[..., Any]] = [learned, learned.forward, partial(learned), lambda *args: learned(*args)]
    for loss in given:
        with refused(ConfigError):
            check_loss(job(loss=loss), OUTPUT, 2, device=CPU)
    assert check_loss(job(loss=_OfOutput(frozen=True)), OUTPUT, 2, device=CPU)[1] == ()
    with refused(ConfigError):
        check_loss(job(loss=_OfOutput(frozen=True, counts=True)), OUTPUT, 2, device=CPU)


def _of_tokens(output: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction=reduction)


@pytest.mark.parametrize(
    ("loss", "loss_terms", "is_hinted"),
    [
        (partial(_of_tokens, reduction="sum"), len, True),
        (partial(_of_tokens, reduction="sum"), Tensor.numel, False),
        (partial(_of_tokens, reduction="sum"), lambda targets: (targets >= 0).sum() / 3, False),
        (lambda output, targets: _of_tokens(output, targets) * len(targets), len, False),
        (_of_tokens, len, True),
        (lambda output, targets: functional.cross_entropy(output.mT, targets, reduction="sum"), len, True),
    ],
    ids=["sum of tokens", "counted", "weighted", "means of samples", "mean", "classes second"],
)
def test_a_hint_is_given_where_the_loss_sums_other_terms_than_those_counted(
    loss: Callable[..., Tensor], loss_terms: Callable[[Tensor], Any], is_hinted: bool
) -> None:
    data = [(torch.zeros(6), torch.arange(6) % 4) for _ in range(3)]
    tokens = job(loss=loss, loss_terms=loss_terms, dataset=data)
    assert bool(check_loss(tokens, BoundarySpec((2, 6, 4), torch.float32), 2, device=CPU)[1]) is is_hinted


def test_a_mean_is_hinted_at_where_the_last_layer_returns_a_tree() -> None:
    data = [(torch.zeros(6), torch.arange(6) % 4) for _ in range(3)]
    tokens = job(loss=lambda made, targets: _of_tokens(made["scores"], targets), loss_terms=Tensor.numel, dataset=data)
    spec = BoundarySpec((2, 6, 4), torch.float32)
    assert check_loss(tokens, boundary_of({"scores": spec}, lambda leaf: leaf), 2, device=CPU)[1]


@pytest.mark.parametrize("rate", [-1.0, float("nan"), "high", None])
def test_what_is_no_learning_rate_is_refused(rate: Any) -> None:
    with refused(ConfigError):
        check_learning_rate(job(learning_rate=lambda step: rate))
    check_learning_rate(job(learning_rate=lambda step: torch.tensor(0.1)))


def test_what_is_no_optimizer_and_what_are_no_layers_is_refused() -> None:
    with refused(ConfigError):
        undivided_optimizer(job(optimizer=lambda parameters: None))
    nothing = job(layers=[partial(nn.Linear, 4, 4), lambda: None])
    for check in (param_bytes, partial(boundary_specs, micro_batch_size=2)):
        with refused(ConfigError):
            check(nothing)


def test_a_run_is_refused_for_them_before_it_starts(tmp_path: Path) -> None:
    path = tmp_path / "means.py"
    path.write_text(
        "import torch\n"
        "from torch import nn\n"
        "from chameleon_ft import Job\n"
        "def job():\n"
        "    data = [(torch.zeros(4), torch.zeros(4))]\n"
        "    loss = nn.MSELoss(reduction='none')\n"
        "    return Job(layers=[lambda: nn.Linear(4, 4)] * 2, loss=loss, dataset=data, optimizer=torch.optim.SGD)\n"
    )
    with refused(ConfigError):
        inspect_job(RunConfig(job=str(path)))


class _Shared(nn.Module):
    def __init__(self, shared: nn.Linear) -> None:
        super().__init__()
        self.shared, self.own = shared, nn.Linear(4, 4)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("is_one_factory", [False, True])
def test_a_parameter_of_two_layers_is_refused_unless_they_are_tied(is_one_factory: bool, tied: bool) -> None:
    shared = nn.Linear(4, 4)
    factories: list[Callable[[], nn.Module]] = [partial(_Shared, shared)] * 2
    if not is_one_factory:
        factories = [partial(_Shared, shared), partial(_Shared, shared)]
    names = [f"shared.{name}" for name, _ in shared.named_parameters()]
    copies = [[(0, name), (1, name)] for name in names] if tied else []
    if tied:
        check_separate_parameters(job(layers=factories, tied=copies))
    else:
        with refused(ConfigError):
            check_separate_parameters(job(layers=factories))


def test_layers_may_share_what_is_not_trained_and_a_layer_may_exist_already() -> None:
    frozen, built = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)
    check_separate_parameters(job(layers=[partial(_Shared, frozen), partial(_Shared, frozen), lambda: built]))


def test_sizes_of_a_layer_that_exists_already_leave_its_weights_alone() -> None:
    built = nn.Linear(4, 4)
    before = built.weight.detach().clone()
    state_bytes(job(layers=[lambda: built], optimizer=partial(torch.optim.AdamW, lr=1.0)))
    assert torch.equal(built.weight, before)
    assert built.weight.grad is None


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Samples with a random offset."""

    def __init__(self, offset: Callable[[int], float]) -> None:
        self._offset = offset

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((4,), float(index)) + self._offset(index), torch.tensor(float("nan"))


OWN = torch.Generator().manual_seed(0)
READS = itertools.count()


@pytest.mark.parametrize(
    "offset",
    [
        lambda index: float(torch.rand((), generator=OWN)),
        lambda index: time.perf_counter_ns() % 2**20,
        lambda index: float(next(READS)),
        lambda index: np.random.default_rng().random(),
    ],
    ids=["a generator of its own", "the clock", "a count", "fresh entropy"],
)
def test_a_data_set_that_reads_a_sample_differently_is_refused(offset: Callable[[int], float]) -> None:
    reads = SampleReads(job(dataset=Augmented(offset)), 5)
    with refused(ConfigError):
        reads.check()


def test_a_data_set_that_reads_few_samples_differently_is_refused() -> None:
    odd, generator = SampleOrder(40, 5).ids(0, 30)[-1], random.Random(0)
    reads = SampleReads(job(dataset=Augmented(lambda index: generator.random() if index == odd else 0.0)), 5)
    with refused(ConfigError):
        reads.check()


def test_samples_that_another_process_reads_otherwise_are_refused() -> None:
    facts = SampleReads(job(dataset=Augmented(float)), 5, most=1).facts
    SampleReads(job(dataset=Augmented(float)), 5).require(facts)
    others: list[Dataset[tuple[Tensor, Tensor]]] = [
        Augmented(lambda index: index + os.getpid()),
        Subset(Augmented(float), range(20)),
    ]
    for other in others:
        with pytest.raises(ConfigError):
            SampleReads(job(dataset=other), 5, most=1).require(facts)


def test_a_rate_that_depends_on_how_often_it_was_computed_is_refused() -> None:
    rates = itertools.count(1)
    with pytest.raises(ConfigError):
        check_learning_rate(job(learning_rate=lambda step: next(rates)))
    with pytest.raises(ConfigError):
        check_learning_rate(job(learning_rate=Warmup(cached=False)))
    check_learning_rate(job(learning_rate=Warmup(cached=True)))


@pytest.mark.parametrize(
    "schedule",
    [
        lambda step: -1.0,
        torch.optim.lr_scheduler.ExponentialLR,
        scheduler(torch.optim.lr_scheduler.ReduceLROnPlateau),
        scheduler(torch.optim.lr_scheduler.StepLR),
    ],
    ids=["negative", "a class", "by a loss", "without an option"],
)
def test_what_is_no_schedule_is_refused(schedule: Any) -> None:
    with refused(ConfigError):
        check_learning_rate(job(schedule=schedule))


class Warmup:
    """Rates of steps, of which it counts those that it was asked for, or keeps them."""

    def __init__(self, *, cached: bool) -> None:
        self.rates: Any = {} if cached else []

    def __call__(self, step: int) -> float:
        if isinstance(self.rates, list):
            self.rates.append(0.1)
            return float(self.rates[0])
        return float(self.rates.setdefault(step, 0.1))


@pytest.mark.parametrize(
    "offset",
    [
        lambda index: random.random(),
        lambda index: np.random.default_rng(np.random.randint(2**31)).random(),
        lambda index: float(torch.rand(())),
    ],
)
def test_a_data_set_that_draws_from_global_generators_is_accepted(offset: Callable[[int], float]) -> None:
    SampleReads(job(dataset=Augmented(offset)), 5).check()


def test_a_read_that_takes_long_before_the_run_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    told, texts = threading.Event(), list[str]()

    def tell(text: str, **_: Any) -> None:
        texts.append(text)
        told.set()

    monkeypatch.setattr(sample_checks, "_TOLD_S", 0.01)
    monkeypatch.setattr(sample_checks, "print", tell, raising=False)
    SampleReads(job(dataset=Augmented(lambda index: float(told.wait()))), 5)
    assert f"sample {SampleOrder(40, 5).ids(0, 1)[0]}," in texts[0]


class Cached(Augmented):
    """Keeps samples in one tensor: what torch counts as a change of one is then a change of all."""

    def __init__(self) -> None:
        super().__init__(lambda _: 0.0)
        self.memory = torch.zeros(len(self), 4)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.memory[index], target = super().__getitem__(index)
        return self.memory[index], target


def test_a_data_set_that_keeps_its_samples_in_one_tensor_is_accepted() -> None:
    SampleReads(job(dataset=Cached()), 5).check()
