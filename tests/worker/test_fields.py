"""Fields of a micro-batch reach the layers that name them, on any worker: beside a plain loop, through failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from chameleon_ft.config import Batch, Evaluation, Parallel
from chameleon_ft.data import SampleOrder
from chameleon_ft.errors import ConfigError
from chameleon_ft.job.computation import Precision
from chameleon_ft.job.job import Job
from chameleon_ft.models.checks import boundary_specs, check_evaluation, check_loss
from chameleon_ft.models.fields import with_fields
from chameleon_ft.models.sample_checks import SampleReads, first_micro_batch
from chameleon_ft.worker.execution.layers import HeldLayers
from tests.golden import refused
from tests.harness import assert_trained_as_if_nothing_failed, fails, train_job
from tests.worker.plainly import losses_of

SAMPLES, LENGTH, IDS, WIDTH, STEPS = 96, 6, 11, 8, 6
BATCH = Batch(micro_batches=4, micro_batch_size=2)
CPU = torch.device("cpu")


class Attention(nn.Module):
    """Attends to earlier tokens of a document; `scale` is named after no field."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, document_ids: Tensor, *, importance: Tensor | None = None, scale: float = 1) -> Tensor:
        q, k, v = self.inner(x).chunk(3, -1)
        mask = (document_ids[:, :, None] == document_ids[:, None]).tril()
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        assert importance is not None
        return x + found * importance[..., None] * scale


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(LENGTH, WIDTH)

    def forward(self, x: Tensor, *, position_ids: Tensor) -> Tensor:
        added: Tensor = self.table(position_ids)
        return x + added


LAYERS: list[Callable[[], nn.Module]] = [
    partial(nn.Embedding, IDS, WIDTH),
    nn.Tanh,
    Positions,
    Attention,
    Attention,
    partial(nn.Linear, WIDTH, IDS),
]


def row(index: int) -> dict[str, Tensor]:
    """Return two packed documents, of which the last token has no target."""
    random = torch.Generator().manual_seed(index)
    ids = torch.randint(IDS, (LENGTH,), generator=random)
    first = 1 + index % (LENGTH - 1)
    documents = (torch.arange(LENGTH) >= first).long()
    return {
        "input_ids": ids,
        "document_ids": documents,
        "position_ids": torch.arange(LENGTH) - first * documents,
        "importance": torch.rand(LENGTH, generator=random),
        "attention_mask": torch.ones(LENGTH, dtype=torch.int64),
        "labels": torch.where(torch.arange(LENGTH) == first - 1, -100, ids.roll(-1)),
    }


class Rows:
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return row(index)


class Stream:
    def __iter__(self) -> Iterator[Any]:
        return map(row, range(SAMPLES))


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")


def job(*, streamed: bool = False) -> Job:
    """The job that the runs of this file name."""
    dataset: Any = Stream() if streamed else Rows()
    return Job(
        layers=LAYERS,
        loss=loss,
        loss_terms=lambda targets: (targets != -100).sum(),
        dataset=dataset,
        evaluation=Rows(),
        metrics={"right": lambda output, targets: (output.argmax(-1) == targets).sum()},
        optimizer=partial(torch.optim.AdamW, lr=0.02),
    )


@cache
def losses_of_a_plain_loop(streamed: bool) -> list[float]:
    """Train on all samples of a step at once, by a model that is called as anyone would call it."""

    def mean(layers: list[Any], step: int) -> Tensor:
        first = step * BATCH.samples
        ids = range(first, first + BATCH.samples) if streamed else SampleOrder(SAMPLES, 0).ids(step, BATCH.samples)
        rows = [row(int(index)) for index in ids]
        fields = {name: torch.stack([each[name] for each in rows]) for name in rows[0]}
        x = layers[2](layers[1](layers[0](fields["input_ids"])), position_ids=fields["position_ids"])
        for block in layers[3:5]:
            x = block(x, fields["document_ids"], importance=fields["importance"])
        return functional.cross_entropy(layers[5](x).flatten(0, 1), fields["labels"].flatten())

    return losses_of(LAYERS, partial(torch.optim.AdamW, lr=0.02), range(STEPS), mean)


@pytest.mark.multiprocess
@pytest.mark.parametrize("streamed", [False, True])
def test_fields_reach_layers_on_all_workers_through_failures(tmp_path: Path, streamed: bool) -> None:
    """A middle stage is rerouted, and the reader of the stream is lost."""
    ended = train_job(
        f"{__file__}:job",
        tmp_path / "run",
        job_arguments={"streamed": streamed},
        parallel=Parallel(dp=2, pp=3),
        steps=STEPS,
        evaluation=Evaluation(every=3),
        failures=(fails(1, step=2, phase="backward"), fails(0, step=4, phase="forward")),
    )
    assert ended.lost == {0, 1}
    assert [each.loss for each in ended.run.steps()] == pytest.approx(losses_of_a_plain_loop(streamed), rel=1e-5)
    assert_trained_as_if_nothing_failed(ended)
    assert len(ended.events("evaluation")) >= 2


