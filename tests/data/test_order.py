"""Sample order: every epoch a permutation, equal in every process and version, without state between steps."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.data import SampleOrder, read_sample
from chameleon_ft.data.samples import load_micro_batch
from chameleon_ft.errors import ConfigError
from chameleon_ft.keys import Purpose, random_key
from tests.golden import refused

TensorPair = tuple[torch.Tensor, torch.Tensor]

SEEDS = st.integers(0, 2**63 - 1)


@given(num_samples=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 10**9))
def test_an_epoch_is_a_permutation(num_samples: int, seed: int, epoch: int) -> None:
    ids = SampleOrder(num_samples, seed).ids(epoch, num_samples)

    assert sorted(ids) == list(range(num_samples))


@given(num_samples=st.integers(1, 200), seed=SEEDS, batch_size=st.integers(1, 300), steps=st.integers(1, 5))
def test_steps_run_on_from_each_other_across_epochs(num_samples: int, seed: int, batch_size: int, steps: int) -> None:
    order = SampleOrder(num_samples, seed)
    by_step = [sample for step in range(steps) for sample in order.ids(step, batch_size)]

    assert by_step == order.ids(0, batch_size * steps)
    # However the epochs fall, no sample is ever more than one turn ahead of another.
    counts = Counter(dict.fromkeys(range(num_samples), 0))
    counts.update(by_step)
    assert max(counts.values()) - min(counts.values()) <= 1


def test_frozen_examples() -> None:
    # These must never change: a resumed run would see other samples.
    assert SampleOrder(10, 0).ids(0, 10) == [3, 2, 9, 5, 0, 4, 6, 7, 8, 1]
    assert SampleOrder(64_986, 2026).ids(1_000_003, 5) == [53512, 62957, 23941, 37126, 19163]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    order = SampleOrder(1000, 0)
    first, second, other = order.ids(0, 1000), order.ids(1, 1000), SampleOrder(1000, 1).ids(0, 1000)

    # Two random permutations agree in one place on average.
    for one, another in ((first, second), (first, other), (first, list(range(1000)))):
        assert sum(a == b for a, b in zip(one, another, strict=True)) < 8


def test_every_place_of_an_epoch_is_reached_by_every_sample_alike() -> None:
    num_samples, epochs = 7, 7000
    order = SampleOrder(num_samples, 5)
    counts = Counter(
        (place, sample) for epoch in range(epochs) for place, sample in enumerate(order.ids(epoch, num_samples))
    )
    expected = epochs / num_samples
    chi_square = sum((counts[p, s] - expected) ** 2 / expected for p in range(7) for s in range(7))

    # 36 degrees of freedom: mean 36, standard deviation 8.5.
    assert chi_square < 36 + 4 * 8.5


def test_neighbours_are_torn_apart() -> None:
    ids = SampleOrder(10_000, 3).ids(0, 10_000)
    adjacent = sum(abs(a - b) == 1 for a, b in pairwise(ids))

    assert adjacent < 12  # two on average


@pytest.mark.parametrize("num_samples", [0, -1])
def test_no_samples_have_no_order(num_samples: int) -> None:
    with refused(ConfigError):
        SampleOrder(num_samples, 0)


@pytest.mark.parametrize(("step", "batch_size"), [(-1, 4), (0, 0)])
def test_a_step_that_cannot_be_is_refused(step: int, batch_size: int) -> None:
    with refused(ConfigError):
        SampleOrder(5, 0).ids(step, batch_size)


class Drawn:
    """Samples that draw from every global generator."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> TensorPair:
        drawn = torch.tensor([random.random(), np.random.standard_normal(), float(torch.randn(()))])
        return drawn, torch.tensor(index)


def drawn(index: int, *, seed: int = 0, epoch: int = 0) -> list[float]:
    numbers: list[float] = read_sample(Drawn(), index, seed=seed, epoch=epoch)[0].tolist()
    return numbers


def test_a_sample_is_one_draw_and_the_generators_go_on_as_before() -> None:
    def draw() -> list[float]:
        return [random.random(), np.random.standard_normal(), float(torch.randn(()))]

    def seed() -> None:
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        draw()  # of the pair of normal numbers that NumPy makes, the second is left

    seed()
    expected = [*draw(), *draw()]
    seed()
    got = draw()
    first = drawn(1)
    assert [*got, *draw()] == expected
    assert drawn(1) == first
    draws = [first, drawn(2), drawn(1, seed=1), drawn(1, epoch=1)]
    assert all(len({numbers[k] for numbers in draws}) == len(draws) for k in range(3))


def test_a_draw_is_seeded_as_documented() -> None:
    first = drawn(2, seed=5, epoch=1)
    key = random_key(5, Purpose.SAMPLE, 1, 2)
    random.seed(key)
    np.random.seed(key % 2**32)
    torch.manual_seed(key)
    assert first == Drawn()[2][0].tolist()


def test_a_read_inside_a_read_is_a_draw_of_its_own() -> None:
    class Nested(Drawn):
        def __getitem__(self, index: int) -> TensorPair:
            read_sample(Drawn(), index + 1, seed=7)
            return super().__getitem__(index)

    assert read_sample(Nested(), 0, seed=0)[0].tolist() == drawn(0)


def test_a_micro_batch_continues_in_the_next_epoch() -> None:
    inputs, ids = load_micro_batch(Drawn(), SampleOrder(3, 0), 2, 5)

    assert ids.tolist() == SampleOrder(3, 0).ids_at(2, 5)
    assert inputs.tolist() == [
        drawn(index, epoch=epoch) for index, epoch in zip(ids.tolist(), (0, 1, 1, 1, 2), strict=True)
    ]
