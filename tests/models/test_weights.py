"""Initial weights from safetensors files, which transformers writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from chameleon_ft import ConfigError, Job, Pieces, Weights
from chameleon_ft.job.computation import Precision
from chameleon_ft.models.build import build_layer, initial_layer
from chameleon_ft.models.llama import llama_layers, llama_weights
from chameleon_ft.models.weights import check_weights
from chameleon_ft.worker.execution.layers import HeldLayers
from tests.golden import refused
from tests.models.jobs import CONFIG, Zeros, make_job
from tests.models.transformers_llama import transformers_llama

SEED, CPU = 3, torch.device("cpu")


def llama(path: Path | None, *, is_tied: bool = False, **fields: Any) -> Job:
    tied = [[(0, "tokens.weight"), (CONFIG.num_layers + 1, "output.weight")]] if is_tied else []
    layers = llama_layers(CONFIG.model_copy(update={"dropout": 0.0}))
    return make_job(layers, Zeros(8, dtype=torch.int64), tied=tied, weights=llama_weights(CONFIG, path), **fields)


@pytest.fixture(params=[False, True], ids=["apart", "tied"])
def pretrained(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Any, Job]:
    """A model of transformers, in several files, and a job with its weights."""
    model = transformers_llama(CONFIG.model_copy(update={"tie_embeddings": request.param}))
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    return model.eval(), llama(tmp_path, is_tied=request.param)


def test_layers_have_the_weights_of_a_model_of_transformers(pretrained: tuple[Any, Job]) -> None:
    model, job = pretrained
    check_weights(job)
    ids = torch.arange(16).reshape(2, 8)
    hidden: Any = ids
    for layer in range(job.num_layers):
        hidden = initial_layer(job, layer, SEED).eval()(hidden)
    torch.testing.assert_close(hidden, model(ids).logits, rtol=1e-5, atol=1e-6)


def test_masters_have_the_bits_of_the_files_and_other_types_are_cast(tmp_path: Path) -> None:
    model = transformers_llama(CONFIG)
    model.save_pretrained(tmp_path)
    name, stored = "attention_norm.weight", dict(model.state_dict())["model.layers.0.input_layernorm.weight"]
    held = HeldLayers(llama(tmp_path, precision=Precision("bf16")), [1], seed=SEED, device=CPU)
    assert torch.equal(held.state_of(1)[f"module/{name}"], stored)
    assert torch.equal(held.compared_state_of(1)[f"derived/{name}"], stored.to(torch.bfloat16))
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    assert torch.equal(initial_layer(llama(tmp_path), 1, SEED).get_parameter(name), stored.bfloat16().float())


class Experts(nn.Module):
    """Holds two experts as one parameter, and a matrix as its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 6, 4))
        self.proj = nn.Parameter(torch.randn(3, 5))
        self.head = nn.Parameter(torch.randn(2))
        self.register_buffer("count", torch.tensor(0))


EXPERTS: Mapping[str, str | Pieces] = {
    "up": Pieces(("gate.0", "up.0", "gate.1", "up.1"), lambda each: [p for expert in each for p in expert.chunk(2)]),
    "proj": Pieces(("proj",), lambda each: [each.T]),
    "head": "score",
    "count": "count",
}


def experts(path: Path | None, names: Mapping[str, Any] = EXPERTS, **fields: Any) -> Job:
    return make_job([Experts], Zeros(4), weights=Weights(path, [names], **fields))


def stored_experts() -> dict[str, Tensor]:
    halves = {name: torch.randn(3, 4) for name in ("gate.0", "up.0", "gate.1", "up.1")}
    return {**halves, "proj": torch.randn(5, 3), "score": torch.randn(2), "count": torch.tensor(7)}


def test_a_parameter_may_be_several_tensors_of_the_files_or_transposed(tmp_path: Path) -> None:
    stored = stored_experts()
    save_file(stored, tmp_path / "model.safetensors")
    job = experts(tmp_path)
    check_weights(job)
    layer = initial_layer(job, 0, SEED)
    assert torch.equal(layer.get_parameter("up")[1], torch.cat([stored["gate.1"], stored["up.1"]]))
    assert torch.equal(layer.get_parameter("proj"), stored["proj"].T)
    assert torch.equal(layer.get_buffer("count"), torch.tensor(7))


