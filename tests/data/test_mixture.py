"""Mixtures: weighted, each sample once in an epoch of its source, and a function of the position alone."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.cli import main
from chameleon_ft.config import Batch, Checkpoint, Data, LlamaConfig, Parallel, TrainConfig
from chameleon_ft.data import Mixture, MixtureOrder, SampleOrder, check_data, prepare_data, sample_order
from chameleon_ft.data.samples import TokenWindows, load_micro_batch
from chameleon_ft.errors import ConfigError, DataError
from chameleon_ft.job_record import JobRecord
from chameleon_ft.models.llama import llama_job
from chameleon_ft.models.sample_checks import SampleReads
from tests.golden import refused
from tests.harness import fails, resume_here, small_config, train_here

WEIGHTS = st.one_of(st.integers(1, 100).map(Fraction), st.decimals("0.001", 50, places=3).map(Fraction))
SOURCES = st.lists(st.tuples(st.integers(1, 40), WEIGHTS), min_size=1, max_size=5)
SEEDS = st.integers(0, 2**63 - 1)


def order_of(sources: list[tuple[int, Fraction]], seed: int) -> MixtureOrder:
    return MixtureOrder(tuple(size for size, _ in sources), tuple(weight for _, weight in sources), seed)


def source_of(sources: list[tuple[int, Fraction]], index: int) -> int:
    return next(s for s in range(len(sources)) if index < sum(size for size, _ in sources[: s + 1]))


@given(sources=SOURCES, seed=SEEDS, count=st.integers(1, 400))
def test_each_sample_is_read_once_in_each_epoch_of_its_source(
    sources: list[tuple[int, Fraction]], seed: int, count: int
) -> None:
    draws = order_of(sources, seed).draws_at(0, count)

    assert max(Counter(draws).values()) == 1
    for source, (size, _) in enumerate(sources):
        epochs = [epoch for index, epoch in draws if source_of(sources, index) == source]
        # They are in order, and all but the last are complete.
        assert epochs == sorted(epochs)
        assert all(number == size for epoch, number in Counter(epochs).items() if epoch < epochs[-1])


@given(sources=SOURCES, seed=SEEDS, count=st.integers(1, 400), first=st.integers(0, 10**15))
def test_a_source_has_its_share_of_any_beginning_and_of_any_part(
    sources: list[tuple[int, Fraction]], seed: int, count: int, first: int
) -> None:
    order, total = order_of(sources, seed), sum(weight for _, weight in sources)
    for begin, slack in ((0, 1), (first, 2)):
        found = Counter(source_of(sources, index) for index in order.ids_at(begin, count))
        for source, (_, weight) in enumerate(sources):
            assert abs(found[source] - count * weight / total) < slack * (source + 1)


@given(sources=SOURCES, seed=SEEDS, first=st.integers(0, 10**12), parts=st.lists(st.integers(1, 30), max_size=6))
def test_any_part_of_the_order_is_found_by_its_position(
    sources: list[tuple[int, Fraction]], seed: int, first: int, parts: list[int]
) -> None:
    order = order_of(sources, seed)
    begins = [first + sum(parts[:number]) for number in range(len(parts))]
    by_part = [draw for begin, count in zip(begins, parts, strict=True) for draw in order.draws_at(begin, count)]

    assert by_part == order.draws_at(first, sum(parts))


def test_frozen_examples() -> None:
    # These must never change: a resumed run would see other samples.
    order = order_of([(4, Fraction(1, 2)), (3, Fraction(1, 3)), (5, Fraction(1, 6))], 7)
    assert order.draws_at(0, 12) == [
        (7, 0),
        (2, 0),
        (5, 0),
        (1, 0),
        (4, 0),
        (0, 0),
        (10, 0),
        (3, 0),
        (6, 0),
        (0, 1),
        (4, 1),
        (1, 1),
    ]
    assert order.ids(1_000_003, 4) == [5, 1, 10, 2]


def test_a_mixture_is_read_as_its_order_says() -> None:
    parts = [TokenWindows(np.arange(60, dtype=np.uint16), 4), TokenWindows(np.arange(1000, 1030, dtype=np.uint16), 4)]
    mixture = Mixture([(parts[0], 3), (parts[1], 1)])
    order = sample_order(mixture, 5)
    inputs, targets = load_micro_batch(mixture, order, 40, 16)

    assert len(mixture) == 12 + 6
    assert (inputs[:, 0] >= 1000).sum() == 4
    assert torch.equal(inputs, torch.stack([mixture[index][0] for index in order.ids_at(40, 16)]))
    assert torch.equal(inputs + 1, targets)
    with pytest.raises(IndexError):
        mixture[18]
    nested = Mixture([(parts[0], 1)])
    assert sorted(sample_order(nested, 0).ids_at(0, 12)) == list(range(12))
    assert isinstance(sample_order(parts[0], 0), SampleOrder)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_a_weight_is_positive(weight: float) -> None:
    with refused(ConfigError):
        Mixture([(TokenWindows(np.arange(60, dtype=np.uint16), 4), weight)])


def test_a_mixture_has_a_source() -> None:
    with refused(ConfigError):
        Mixture([])


def test_streams_are_not_mixed() -> None:
    with refused(ConfigError):
        Mixture([(iter([]), 1.0)])  # type: ignore[list-item]


def mixed(folder: Path, *weights: float) -> TrainConfig:
    for number in range(len(weights)):
        (np.arange(200, dtype=np.uint16) + number).tofile(folder / f"{number}.bin")
    sources = [{"path": str(folder / f"{number}.bin"), "weight": weight} for number, weight in enumerate(weights)]
    model = LlamaConfig(vocab_size=256, seq_len=4, dim=16, num_heads=2, num_kv_heads=1, ffn_dim=16, num_layers=1)
    return TrainConfig(data=Data.model_validate({"mixture": sources}), model=model, output_dir=folder / "run")


def test_a_configuration_may_mix_files_and_text(tmp_path: Path) -> None:
    config = mixed(tmp_path, 2.0, 1.0)
    text = tmp_path / "poem.txt"
    text.write_text("a poem of some length")
    sources = [*(each.model_dump() for each in config.data.mixture), {"path": str(text)}]
    config = config.model_copy(update={"data": Data.model_validate({"mixture": sources})})
    summary = check_data(config)
    assert (summary.kind, summary.num_tokens, summary.num_samples, summary.num_files) == ("mixture", 421, 84, 3)
    prepare_data(config, tmp_path / "run")
    text.unlink()
    dataset = llama_job(config).dataset
    assert isinstance(dataset, Mixture)
    assert dataset.sizes == (40, 40, 4)
    assert list(map(float, dataset.weights)) == [2, 1, 1]
    assert bytes(dataset[80][0].tolist()) == b"a po"


def test_a_source_that_has_changed_is_refused(tmp_path: Path) -> None:
    config = mixed(tmp_path, 2.0, 1.0)
    prepare_data(config, tmp_path / "run")
    (np.arange(200, dtype=np.uint16) + 50).tofile(tmp_path / "1.bin")
    with refused(DataError) as caught:
        prepare_data(config, tmp_path / "run")
    assert "1.bin" in str(caught.value)
    prepare_data(config, tmp_path / "run", may_differ=True)
    prepare_data(config, tmp_path / "run")
    fewer = config.model_copy(update={"data": Data(path=str(tmp_path / "0.bin"))})
    with refused(DataError):
        prepare_data(fewer, tmp_path / "run")


def test_other_weights_are_other_data_to_a_checkpoint(tmp_path: Path) -> None:
    def record(*weights: float) -> JobRecord:
        return JobRecord(data=SampleReads(llama_job(mixed(tmp_path, *weights)), seed=0).facts)

    assert record(2.0, 1.0).changes_to(record(2.0, 1.0)) == []
    changes = record(2.0, 1.0).changes_to(record(1.0, 1.0))
    assert [change.topic for change in changes] == ["data"]
    assert "order of samples" in changes[0].text


@pytest.mark.parametrize(
    "values",
    [
        {"path": "a.bin", "mixture": [{"path": "b.bin"}]},
        {"mixture": [{"path": "b.bin"}, {"path": "b.bin"}]},
        {"mixture": [{"path": "b.bin", "weight": 0}]},
        {"mixture": [{"weight": 1.0}]},
    ],
)
def test_a_mixture_that_says_two_things_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"mixture|path"):
        Data.model_validate(values)


@pytest.mark.multiprocess
def test_a_run_reads_its_mixture_through_a_failure_and_a_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = mixed(tmp_path, 3.0, 1.0)
    config = small_config(
        tmp_path,
        workers=2,
        steps=4,
        parallel=Parallel(dp=2, pp=1),
        batch=Batch(micro_batches=2, micro_batch_size=8),
        checkpoint=Checkpoint(every=2),
        model=config.model,
        data=config.data,
        failures=(fails(1, step=1, phase="backward"),),
    )
    ended = train_here(config, tmp_path / "run")
    assert ended.code == 0
    # The larger source ends its first epoch in step 3.
    resumed = resume_here(ended, steps=6)
    assert resumed.code == 0
    assert main(["verify", str(resumed.run.path)]) == 0
    other = ["--data.mixture", f"{tmp_path / '0.bin'}=1,{tmp_path / '1.bin'}=1"]
    capsys.readouterr()
    assert main(["train", "--resume", str(resumed.run.path), "--steps", "8", *other]) == 2
    assert "data.mixture" in capsys.readouterr().err


def test_a_mixture_may_be_given_by_a_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, part in (("a=b=x", "a=b=x"), ("a.bin=2,a.bin", "twice")):
        assert main(["train", "--data.mixture", text, "--output-dir", str(tmp_path / "run")]) == 2
        assert part in capsys.readouterr().err
