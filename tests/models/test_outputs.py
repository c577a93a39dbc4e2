"""The boundaries of layers are found by running them, and layers that depend on more than they may are refused."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from chameleon_ft.errors import ConfigError
from chameleon_ft.models.checks import _is_close, boundary_specs
from chameleon_ft.trees import BoundarySpec
from tests.golden import refused
from tests.models.jobs import LLAMA, Zeros, make_job


def test_boundaries_of_a_llama() -> None:
    hidden = BoundarySpec((3, 8, 16), torch.float32)

    assert boundary_specs(LLAMA, 3) == (hidden, hidden, hidden, BoundarySpec((3, 8, 50), torch.float32))
    assert hidden.num_bytes == 3 * 8 * 16 * 4


def test_boundaries_are_those_of_real_runs_for_layers_that_share_a_factory() -> None:
    class Halve(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[..., ::2]

    job = make_job([Halve, Halve, lambda: nn.Flatten(), lambda: nn.Linear(2, 5)], Zeros(1, 8))

    assert [spec.leaves[0].shape for spec in boundary_specs(job, 6)] == [(6, 1, 4), (6, 1, 2), (6, 2), (6, 5)]


def test_forward_may_create_a_tensor() -> None:
    class AddPositions(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.arange(x.shape[1])

    assert boundary_specs(make_job([AddPositions], Zeros(4)), 2) == (BoundarySpec((2, 4), torch.float32),)


class KeepPositive(nn.Module):
    """Its output has a shape that depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x > -1]


class Autocasting(nn.Module):
    """Returns bfloat16 where autocast works, which it does not on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output: Tensor = self.inner(x)
        return output


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


@pytest.mark.parametrize(
    ("layer", "spec"),
    [
        (Autocasting, BoundarySpec((2, 4), torch.bfloat16)),
        (KeepPositive, BoundarySpec((8,), torch.float32)),
        (lambda: nn.Unflatten(1, (2, 2)), BoundarySpec((2, 2, 2), torch.float32)),
    ],
)
def test_boundaries_are_those_of_a_run(layer: Callable[[], nn.Module], spec: BoundarySpec) -> None:
    assert boundary_specs(make_job([nn.Identity, layer], Zeros(4)), 2)[1] == spec


def test_autocast_is_not_seen_on_the_meta_device() -> None:
    job = make_job([Autocasting], Zeros(4))

    assert boundary_specs(job, 2, device=torch.device("meta")) == (BoundarySpec((2, 4), torch.float32),)


def test_the_type_of_one_layer_is_the_input_of_the_next() -> None:
    class Same(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    types = [spec.leaves[0].dtype for spec in boundary_specs(make_job([Same, Autocasting, Same, Same], Zeros(4)), 2)]
    assert types == [torch.float32, torch.bfloat16, torch.bfloat16, torch.bfloat16]


def test_a_layer_that_cannot_be_run_is_named_and_can_be_stated_instead() -> None:
    layers, meta = [nn.Identity, KeepPositive], torch.device("meta")
    with refused(ConfigError):
        boundary_specs(make_job(layers, Zeros(4)), 2, device=meta)

    stated = BoundarySpec((2, 4), torch.float32)
    for device in (meta, torch.device("cpu")):
        job = make_job(layers, Zeros(4), boundaries=lambda size: [stated] * size)
        assert boundary_specs(job, 2, device=device) == (stated, stated)
    with refused(ConfigError):
        boundary_specs(make_job(layers, Zeros(4), boundaries=lambda size: [stated] * 3), 2)


def test_samples_of_several_shapes_are_refused() -> None:
    class Growing(Zeros):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return torch.zeros(index + 1), torch.zeros(1)

    with refused(ConfigError):
        boundary_specs(make_job([nn.Identity], Growing()), 2)


def test_layers_that_do_not_fit_together_are_named() -> None:
    job = make_job([lambda: nn.Linear(4, 6), lambda: nn.Linear(5, 2)], Zeros(4))

    with refused(ConfigError):
        boundary_specs(job, 2)


def test_ids_that_an_embedding_does_not_have_are_named_by_their_range() -> None:
    class Ids(Zeros):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return torch.arange(3, 9), torch.zeros(1)

    with refused(ConfigError):
        boundary_specs(make_job([partial(nn.Embedding, 8, 4)], Ids()), 2)


def test_a_layer_that_returns_no_tree_of_tensors_is_refused() -> None:
    class Labelled(nn.Identity):
        def forward(self, x: Tensor) -> Any:
            return {"x": x, "kind": "text"}

    with refused(ConfigError):
        boundary_specs(make_job([Labelled], Zeros(3, 4)), 2)


class Running(nn.Module):
    """Subtracts a running mean, which it keeps in a buffer."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4), persistent=persistent)

    def forward(self, boundary: Tensor) -> Tensor:
        mean = self.get_buffer("mean")
        with torch.no_grad():
            mean.mul_(0.9).add_(boundary.mean(0), alpha=0.1)
        return (boundary - mean) * self.weight


