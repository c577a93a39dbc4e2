"""Measurements of layers: times, and bytes beside the tensors that autograd keeps."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from chameleon_ft.job.job import Job
from chameleon_ft.models.llama import Block
from chameleon_ft.worker.execution.micro_batches import KEPT_MICRO_BATCHES
from chameleon_ft.worker.profiling.layers import Hop, held_in_phases, measure_layers, operation_overhead_s
from tests.worker.measured_jobs import (
    BETWEEN,
    CPU,
    FLOAT,
    LLAMA,
    WIDTH,
    bytes_of,
    in_bf16,
    job_of,
    llama_job,
    on_device,
)
from tests.worker.toy import toy_job


class Mean(nn.Module):
    """Keeps nothing of its input but its shape."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=-1, keepdim=True).expand_as(x) + 0.0


def saved_by_autograd(job: Job, layer: int, *, samples: int) -> int:
    """Bytes of the storages that the graph of a layer has a hold on, its input among them, its parameters not."""
    model = on_device(job, samples=samples)
    module = job.layers[layer]()
    boundary = model.boundary_before(layer).requires_grad_()
    storages = {boundary.untyped_storage().data_ptr(): boundary.untyped_storage().nbytes()}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = module(boundary)
    others = [*module.parameters(), *module.buffers(), output]
    return sum(storages[address] for address in storages.keys() - {t.untyped_storage().data_ptr() for t in others})


def test_phases_tell_what_is_held_before_at_the_most_and_after() -> None:
    held: list[Tensor] = []

    def more() -> None:
        torch.zeros(1000)  # given back at once
        held.append(torch.zeros(100))

    phases = held_in_phases({"first": more, "second": more, "third": held.clear}, CPU)

    assert [(p.before, p.peak, p.after) for p in phases.values()] == [(0, 4000, 400), (400, 4400, 800), (800, 800, 0)]


def test_a_matrix_keeps_its_input_and_for_its_weights_the_gradient_of_its_output_too() -> None:
    linear = partial(nn.Linear, WIDTH, WIDTH, bias=False)
    matrix = WIDTH * WIDTH * FLOAT

    found = bytes_of(job_of([linear] * 3), 1)

    assert (found.param_bytes, found.gradient_bytes) == (matrix, matrix + FLOAT), "with a flag"
    assert found.optimizer_bytes == 2 * matrix + FLOAT  # two moments and a counter
    assert (found.output_bytes, found.activation_bytes, found.weight_grad_bytes) == (BETWEEN, BETWEEN, 2 * BETWEEN)
    assert found.working_bytes == matrix  # the gradient before it is added up
    assert found.sample_bytes == 0


def test_the_ends_of_a_model_keep_samples_at_hand() -> None:
    job = job_of([partial(nn.Linear, WIDTH, WIDTH)] * 3)

    first, last = bytes_of(job, 0), bytes_of(job, 2)

    assert first.sample_bytes == last.sample_bytes == KEPT_MICRO_BATCHES * 2 * BETWEEN
    assert first.activation_bytes == 0  # its input is one of the samples
    assert last.output_bytes == 0


def test_an_output_that_a_layer_keeps_itself_is_not_counted_twice() -> None:
    found = bytes_of(job_of([nn.Tanh, nn.Tanh, partial(nn.Linear, WIDTH, WIDTH)]), 1)
    assert (found.output_bytes, found.activation_bytes) == (
        BETWEEN,
        BETWEEN,
    )  # its input, which it does not need itself


def test_an_input_counts_even_if_the_layer_forgets_it() -> None:
    # A hop that begins with the layer keeps it.
    assert bytes_of(job_of([Mean, Mean, partial(nn.Linear, WIDTH, WIDTH)]), 1).activation_bytes == BETWEEN


def test_layers_without_parameters_have_no_state() -> None:
    found = bytes_of(job_of([nn.ReLU, nn.ReLU, partial(nn.Linear, WIDTH, WIDTH)]), 1)
    assert (found.param_bytes, found.gradient_bytes, found.optimizer_bytes) == (0, 0, 0)


@pytest.mark.parametrize("layer", [1, 2])
def test_a_block_keeps_what_autograd_saves(layer: int) -> None:
    job = llama_job()
    assert bytes_of(job, layer, samples=2).activation_bytes == saved_by_autograd(job, layer, samples=2)


