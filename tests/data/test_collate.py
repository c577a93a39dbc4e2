"""Micro-batches of samples that are no pairs of tensors, by a job's function or by torch's own."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from chameleon_ft.config import Evaluation, Loading, Parallel, Recovery
from chameleon_ft.data import Buckets, SampleOrder
from chameleon_ft.data.samples import SamplesInOrder, collated, load_micro_batch
from chameleon_ft.errors import ConfigError
from chameleon_ft.job.job import Job
from chameleon_ft.models.checks import boundary_specs, check_evaluation
from chameleon_ft.models.sample_checks import SampleReads
from tests.golden import refused
from tests.harness import assert_trained_as_if_nothing_failed, fails, train_job

PLACE = (1, 5)
TEXTS = ["a b c", "b", "c d", "d a b c e"]


def tokenizer() -> Any:
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["<pad>", "<mask>", "a", "b", "c", "d", "e"])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<mask>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", mask_token="<mask>")


class Rows:
    """Rows as of `datasets`: dicts of lists of different lengths."""

    def __init__(self) -> None:
        self.tokenizer = tokenizer()

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": self.tokenizer(TEXTS[index % len(TEXTS)])["input_ids"]}


def test_dicts_of_tensors_are_collated_as_by_torch() -> None:
    samples = [{"input_ids": torch.arange(3) + each, "labels": torch.tensor(each)} for each in range(4)]
    inputs, targets = collated(samples, None, seed=0, place=PLACE)
    expected = default_collate(samples)
    assert list(inputs) == ["input_ids"]
    assert torch.equal(inputs["input_ids"], expected["input_ids"])
    assert torch.equal(targets, expected["labels"])


@pytest.mark.parametrize("masks", [False, True])
def test_data_collators_of_transformers_draw_the_same_masks_everywhere(masks: bool) -> None:
    rows = Rows()
    from transformers import DataCollatorForLanguageModeling

    collate = DataCollatorForLanguageModeling(rows.tokenizer, mlm=masks, mlm_probability=0.5)
    read = partial(load_micro_batch, rows, SampleOrder(16, 7), 6, 4, collate=collate)
    fields, targets = read()
    inputs = fields["input_ids"]
    torch.manual_seed(1)
    random.random()
    again = SamplesInOrder(rows, 7, collate).micro_batch(6, 4)
    assert torch.equal(inputs, again[0]["input_ids"])
    assert torch.equal(targets, again[1])
    assert inputs.shape == targets.shape == (4, inputs.shape[1])
    if not masks:
        ids = SampleOrder(16, 7).ids_at(6, 4)
        plain = collate([rows[index] for index in ids])
        assert torch.equal(inputs, plain["input_ids"])
        assert torch.equal(targets, plain["labels"])


def test_micro_batches_are_padded_to_the_smallest_bucket() -> None:
    rows = [{"ids": [1, 2, 3], "labels": [2, 3, 4], "weight": 0.5}, {"ids": [5], "labels": [6], "weight": 2.0}]
    buckets: Any = Buckets([2, 4, 8], padding={"ids": 9})
    found: Any = buckets(rows)
    assert found["ids"].tolist() == [[1, 2, 3, 9], [5, 9, 9, 9]]
    assert found["labels"].tolist() == [[2, 3, 4, -100], [6, -100, -100, -100]]
    assert found["weight"].tolist() == [0.5, 2.0]
    assert buckets.number_of(found) == 1
    pairs = [(torch.tensor([1.0, 2.0]), torch.tensor(number)) for number in range(4)]
    found = buckets(pairs)
    assert (found[0].shape, found[1].tolist(), buckets.number_of(found[0])) == ((4, 2), [0, 1, 2, 3], 0)
    assert buckets.only(3)(rows)["ids"].tolist() == [[1, 2, 3], [5, 9, 9]]
    assert buckets.only(2)(rows)["ids"].tolist() == [[1, 2], [5, 9]]
    with refused(ValueError):
        buckets([(torch.zeros(9), torch.tensor(0))])
    # Of lists, the first one does not tell the type.
    found = buckets([{"ids": [1, 2], "weights": [1, 1], "labels": []}, {"ids": [3], "weights": [0.5], "labels": []}])
    assert found["weights"].tolist() == [[1.0, 1.0], [0.5, 0.0]]
    found = buckets([{"ids": [], "labels": []}, {"ids": [3, 4, 5], "labels": [4, 5, 6]}])
    assert (found["ids"].dtype, found["ids"].tolist()[0], found["labels"].tolist()[0]) == (
        torch.int64,
        [9] * 4,
        [-100] * 4,
    )
    with refused(ConfigError):
        Buckets([4, 2])


@pytest.mark.parametrize(
    "rows",
    [
        [{"ids": [1], "labels": [1], "text": "a"}],
        [{"ids": [1], "labels": [1]}, {"ids": [1]}],
        [{"id": 1, "ids": [1], "labels": [1]}, {"id": 2, "ids": [1, 2], "labels": [1, 2]}],
        [(torch.zeros(1), torch.zeros(1), torch.zeros(1))],
    ],
    ids=["text", "missing field", "length of another field", "triple"],
)
def test_samples_that_have_no_bucket_are_refused(rows: Any) -> None:
    with refused(ValueError):
        Buckets([2, 4])(rows)


@pytest.mark.parametrize(
    "batch",
    [
        [torch.zeros(2)],
        {"input_ids": torch.zeros(2, 2)},
        {"input_ids": [[0, 0]], "labels": torch.zeros(2)},
        {"input_ids": torch.zeros(2, 2), "labels": ["a", "b"]},
    ],
    ids=["list", "no labels", "no tensors", "texts as labels"],
)
def test_other_results_are_refused(batch: Any) -> None:
    with refused(ConfigError):
        collated([0, 1], lambda samples: batch, seed=0, place=PLACE)


def job_of(collate: Any) -> Job:
    layers: list[Any] = [partial(torch.nn.Embedding, 7, 4), partial(torch.nn.Linear, 4, 7)]
    return Job(layers=layers, loss=torch.sub, dataset=Rows(), collate=collate, optimizer=torch.optim.AdamW)


def to_longest(samples: list[Any]) -> Any:
    rows = [torch.tensor(sample["input_ids"]) for sample in samples]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return padded, padded


def test_a_job_is_examined_with_its_collated_samples() -> None:
    job = job_of(lambda samples: [torch.nn.functional.pad(each, (0, 5))[:, :5] for each in to_longest(samples)])
    assert [spec.leaves[0].shape for spec in boundary_specs(job, 2)] == [(2, 5, 4), (2, 5, 7)]
    reads = SampleReads(job, 0)
    assert len(reads.facts) > 4
    reads.check()


def test_held_out_samples_are_collated_alike() -> None:
    job = job_of(lambda samples: [torch.nn.functional.pad(each, (0, 5))[:, :5] for each in to_longest(samples)])
    check_evaluation(replace(job, evaluation=Rows()), None, 2, device=torch.device("cpu"))


def test_micro_batches_of_several_shapes_are_refused() -> None:
    with refused(ConfigError):
        boundary_specs(job_of(to_longest), 2)


def test_samples_of_another_kind_need_a_function() -> None:
    class Words:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            return "word"

    layers = [partial(torch.nn.Embedding, 7, 4)]
    with refused(ConfigError):
        boundary_specs(Job(layers=layers, loss=torch.sub, dataset=Words(), optimizer=torch.optim.AdamW), 2)


def test_arrays_and_numbers_are_stacked_as_by_a_data_loader() -> None:
    rows = [(np.full(3, number, np.float32), number) for number in range(5)]
    inputs, targets = SamplesInOrder(rows, 3).micro_batch(1, 4)
    ids = torch.tensor(SampleOrder(5, 3).ids_at(1, 4))
    assert torch.equal(targets, ids)
    assert torch.equal(inputs, ids[:, None].float().expand(4, 3))


@pytest.mark.parametrize("odd", [0, 7])
def test_a_sample_of_another_shape_is_named(odd: int) -> None:
    rows = [(torch.zeros(2 if number == odd else 3), number) for number in range(12)]
    place = SampleOrder(12, 0).ids(0, 12).index(odd)
    with pytest.raises(ConfigError, match=rf"\bsample {odd}\b"):
        SamplesInOrder(rows, 0).micro_batch(max(place - 1, 0), 2)
    job: Any = Job(layers=[torch.nn.Identity], loss=torch.sub, dataset=rows, optimizer=torch.optim.AdamW)
    with pytest.raises(ConfigError, match=rf"\bsample {odd}\b"):
        SampleReads(job, 0).require_one_shape()


def test_a_sample_that_is_too_long_for_all_buckets_is_named_before_the_run() -> None:
    rows = [{"ids": [1] * (9 if number == 7 else 3), "labels": [0] * 3} for number in range(12)]
    job: Any = Job(
        layers=[torch.nn.Identity],
        loss=torch.sub,
        dataset=rows,
        collate=Buckets([4, 8]),
        optimizer=torch.optim.AdamW,
    )
    with pytest.raises(ValueError, match="the length 9, ") as raised:
        SampleReads(job, 0)
    assert "in sample 7" in raised.value.__notes__
    place = SampleOrder(12, 0).ids(0, 12).index(7)
    with pytest.raises(ValueError, match="the length 9, ") as raised:
        SamplesInOrder(rows, 0, job.collate).micro_batch(place, 1)
    assert "of samples 7" in raised.value.__notes__


JOB = """
from functools import partial
import torch
from torch import nn
from transformers import DataCollatorForLanguageModeling
from chameleon_ft import Job
from chameleon_ft.data import Buckets
from tests.data.test_collate import Rows