@pytest.mark.parametrize("device", [torch.device("cpu"), torch.device("meta")], ids=str)
def test_a_layer_that_changes_its_state_in_a_forward_is_refused(device: torch.device) -> None:
    for persistent in (True, False):
        job = make_job([nn.Identity, partial(Running, persistent=persistent)], Zeros(4))
        with refused(ConfigError):
            boundary_specs(job, 2, device=device)


@pytest.mark.parametrize("device", [torch.device("cpu"), torch.device("meta")])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_that_changes_its_input_in_place_is_refused(layer: int, device: torch.device) -> None:
    layers: list[Callable[[], nn.Module]] = [nn.Identity, nn.Identity, lambda: nn.Linear(8, 8)]
    layers[layer] = InPlace
    with refused(ConfigError):
        boundary_specs(make_job(layers, Zeros(8)), 2, device=device)
    # What a layer has made itself it may change.
    layers[layer] = lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True))
    assert len(boundary_specs(make_job(layers, Zeros(8)), 2, device=device)) == 3


@pytest.mark.parametrize("sample", [torch.zeros(2), (torch.zeros(2), "a"), (torch.zeros(2),)])
def test_samples_that_are_no_pairs_of_tensors_are_refused(sample: Any) -> None:
    class Samples(Zeros):
        def __getitem__(self, index: int) -> Any:
            return sample

    with refused(ConfigError):
        boundary_specs(make_job([nn.Identity], Samples()), 2)


class Ones(Zeros):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.ones(4), torch.ones(4)