def test_what_the_files_do_not_have_is_initialised_as_without_them(tmp_path: Path) -> None:
    stored = stored_experts()
    del stored["score"]
    save_file(stored | {"visual.proj": torch.randn(2)}, tmp_path / "weights.safetensors")
    job = experts(tmp_path / "weights.safetensors", initialized=["score"], ignored=["visual.*"])
    check_weights(job)
    layer = initial_layer(job, 0, SEED)
    assert torch.equal(layer.get_parameter("head"), build_layer(job, 0, SEED).get_parameter("head"))
    assert torch.equal(layer.get_parameter("proj"), stored["proj"].T)


def test_without_names_they_are_those_of_the_layers_which_are_not_initialised_first(tmp_path: Path) -> None:
    path = tmp_path / "all.safetensors"
    job = make_job([partial(nn.Linear, 4, 4)] * 2, Zeros(4), weights=Weights(path), built_in_full=())
    shapes = {"weight": (4, 4), "bias": (4,)}
    stored = {f"layers.{layer}.{name}": torch.randn(shape) for layer in (0, 1) for name, shape in shapes.items()}
    save_file(stored, path)
    check_weights(job)
    before = torch.default_generator.get_state()
    assert torch.equal(initial_layer(job, 1, SEED).get_parameter("bias"), stored["layers.1.bias"])
    assert torch.equal(before, torch.default_generator.get_state())


def edited(edit: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


def truncate(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-8])


def index(folder: Path, where: str = "part-2.safetensors") -> None:
    names = dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")
    text = json.dumps({"metadata": {}, "weight_map": names | {"score": where}})
    (folder / "model.safetensors.index.json").write_text(text)


def other_shard(folder: Path) -> None:
    save_file({"x": torch.ones(1)}, folder / "2.safetensors")
    index(folder, "2.safetensors")


DAMAGED: dict[str, Callable[[Path], Any]] = {
    "missing file": lambda folder: (folder / "model.safetensors").unlink(),
    "truncated": truncate,
    "no safetensors": lambda folder: (folder / "model.safetensors").write_text("{}"),
    "missing shard": index,
    "tensor not in its shard": other_shard,
    "damaged index": lambda folder: (folder / "model.safetensors.index.json").write_text("[]"),
    "missing tensor": edited(lambda tensors: tensors.pop("score")),
    "wrong shape": edited(lambda tensors: tensors.update(proj=torch.randn(3, 5))),
    "extra tensors": edited(lambda tensors: tensors.update({f"visual.{n}": torch.ones(1) for n in range(5)})),
    "quantised": edited(lambda tensors: tensors.update(score=torch.ones(2, dtype=torch.int8))),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_files_that_do_not_have_the_model_are_refused(tmp_path: Path, damage: str) -> None:
    save_file(stored_experts(), tmp_path / "model.safetensors")
    DAMAGED[damage](tmp_path)
    with refused(ConfigError):
        check_weights(experts(tmp_path))


WRONG: dict[str, Mapping[str, Any]] = {
    "parameter without a name": {name: each for name, each in EXPERTS.items() if name != "head"},
    "name of no parameter": {**EXPERTS, "haed": "score"},
    "one name for two": {**EXPERTS, "proj": "score"},
    "too few views": {**EXPERTS, "up": Pieces(("gate.0", "up.0"), lambda each: [each[0]])},
    "views of a part": {**EXPERTS, "up": Pieces(("gate.0",), lambda each: [each[0]])},
    "views that fail": {**EXPERTS, "up": Pieces(("gate.0",), lambda each: each.chunk(2, dim=7))},
}


@pytest.mark.parametrize("names", WRONG)
def test_names_that_do_not_fit_the_layers_are_refused(names: str) -> None:
    with refused(ConfigError):
        check_weights(experts(None, WRONG[names]))


GIVEN: dict[str, Any] = {"a path": "model.safetensors", "names of other layers": Weights(None, [{}, {}])}


@pytest.mark.parametrize("weights", GIVEN)
def test_a_job_refuses_other_sources(weights: str) -> None:
    layers: Sequence[Any] = [Experts]
    with refused(ConfigError):
        make_job(layers, Zeros(4), weights=GIVEN[weights])