def named(*layers: Callable[[], nn.Module], **changes: Any) -> Any:
    made = replace(job(), layers=layers, **changes)
    return with_fields(made, *first_micro_batch(made, 2, 0)).fields


class ByName(nn.Module):
    """Layer 0 of two fields."""

    def forward(self, document_ids: Tensor, labels: Tensor) -> Tensor:
        return document_ids + labels


class Mask(nn.Identity):
    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
        return x


class Needs(nn.Identity):
    def forward(self, x: Tensor, gender: Tensor, *, number: int = 3) -> Tensor:  # type: ignore[override]
        return x


class Nameless(nn.Module):
    def forward(self, *, input_ids: Tensor) -> Tensor:
        return input_ids


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_layers_get_the_fields_that_their_forwards_name() -> None:
    attention = ("document_ids", "importance")
    assert named(*LAYERS) == [("input_ids",), (), ("position_ids",), attention, attention, ()]
    assert named(ByName, nn.Sequential, Mask) == [("document_ids", "labels"), (), ("attention_mask",)]
    assert named(lambda: cast(nn.Module, torch.compile(Positions())))[0] == ("input_ids", "position_ids")
    stated = (("input_ids", "position_ids"), ())
    assert named(nn.Identity, nn.Identity, fields=stated) == stated


@pytest.mark.parametrize(
    ("layers", "changes"),
    [
        ((nn.Identity, Needs), {}),
        ((Nameless,), {}),
        ((nn.Identity,), {"collate": lambda rows: {"a": torch.ones(2), "b": torch.ones(2), "labels": torch.ones(2)}}),
        ((nn.Identity,), {"fields": [("input_ids", "gender")]}),
        ((nn.Identity, nn.Identity), {"fields": [("input_ids",)]}),
    ],
    ids=["no such field", "no first argument", "no input", "no such field stated", "fields of some layers"],
)
def test_what_a_micro_batch_does_not_have_is_refused(layers: Any, changes: dict[str, Any]) -> None:
    with refused(ConfigError):
        named(*layers, **changes)


def padded_at_the_beginning(rows: list[Any]) -> Any:
    return {**row(0), "attention_mask": torch.tensor([[0, 1], [1, 1]])}


def test_padding_at_the_beginning_needs_a_layer_with_the_mask() -> None:
    padded = replace(job(), layers=[nn.Identity, Mask], collate=padded_at_the_beginning)
    assert len(boundary_specs(padded, 2)) == 2
    with refused(ConfigError):
        boundary_specs(replace(padded, layers=[nn.Identity]), 2)


def test_a_job_with_fields_is_examined() -> None:
    specs = boundary_specs(job(), 2)
    assert [spec.leaves[0].shape for spec in specs] == [(2, LENGTH, WIDTH)] * 5 + [(2, LENGTH, IDS)]
    assert boundary_specs(job(), 2, device=torch.device("meta")) == specs
    check_loss(job(), specs[-1], 2, device=CPU)
    check_evaluation(job(), specs[-1], 2, device=CPU)
    reads = SampleReads(job(), 0)
    assert len(reads.facts) > 4
    reads.check()


def test_a_layer_that_changes_a_field_in_place_is_refused() -> None:
    class Shifts(nn.Identity):
        def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:  # type: ignore[override]
            return x + position_ids.add_(1)[..., None]

    with refused(ConfigError):
        boundary_specs(replace(job(), layers=[LAYERS[0], Shifts]), 2)


def test_floating_fields_have_the_precision_of_the_run() -> None:
    low = replace(job(), precision=Precision("bf16"))
    low = with_fields(low, *first_micro_batch(low, 2, 0))
    held = HeldLayers(low, [3], seed=0, device=CPU)
    fields = {name: each[None] for name, each in row(0).items()}
    seen: list[Any] = []
    module = held._layers[3].module
    module.register_forward_pre_hook(lambda _, __, fields: seen.append(fields), with_kwargs=True)
    held.forward(range(3, 4), torch.ones(1, LENGTH, WIDTH, dtype=torch.bfloat16), step=0, micro_batch=0, fields=fields)  # type: ignore[arg-type]
    assert {name: each.dtype for name, each in seen[0].items()} == {
        "document_ids": torch.int64,
        "importance": torch.bfloat16,
    }