class Runs(nn.Module):
    """Calls a function with itself and its input."""

    def __init__(self, run: Callable[[Runs, Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run
        self.calls = 0
        self.seen: list[Tensor] = []
        self.iterator = itertools.count()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def _count_calls(layer: Runs, x: Tensor) -> Tensor:
    layer.calls += 1
    return x / layer.calls


def _count_in_buffer(layer: Runs, x: Tensor) -> Tensor:
    layer.get_buffer("count").add_(1)
    return x / layer.get_buffer("count")


def _replace_buffer(layer: Runs, x: Tensor) -> Tensor:
    layer.mean = layer.get_buffer("mean") * 0.9 + x.detach().mean(0)
    return x - layer.mean


def _collect(layer: Runs, x: Tensor) -> Tensor:
    layer.seen.append(x.detach())
    return x + torch.stack(layer.seen).sum(0)


@pytest.mark.parametrize(
    ("run", "name"),
    [(_count_calls, "calls"), (_count_in_buffer, "count"), (_replace_buffer, "mean"), (_collect, "seen")],
)
def test_a_layer_whose_output_depends_on_earlier_calls_is_refused(
    run: Callable[[Runs, Tensor], Tensor], name: str
) -> None:
    job = make_job([nn.Identity, partial(Runs, run)], Ones(4))
    with refused(ConfigError):
        boundary_specs(job, 2)


def _count_only(layer: Runs, x: Tensor) -> Tensor:
    layer.calls += 1
    return torch.dropout(x, 0.5, train=True)


def _keep_largest(layer: Runs, x: Tensor) -> Tensor:
    layer.mean = torch.maximum(layer.get_buffer("mean"), x.detach().amax(0))
    return x


def _advance(layer: Runs, x: Tensor) -> Tensor:
    next(layer.iterator)
    return x


CALLS = 0
EMBEDDING = partial(nn.Embedding, 3, 4, max_norm=0.1)  # scales its weights down


class CountsGlobally(nn.Module):
    calls = 0

    def __init__(self, *, in_class: bool) -> None:
        super().__init__()
        self.in_class = in_class

    def forward(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS += not self.in_class
        type(self).calls += self.in_class
        return x


@pytest.mark.parametrize(
    "layer",
    [
        *(partial(Runs, run) for run in (_count_only, _keep_largest, _advance)),
        partial(CountsGlobally, in_class=True),
        partial(CountsGlobally, in_class=False),
        EMBEDDING,
    ],
    ids=["count", "maximum", "iterator", "count of a class", "global count", "weights"],
)
def test_a_layer_that_keeps_more_than_its_last_input_is_refused_whatever_its_output(
    layer: Callable[[], nn.Module],
) -> None:
    with refused(ConfigError):
        boundary_specs(make_job([layer], Zeros(2, dtype=torch.int64) if layer is EMBEDDING else Ones(4)), 2)


def _cache(layer: Runs, x: Tensor) -> Tensor:
    layer.seen = layer.seen or [torch.ones(x.shape[1])]
    return x * layer.seen[0]


def _keep_last(layer: Runs, x: Tensor) -> Tensor:
    layer.seen = [x.detach(), y := x * 2]
    return y


@pytest.mark.parametrize("run", [_cache, _keep_last])
def test_a_layer_may_keep_a_cache_and_its_last_values(run: Callable[[Runs, Tensor], Tensor]) -> None:
    assert len(boundary_specs(make_job([nn.Identity, partial(Runs, run)], Ones(4)), 2)) == 2


GLOBAL = nn.Parameter(torch.ones(4))


class Partly(nn.Module):
    """Trains one part, and may use, list, detach or keep another one."""

    def __init__(self, *, used: bool = False, listed: bool = False, frozen: bool = False, way: str = "") -> None:
        super().__init__()
        self.one, other = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(not frozen)
        self.other, self.used, self.way = [other] if listed else nn.ModuleList([other]), used, way

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach() if self.way == "detached" else x
        y: Tensor = self.one(x)
        if self.used or (self.way == "by value" and float(x.detach().sum()) > 1e9):
            y = y + self.other[0](x)
        if self.way == "kept":
            self.loss = (y**2).mean()
        return y * GLOBAL if self.way == "global" else y


@pytest.mark.parametrize("device", [torch.device("cpu"), torch.device("meta")], ids=str)
@pytest.mark.parametrize(
    "changes",
    [{}, {"used": True, "listed": True}, *({"used": True, "way": way} for way in ("detached", "kept", "global"))],
    ids=["not used", "in a list", "no way back", "loss inside", "global"],
)
def test_what_would_not_be_trained_is_refused(changes: dict[str, Any], device: torch.device) -> None:
    if device.type == "meta" and (changes.get("listed") or changes.get("way") == "global"):
        pytest.skip("a tensor that is none of its parameters is not on that device")
    job = make_job([partial(nn.Linear, 4, 4), partial(Partly, **changes)], Zeros(4))
    with refused(ConfigError):
        boundary_specs(job, 2, device=device)


@pytest.mark.parametrize(
    "changes",
    [{"used": True}, {"frozen": True}, {"frozen": True, "used": True, "listed": True}, {"way": "by value"}],
    ids=["used", "frozen", "frozen in a list", "used by value"],
)
def test_what_is_frozen_or_used_for_some_values_is_not(changes: dict[str, Any]) -> None:
    assert len(boundary_specs(make_job([nn.Identity, partial(Partly, **changes)], Zeros(4)), 2)) == 2


def test_no_way_back_is_needed_where_nothing_is_trained_before() -> None:
    frozen = lambda: nn.Linear(4, 4).requires_grad_(False)  # noqa: E731
    assert len(boundary_specs(make_job([frozen, partial(Partly, used=True, way="detached")], Zeros(4)), 2)) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_outputs_may_differ_in_their_last_bit(dtype: torch.dtype) -> None:
    output = torch.linspace(1, 2, 9).to(dtype)
    assert _is_close(output, output * (1 + torch.finfo(dtype).eps))
    assert not _is_close(output, output / 2)


@pytest.mark.parametrize(
    ("run", "name"),
    [(lambda layer, x: x * random.random(), "random"), (lambda layer, x: x * float(np.random.rand()), "numpy.random")],
)
def test_a_layer_that_draws_from_another_generator_is_refused(run: Callable[[Runs, Tensor], Tensor], name: str) -> None:
    with refused(ConfigError):
        boundary_specs(make_job([partial(Runs, run)], Ones(4)), 2)


def test_weights_from_another_generator_are_refused_unless_they_are_always_equal() -> None:
    def drawn(*, seed: int | None) -> nn.Module:
        if seed is not None:
            np.random.seed(seed)
        layer = nn.Linear(4, 4)
        layer.weight.data.copy_(torch.tensor(np.random.randn(4, 4)))
        return layer

    with refused(ConfigError):
        boundary_specs(make_job([partial(drawn, seed=None)], Ones(4)), 2)
    assert len(boundary_specs(make_job([partial(drawn, seed=3)], Ones(4)), 2)) == 1
