"""Compiled layers compute what the others do, and all are compiled before training."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from chameleon_ft.config import Batch, LlamaConfig, Parallel, RunConfig
from chameleon_ft.errors import ConfigError
from chameleon_ft.job.computation import Compile
from chameleon_ft.job.job import Job
from chameleon_ft.models.checks import boundary_specs
from chameleon_ft.models.compilation import tell_of_compilations
from chameleon_ft.models.sample_checks import first_micro_batch
from chameleon_ft.plan import LayerRange, RecomputedLayers
from chameleon_ft.protocol.job_info import OperationRate
from chameleon_ft.trees import boundary_of, leaf_spec
from chameleon_ft.worker.device import require_devices
from chameleon_ft.worker.execution.compilation import compile_layers
from chameleon_ft.worker.execution.layers import HeldLayers
from chameleon_ft.worker.inspection import inspect_job
from tests.golden import refused
from tests.harness import assert_as_the_plain_loop, fails
from tests.histories import train_until
from tests.worker import test_trees
from tests.worker.test_joins import endless, joined
from tests.worker.test_recompute import JOBS, one_worker, trained
from tests.worker.toy import SEED, Mixed, Penalised, Routed, examined, toy_job

CPU = torch.device("cpu")
SIZE = 2

# Torch looks at gradients of tensors while it resumes after what it cannot compile.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]


@pytest.fixture
def compilations() -> Iterator[list[None]]:
    """Return a list that gets an item for each compilation during the test."""
    found: list[None] = []
    tell_of_compilations(lambda: found.append(None))
    yield found
    torch._dynamo.callback.callback_handler.clear()


def compiled(job: Job, shapes: Literal["static", "dynamic"] = "static", backend: str = "aot_eager") -> Job:
    """Return the job with compiled layers, which are compiled as before training."""
    job = replace(examined(job, SIZE), compile=Compile(shapes, backend))
    read = boundary_of(first_micro_batch(job, SIZE, SEED), leaf_spec)
    compile_layers(job, boundary_specs(job, SIZE), read, seed=SEED, device=CPU)
    return job


@pytest.mark.parametrize(
    ("job", "shapes"),
    [
        (JOBS["a Llama with dropout"], "static"),
        (toy_job(5, kinds=(Routed, Mixed, Penalised)), "static"),
        # Some of its gradients are rounding, whose signs count in others than SGD.
        (replace(test_trees.job(), optimizer=partial(torch.optim.SGD, lr=0.05)), "dynamic"),
    ],
    ids=["a Llama", "losses and sums of layers", "trees"],
)
def test_whatever_a_worker_does_with_a_layer_is_as_without_a_compiler_and_compiles_nothing(
    job: Job, shapes: Literal["static", "dynamic"], compilations: list[None]
) -> None:
    state = torch.get_rng_state()
    ours = compiled(job, shapes)
    assert torch.equal(torch.get_rng_state(), state)
    assert compilations
    compilations.clear()
    layers = job.num_layers
    for hops, split, recompute in (
        (1, False, None),
        (layers, True, None),
        (2, False, RecomputedLayers(0, layers)),
        (2, True, RecomputedLayers(1, layers, 2)),
    ):
        plan = one_worker(job, hops, split_backward=split, recompute=recompute)
        expected, found = trained(examined(job, SIZE), plan), trained(ours, plan)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not compilations


class Own(Mixed):
    """No other test has compiled it."""


def test_equal_layers_are_compiled_once_whatever_builds_them(compilations: list[None]) -> None:
    compiled(toy_job(3, kinds=(Own,)))
    assert compilations
    compilations.clear()
    compiled(toy_job(9, kinds=[partial(Own) for _ in range(7)]))
    assert not compilations


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_draws_the_dropout_of_a_layer_without_a_compiler(compilations: list[None]) -> None:
    ours, boundary = compiled(toy_job(3, kinds=(partial(nn.Dropout, 0.4),)), backend="inductor"), torch.randn(2, 3, 6)
    held = HeldLayers(ours, [1], seed=SEED, device=CPU)
    compilations.clear()
    found = held.forward(LayerRange(1, 2), boundary.requires_grad_(), step=3, micro_batch=1)
    assert not compilations
    without = HeldLayers(replace(ours, compile=Compile()), [1], seed=SEED, device=CPU)
    torch.testing.assert_close(found, without.forward(LayerRange(1, 2), boundary, step=3, micro_batch=1))


def _failing(graph: object, inputs: object) -> Callable[..., Any]:
    raise NotImplementedError("no such instruction")


def test_a_layer_that_does_not_compile_and_a_missing_compiler_are_refused(
    monkeypatch: pytest.MonkeyPatch, compilations: list[None]
) -> None:
    torch._dynamo.register_backend(_failing, name="failing")
    with refused(ConfigError):
        compiled(toy_job(3), backend="failing")
    with pytest.raises(ConfigError, match="inductor"):
        require_devices(RunConfig(compile="static", compile_backend="inductr"), 1)

    def missing() -> str:
        raise torch._inductor.exc.InvalidCxxCompiler

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", missing)
    with refused(ConfigError):
        require_devices(RunConfig(compile="static"), 1)
    require_devices(RunConfig(), 1)


def test_plans_and_profiles_tell_compiled_layers_from_others(tmp_path: Path) -> None:
    without = endless(tmp_path, batch=Batch(micro_batches=8, micro_batch_size=SIZE))
    config = without.model_copy(update={"compile": "dynamic", "compile_backend": "eager"})
    job = inspect_job(config)
    rates = [job.costs(each, {0: "h"}, OperationRate()).workload for each in (without, config)]
    halves = [[(layer.input_grad_s, layer.weight_grad_s) for layer in workload.layers] for workload in rates]
    assert all(weights > 0 for _, weights in halves[0])
    # The first half has all that a backward takes.
    assert halves[1] == [(inputs + weights, 0.0) for inputs, weights in halves[0]]
    assert job.profiled_as(config) != job.profiled_as(without)


@pytest.mark.multiprocess
def test_a_lost_worker_comes_back_and_no_step_compiles(tmp_path: Path) -> None:
    config = endless(
        tmp_path,
        workers=2,
        parallel=Parallel(dp=2, pp=1),
        batch=Batch(micro_batches=4, micro_batch_size=1),
        model=LlamaConfig(dim=32, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=64, seq_len=32, dropout=0.1),
        failures=(fails(1, step=2),),
        compile="static",
        compile_backend="eager",
    )
    ended = train_until(config, tmp_path / "run", joined)
    assert ended.lost == {1}
    assert_as_the_plain_loop(ended)
    logs = [path.read_text() for path in ended.run.logs.glob("worker-*.log")]
    assert len(logs) == 2
    assert not [log for log in logs if "torch compiles" in log]