def test_a_block_that_is_recomputed_selectively_keeps_the_outputs_of_matrices_and_of_attention() -> None:
    tokens, kv_dim = 2 * LLAMA.seq_len, LLAMA.dim // 2
    inputs = 2 * LLAMA.dim  # of both norms
    attention = 2 * LLAMA.dim + 2 * kv_dim + LLAMA.num_heads  # query, key, value, output, and a number for each row
    gate_and_up = 2 * LLAMA.ffn_dim

    for layer in (1, 2):
        found = bytes_of(llama_job(), layer, samples=2).selective_bytes
        assert found == tokens * (inputs + attention + gate_and_up) * FLOAT


@pytest.mark.parametrize("layer", [0, 3])
def test_the_ends_of_a_model_are_not_recomputed_selectively(layer: int) -> None:
    assert bytes_of(llama_job(), layer, samples=2).selective_bytes is None


def test_a_layer_that_names_no_part_is_not_recomputed_selectively() -> None:
    found = measure_layers(on_device(toy_job(3), samples=2), repeats=1, progress=lambda text: None)
    assert [cost.selective_bytes for cost in found.costs] == [None] * 3
    assert [times.selective for times in found.times] == [None] * 3


def test_buffers_count_as_parameters() -> None:
    block = Block(LLAMA)
    tensors = [*block.parameters(), *block.buffers()]
    assert bytes_of(llama_job(), 1).param_bytes == sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_every_layer_is_timed(layers: int) -> None:
    asked: list[str] = []

    found = measure_layers(on_device(toy_job(layers), samples=2), repeats=3, progress=asked.append)

    assert len(found.costs) == len(found.times) == layers == len(asked) - 1
    assert found.operation_overhead_s >= 0
    for number, (cost, times) in enumerate(zip(found.costs, found.times, strict=True)):
        assert {times.forward.count, times.backward.count, times.weight_grad.count} == {3}
        assert times.forward.median_s > 0
        assert cost.forward_s == max(0.0, times.forward.median_s - found.operation_overhead_s)
        assert cost.fused_backward_s == max(0.0, times.backward.median_s - found.operation_overhead_s)
        assert (times.input_grad.median_s == 0) == (number == 0), "the first layer sends no gradient"


@pytest.mark.parametrize("layers", [1, 2])
def test_a_model_of_few_layers_has_nothing_to_be_compared_with(layers: int) -> None:
    assert operation_overhead_s(on_device(toy_job(layers), samples=2), repeats=2) == 0.0


def test_no_operation_takes_less_than_its_fixed_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the difference of two times may be larger than either."""
    monkeypatch.setattr("chameleon_ft.worker.profiling.layers.operation_overhead_s", lambda *_, **__: 1e3)
    found = measure_layers(on_device(toy_job(3), samples=2), repeats=1, progress=lambda text: None)
    min_s = min(min(each.forward.median_s, each.backward.median_s) for each in found.times)
    assert found.operation_overhead_s == min_s
    assert any(cost.forward_s > 0 or cost.fused_backward_s for cost in found.costs)


def test_what_every_hop_costs_beside_its_layers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fused_s(hop: Hop) -> tuple[float, float]:
        layers = len(hop.layers)
        return 0.25 + 2.0 * layers, 0.25 + 3.0 * layers

    monkeypatch.setattr("chameleon_ft.worker.profiling.layers._fused_s", fused_s)
    assert operation_overhead_s(on_device(toy_job(5), samples=2), repeats=3) == pytest.approx(0.25)


def test_in_bf16_a_layer_holds_its_masters_too_and_its_parameters_do_not_move() -> None:
    full, half = (bytes_of(job, 1) for job in (llama_job(), in_bf16(llama_job())))
    norms, flags = 4 * 2 * LLAMA.dim, 4 * 9  # one flag for each parameter of a block
    matrices = full.gradient_bytes - norms - flags
    assert half.gradient_bytes == full.gradient_bytes
    assert half.optimizer_bytes - full.optimizer_bytes == matrices
    assert full.param_bytes - half.param_bytes == matrices // 2
    assert 2 * half.output_bytes == full.output_bytes
