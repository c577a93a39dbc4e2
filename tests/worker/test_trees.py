"""Trees of tensors between layers: beside plain torch, in every way a backward runs, and through failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from chameleon_ft.config import Evaluation, Parallel
from chameleon_ft.data import SampleOrder
from chameleon_ft.errors import ConfigError
from chameleon_ft.job.computation import Precision
from chameleon_ft.job.job import Job
from chameleon_ft.models.checks import boundary_specs, check_evaluation, check_loss
from chameleon_ft.plan import Hop, LayerRange, Route
from chameleon_ft.plan.plan import RecomputedLayers
from chameleon_ft.schedule import Operation, OperationKind
from chameleon_ft.trees import BoundarySpec, BoundaryTree, flatten, leaves_of, structure_from_json, structure_to_json
from chameleon_ft.worker.execution.backward import SavedActivations
from chameleon_ft.worker.execution.layers import HeldLayers
from chameleon_ft.worker.inspection import boundary_of_message, boundary_to_message
from tests.golden import refused
from tests.harness import assert_trained_as_if_nothing_failed, fails, train_job
from tests.worker.plainly import built, losses_of

SAMPLES, LENGTH, IDS, WIDTH, STEPS = 96, 5, 11, 8, 6
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Pair:
    """The outputs of the encoder and the decoder, the mask of the source, and a tensor that no later layer uses."""

    source: Any
    target: Any
    is_padding: Any
    unused: Any


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(IDS, WIDTH)

    def forward(self, ids: Tensor) -> Pair:
        source = ids.chunk(2, 1)[0]
        both = self.tokens(ids)
        return Pair(*both.chunk(2, 1), is_padding=source == 0, unused=both.sum())  # type: ignore[misc]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: Pair) -> Pair:
        return replace(pair, source=pair.source + torch.tanh(self.inner(pair.source)))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: Pair) -> Pair:
        mask = ~pair.is_padding[:, None]
        found = functional.scaled_dot_product_attention(
            self.queries(pair.target), self.keys(pair.source), pair.source, attn_mask=mask
        )
        return replace(pair, target=pair.target + found)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, IDS)

    def forward(self, pair: Pair) -> dict[str, Any]:
        return {"logits": self.inner(pair.target), "more": (pair.is_padding.sum(),)}


LAYERS: list[Callable[[], nn.Module]] = [Embeddings, Encoder, Encoder, Decoder, Decoder, Head]


class Translations:
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        random = torch.Generator().manual_seed(index)
        ids = torch.randint(1, IDS, (2 * LENGTH,), generator=random)
        # No source is all padding.
        ids[1 + index % LENGTH : LENGTH] = 0
        return ids, {"next": ids[LENGTH:].roll(-1)}


def loss(output: Any, targets: Any) -> Tensor:
    return functional.cross_entropy(output["logits"].flatten(0, 1), targets["next"].flatten(), reduction="sum")


def job() -> Job:
    """The job that the runs of this file name."""
    return Job(
        layers=LAYERS,
        loss=loss,
        loss_terms=lambda targets: targets["next"].numel(),
        dataset=Translations(),
        evaluation=Translations(),
        metrics={"padding": lambda output, targets: cast(Any, output)["more"][0]},
        optimizer=partial(torch.optim.AdamW, lr=0.02),
    )


def mean_of_step(layers: list[Any], step: int) -> Tensor:
    samples = [Translations()[int(index)] for index in SampleOrder(SAMPLES, 0).ids(step, 8)]
    output = nn.Sequential(*layers)(torch.stack([ids for ids, _ in samples]))
    targets = torch.stack([each["next"] for _, each in samples])
    return functional.cross_entropy(output["logits"].flatten(0, 1), targets.flatten())


@pytest.mark.multiprocess
def test_an_encoder_and_a_decoder_train_as_in_a_plain_loop_through_failures(tmp_path: Path) -> None:
    """A stage is rerouted, and another one is lost with the loss."""
    ended = train_job(
        f"{__file__}:job",
        tmp_path / "run",
        parallel=Parallel(dp=2, pp=3),
        steps=STEPS,
        evaluation=Evaluation(every=3),
        failures=(fails(1, step=2, phase="backward"), fails(5, step=4, phase="forward")),
    )
    assert ended.lost == {1, 5}
    plain = losses_of(LAYERS, partial(torch.optim.AdamW, lr=0.02), range(STEPS), mean_of_step)
    assert [each.loss for each in ended.run.steps()] == pytest.approx(plain, rel=1e-5)
    assert_trained_as_if_nothing_failed(ended)
    assert len(ended.events("evaluation")) >= 2


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_job_with_trees_is_examined(precision: Any) -> None:
    made = replace(job(), precision=Precision(precision))
    specs = boundary_specs(made, 2)
    float_type = torch.float32 if precision == "fp32" else torch.bfloat16
    hidden = BoundarySpec((2, LENGTH, WIDTH), float_type, True)
    mask, unused = BoundarySpec((2, LENGTH), torch.bool, False), BoundarySpec((), float_type, True)
    assert [spec.leaves for spec in specs[:-1]] == [(hidden, hidden, mask, unused)] * 5
    assert [leaf.shape for leaf in specs[-1].leaves] == [(2, LENGTH, IDS), ()]
    assert specs[0].num_bytes == 2 * hidden.num_bytes + 2 * LENGTH + float_type.itemsize
    assert specs[0].returned == (0, 1, 3)
    assert boundary_specs(made, 2, device=torch.device("meta")) == specs
    check_loss(made, specs[-1], 2, device=CPU)
    check_evaluation(made, specs[-1], 2, device=CPU)
    stated = boundary_specs(replace(job(), boundaries=lambda size: [spec.unflatten(spec.leaves) for spec in specs]), 2)
    assert stated == specs


class Named(NamedTuple):
    x: Any
    y: Any


@pytest.mark.parametrize(
    "tree",
    [
        [torch.ones(1)],
        (torch.ones(1), [torch.ones(2), (torch.ones(3),)]),
        {"b": torch.ones(1), 3: {"a": torch.ones(2)}},
        Named(torch.ones(1), {"c": torch.ones(2)}),
        Pair(torch.ones(1), torch.ones(2), torch.ones(3), {"d": torch.ones(4)}),
        Pair(torch.ones(1), torch.ones(2), None, torch.ones(4)),
    ],
)
def test_a_structure_is_read_as_it_was_written(tree: Any) -> None:
    leaves, structure = flatten(tree)
    assert structure_from_json(structure_to_json(structure)) == structure
    spec = BoundaryTree(tuple(BoundarySpec(tuple(each.shape), each.dtype, False) for each in leaves), structure)
    assert boundary_of_message(boundary_to_message(spec)) == spec
    again = spec.unflatten(spec.flatten(tree, layer=0))
    assert type(again) is type(tree)


class Changing(nn.Module):
    """Returns another tree for other micro-batches."""

    def __init__(self, made: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.made = made

    def forward(self, x: Tensor) -> Any:
        return self.made(x)


@pytest.mark.parametrize(
    "later",
    [
        lambda x: {"a": x},
        lambda x: {"a": x, "b": x, "c": x},
        lambda x: (x, x),
        lambda x: x,
        lambda x: {"a": x, "b": x[:1]},
        lambda x: {"a": x, "b": x > 0},
        lambda x: {"a": x, "b": None},
    ],
    ids=["fewer", "more", "other kind", "one tensor", "other shape", "other type", "none"],
)
def test_a_layer_whose_tree_changes_is_refused(later: Callable[[Tensor], Any]) -> None:
    layers: list[Any] = [
        partial(Changing, lambda x: {"a": x, "b": x} if float(x.detach().sum()) >= 0 else later(x)),
        partial(Changing, lambda tree: cast(Any, tree)["a"]),
        partial(nn.Linear, 3, 3),
    ]
    data = [(torch.ones(3), torch.ones(3))] * 2
    changing = Job(layers=layers, loss=loss, dataset=data, optimizer=torch.optim.SGD)
    held = HeldLayers(changing, range(3), seed=0, device=CPU, boundaries=boundary_specs(changing, 2))
    run = partial(held.forward, LayerRange(0, 1), step=0, micro_batch=0)
    assert list(run(torch.ones(2, 3))) == ["a", "b"]
    with refused(ConfigError):
        run(-torch.ones(2, 3))


def test_a_class_in_a_function_is_refused() -> None:
    @dataclass
    class Local:
        x: Tensor

    layers = [partial(Changing, Local), partial(Changing, lambda local: cast(Any, local).x)]
    data = [(torch.ones(3), torch.ones(3))] * 2
    with refused(ConfigError):
        boundary_specs(Job(layers=layers, loss=loss, dataset=data, optimizer=torch.optim.SGD), 2)


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("again", [None, RecomputedLayers(2, 5), RecomputedLayers(1, 5, 2)], ids=str)
def test_gradients_are_those_of_plain_torch(split: bool, again: RecomputedLayers | None) -> None:
    """In two hops, with the tree between them."""
    inputs, targets = torch.stack([Translations()[each][0] for each in (3, 4)]), Translations()[3][1]
    targets = {"next": torch.stack([targets["next"], Translations()[4][1]["next"]])}
    plain = built(LAYERS)
    loss(nn.Sequential(*plain)(inputs), targets).backward()
    held = HeldLayers(job(), range(6), seed=0, device=CPU)
    route = Route(0, (Hop(0, LayerRange(0, 3)), Hop(1, LayerRange(3, 6))))
    saved = []
    boundary: Any = inputs
    for number in range(2):
        operation = Operation.of(OperationKind.FORWARD, route, number)
        recomputed = None if again is None else again.intersection(operation.layers)
        operation = replace(operation, recompute=recomputed)
        own = SavedActivations(held, operation, step=0, num_layers=6, fields={}, terms=lambda: 0.0)
        boundary = own.forward(boundary)
        if number == 0:
            detached = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in leaves_of(boundary)]
            boundary = Pair(*detached)
        saved.append(own)
    saved[1].end_in(loss(boundary, targets))
    gradients: Any = [None]
    halves = []
    for own in reversed(saved):
        if split:
            gradients, half = own.input_gradient(gradients)
            halves.append(half)
        else:
            gradients = own.backward(gradients)
    for half in halves:
        half()
    found = [each.grad for each in held.parameters(range(6))]
    expected = [each.grad for layer in plain for each in layer.parameters()]
    torch.testing.assert_close(found, expected)


def test_what_passes_through_and_what_is_returned_twice_get_their_gradients() -> None:
    """Also in halves, where a root is a boundary, and where two roots are of one function."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 8)

        def forward(self, pair: Any) -> Any:
            first, second = self.inner(pair[0]).chunk(2, -1)
            return [first, second, second, pair[1], pair[0]]

    layers: list[Any] = [partial(Changing, lambda x: (x, 2 * x)), Twice, nn.Identity]
    made = Job(layers=layers, loss=loss, dataset=[(torch.ones(4), torch.ones(1))], optimizer=torch.optim.SGD)
    route = Route(0, (Hop(0, LayerRange(0, 1)), Hop(1, LayerRange(1, 2)), Hop(2, LayerRange(2, 3))))
    operation = Operation.of(OperationKind.FORWARD, route, 1)
    incoming = [torch.randn(2, 4) for _ in range(5)]
    results = []
    for split in (False, True):
        held = HeldLayers(made, [1], seed=0, device=CPU)
        torch.manual_seed(0)
        boundary = [torch.randn(2, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)]
        own = SavedActivations(held, operation, step=0, num_layers=3, fields={}, terms=lambda: 0.0)
        assert all(leaf.is_leaf for leaf in own.forward(boundary))
        if split:
            gradients, half = own.input_gradient(incoming)
            half()
        else:
            gradients = own.backward(incoming)
        results.append([*gradients, *(each.grad for each in held.parameters([1]))])
    weight, bias = held.parameters([1])
    x, y = (each.detach().requires_grad_() for each in boundary)
    first, second = functional.linear(x, weight.detach(), bias.detach()).chunk(2, -1)
    torch.autograd.backward([first, second, second, y, x], incoming)
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[1][:2], [x.grad, y.grad])