def loss(output, targets):
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")

def job():
    rows = Rows()
    return Job(
        layers=[partial(nn.Embedding, 7, 4), partial(nn.Linear, 4, 4), partial(nn.Linear, 4, 7)],
        loss=loss,
        loss_terms=lambda targets: (targets != -100).sum(),
        dataset=rows,
        evaluation=rows,
        collate=Buckets([3, 5], collate=DataCollatorForLanguageModeling(rows.tokenizer, mlm_probability=0.4)),
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )
"""


@pytest.mark.multiprocess
def test_a_run_with_a_data_collator_that_masks_at_random_in_buckets(tmp_path: Path) -> None:
    tokenizer()
    file = tmp_path / "rows.py"
    file.write_text(JOB)
    changes: dict[str, Any] = {"parallel": Parallel(dp=2, pp=3), "evaluation": Evaluation(every=3)}
    # Each loader would import transformers, too, and no plan is to change at the end.
    changes |= {"loading": Loading(processes=0), "recovery": Recovery(policy="reroute")}
    ended = train_job(file, tmp_path / "run", steps=6, failures=(fails(1, step=3, phase="backward"),), **changes)
    assert ended.lost == {1}
    assert_trained_as_if_nothing_failed(ended)
    assert [event["step"] for event in ended.events("evaluation")] == [2, 5]
