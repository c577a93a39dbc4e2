"""Measurements of layers: bytes, beside the tensors that autograd keeps and the memory of a whole run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from benchmarks._worker_memory import Alone, peak_of_allocator, peak_of_storages
from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.config import Batch, LlamaConfig, RunConfig
from chameleon_ft.estimate import program_memory
from chameleon_ft.job import Job, Precision
from chameleon_ft.models.llama import Block, Embedding, Head, next_token_loss
from chameleon_ft.plan import LayerRange, Plan, RecomputedLayers, data_pipeline_plan
from chameleon_ft.runtime.execution.executor import KEPT_MICRO_BATCHES
from chameleon_ft.runtime.profiling.hops import Hop, ModelOnDevice, ResidentLayers
from chameleon_ft.runtime.profiling.layers import measure_layers, operation_overhead_s, sized_layer
from chameleon_ft.runtime.profiling.memory import held_in_phases
from chameleon_ft.schedule import CostModel, best_program, list_schedule
from chameleon_ft.workload import LayerCost, Workload
from tests.runtime.toy import toy_job
from tests.strategies import equal_costs, recomputing

CPU = torch.device("cpu")
WIDTH, ROWS, SAMPLES, FLOAT = 64, 32, 8, 4
BETWEEN = SAMPLES * ROWS * WIDTH * FLOAT
"""Bytes of what crosses between two layers of `job_of`."""
LLAMA = LlamaConfig(vocab_size=64, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, seq_len=16)


class Mean(nn.Module):
    """Keeps nothing of its input but its shape."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=-1, keepdim=True).expand_as(x) + 0.0


class Experts(nn.Module):
    """Gives each vector to the one of four experts that its router chooses, or all vectors to the first."""

    def __init__(self, *, favours_first: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        wide = 4 * WIDTH
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH)) for _ in range(4)
        )
        self.favours_first = favours_first

    def forward(self, x: Tensor) -> Tensor:
        vectors = x.flatten(0, -2)
        weights, chosen = self.router(vectors).softmax(dim=-1).max(dim=-1)
        if self.favours_first:
            chosen = torch.zeros_like(chosen)
        output = vectors
        for number, expert in enumerate(self.experts):
            places = (chosen == number).nonzero().squeeze(-1)
            if len(places):
                output = output.index_add(0, places, weights[places].unsqueeze(-1) * expert(vectors[places]))
        return output.view_as(x)


class Matrices:
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((ROWS, WIDTH), float(index)), torch.zeros(ROWS, WIDTH)


class Sentences:
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        ids = torch.arange(index, index + LLAMA.seq_len) % LLAMA.vocab_size
        return ids, ids


def square_sum(output: Tensor, target: Tensor) -> Tensor:
    # Not torch's own: its scalar keeps the memory of all the terms that it is the sum of.
    return (output - target).square().sum()


def job_of(layers: Sequence[Callable[[], nn.Module]]) -> Job:
    return Job(
        layers=layers,
        loss=square_sum,
        dataset=Matrices(),
        optimizer=partial(torch.optim.AdamW, fused=True),
    )


def llama_job() -> Job:
    block = partial(Block, LLAMA)
    return Job(
        layers=[partial(Embedding, LLAMA), block, block, partial(Head, LLAMA)],
        loss=next_token_loss,
        dataset=Sentences(),
        optimizer=partial(torch.optim.AdamW, fused=True),
    )


def on_device(job: Job, *, samples: int = SAMPLES) -> ModelOnDevice:
    return ModelOnDevice(job, RunConfig(batch=Batch(micro_batch_size=samples)), CPU)


def bytes_of(job: Job, layer: int, *, samples: int = SAMPLES) -> LayerCost:
    return sized_layer(ResidentLayers(on_device(job, samples=samples), LayerRange(layer, layer + 1)))


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
    found = bytes_of(job_of([nn.Tanh] * 3), 1)
    assert (found.output_bytes, found.activation_bytes) == (
        BETWEEN,
        BETWEEN,
    )  # its input, which it does not need itself


def test_an_input_counts_even_if_the_layer_forgets_it() -> None:
    # A hop that begins with the layer keeps it.
    assert bytes_of(job_of([Mean] * 3), 1).activation_bytes == BETWEEN


def test_layers_without_parameters_have_no_state() -> None:
    found = bytes_of(job_of([nn.ReLU] * 3), 1)
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
    monkeypatch.setattr("chameleon_ft.runtime.profiling.layers.operation_overhead_s", lambda *_, **__: 1e3)
    found = measure_layers(on_device(toy_job(3), samples=2), repeats=1, progress=lambda text: None)
    least_s = min(min(each.forward.median_s, each.backward.median_s) for each in found.times)
    assert found.operation_overhead_s == least_s
    assert any(cost.forward_s > 0 or cost.fused_backward_s for cost in found.costs)


def test_what_every_hop_costs_beside_its_layers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fused_s(hop: Hop) -> tuple[float, float]:
        layers = len(hop.layers)
        return 0.25 + 2.0 * layers, 0.25 + 3.0 * layers

    monkeypatch.setattr("chameleon_ft.runtime.profiling.layers._fused_s", fused_s)
    assert operation_overhead_s(on_device(toy_job(5), samples=2), repeats=3) == pytest.approx(0.25)


def plans(layers: int) -> list[Plan]:
    kept = [
        data_pipeline_plan(layer_costs=[1.0] * layers, dp=1, pp=pp, micro_batches=6, split_backward=split)
        for pp, split in ((1, False), (2, False), (2, True), (layers, False), (layers, True))
    ]
    # The lower half of the first worker's layers, or of the last one's.
    partly = (
        dataclasses.replace(plan, recompute={worker: RecomputedLayers(span.start, (span.start + span.stop + 1) // 2)})
        for plan in kept[:3]
        for worker, span in ((worker, plan.placement.span(worker)) for worker in (0, plan.workers[-1]))
    )
    # All layers, or all but one of each worker's that is recomputed in full.
    selectively = (
        dataclasses.replace(
            plan,
            recompute={
                worker: RecomputedLayers(span.start, span.stop, max(0, len(span) - fewer))
                for worker, span in ((worker, plan.placement.span(worker)) for worker in plan.workers)
            },
        )
        for plan in kept
        for fewer in (0, 2)
    )
    return [*kept, *(recomputing(plan, plan.workers) for plan in kept[:3]), *partly, *selectively]


def in_bf16(job: Job) -> Job:
    return dataclasses.replace(job, precision=Precision("bf16", RunConfig().fp32_modules))


def test_in_bf16_a_layer_holds_its_masters_too_and_its_parameters_do_not_move() -> None:
    full, half = (bytes_of(job, 1) for job in (llama_job(), in_bf16(llama_job())))
    norms, flags = 4 * 2 * LLAMA.dim, 4 * 9  # one flag for each parameter of a block
    matrices = full.gradient_bytes - norms - flags
    assert half.gradient_bytes == full.gradient_bytes
    assert half.optimizer_bytes - full.optimizer_bytes == matrices
    assert full.param_bytes - half.param_bytes == matrices // 2
    assert 2 * half.output_bytes == full.output_bytes


@pytest.mark.parametrize(
    "job",
    [llama_job(), job_of([partial(nn.Linear, WIDTH, WIDTH)] * 4), in_bf16(llama_job())],
    ids=["llama", "linear", "llama in bf16"],
)
def test_a_run_holds_what_is_predicted_from_its_layers(job: Job) -> None:
    model = on_device(job)
    layers = tuple(
        dataclasses.replace(bytes_of(job, layer), forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0)
        for layer in range(job.num_layers)
    )
    workers = tuple(Worker(worker, "host") for worker in range(job.num_layers))
    errors: list[float] = []
    for plan in plans(job.num_layers):
        costs = CostModel(
            Workload(layers, plan.micro_batches, SAMPLES), Cluster(workers, Link(1e-4, math.inf), Link(1e-4, math.inf))
        )
        program = best_program(plan, costs).program
        predicted = program_memory(program, plan.placement, costs.workload)
        for worker in plan.workers:
            alone = Alone(
                job=job,
                batch=Batch(micro_batches=plan.micro_batches, micro_batch_size=SAMPLES),
                boundaries=model.boundaries,
                placement=plan.placement,
                worker=worker,
                operations=program.of(worker),
            )
            held = peak_of_allocator(alone)
            how = f"{len(plan.workers)} stages, split {plan.split_backward}, recompute {bool(plan.recompute)}, {worker}"
            errors.append(predicted[worker].peak_bytes / held - 1)
            assert -0.01 <= errors[-1] <= 0.05, how
    assert sum(map(abs, errors)) / len(errors) < 0.01


@pytest.mark.parametrize("favours_first", [False, True])
@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
def test_experts_hold_no_more_than_is_predicted_whichever_tokens_they_get(split: bool, favours_first: bool) -> None:
    """Their profile is made before it is known which tokens they will get."""
    ends, profiled = partial(nn.Linear, WIDTH, WIDTH), partial(Experts)
    model = on_device(job_of([ends, profiled, profiled, ends]))
    layers = tuple(
        dataclasses.replace(bytes_of(model.job, layer), forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0)
        for layer in range(4)
    )
    trained = partial(Experts, favours_first=favours_first)
    plan = data_pipeline_plan(layer_costs=[1.0] * 4, dp=1, pp=2, micro_batches=6, split_backward=split)
    workers = tuple(Worker(worker, "host") for worker in plan.workers)
    costs = CostModel(Workload(layers, 6, SAMPLES), Cluster(workers, Link(1e-4, math.inf), Link(1e-4, math.inf)))
    program = best_program(plan, costs).program
    for worker, predicted in program_memory(program, plan.placement, costs.workload).items():
        alone = Alone(
            job=job_of([ends, trained, trained, ends]),
            batch=Batch(micro_batches=6, micro_batch_size=SAMPLES),
            boundaries=model.boundaries,
            placement=plan.placement,
            worker=worker,
            operations=program.of(worker),
        )
        assert -0.01 <= predicted.peak_bytes / peak_of_allocator(alone) - 1 <= 0.15


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
def test_what_a_worker_holds_does_not_grow_with_the_micro_batches(split: bool) -> None:
    job = job_of([partial(nn.Linear, WIDTH, WIDTH)] * 3)
    held: dict[int, list[int]] = {}
    for micro_batches in (12, 48):
        plan = data_pipeline_plan(layer_costs=[1.0] * 3, dp=1, pp=3, micro_batches=micro_batches, split_backward=split)
        program = list_schedule(plan, equal_costs(layers=3, micro_batches=micro_batches, workers=3))
        held[micro_batches] = [
            peak_of_allocator(
                Alone(
                    job=job,
                    batch=Batch(micro_batches=micro_batches, micro_batch_size=SAMPLES),
                    boundaries=on_device(job).boundaries,
                    placement=plan.placement,
                    worker=worker,
                    operations=program.of(worker),
                )
            )
            for worker in plan.workers
        ]

    assert held[48] == pytest.approx(held[12], rel=0.02)


def test_two_ways_of_counting_agree() -> None:
    job = llama_job()
    plan = data_pipeline_plan(layer_costs=[1.0] * 4, dp=1, pp=2, micro_batches=4)
    costs = CostModel(
        Workload((LayerCost("layer", 1.0, 1.0, 1.0),) * 4, 4, SAMPLES),
        Cluster((Worker(0, "host"), Worker(1, "host")), Link(0.0, math.inf), Link(0.0, math.inf)),
    )
    program = best_program(plan, costs).program
    for worker in plan.workers:
        alone = Alone(
            job=job,
            batch=Batch(micro_batches=4, micro_batch_size=SAMPLES),
            boundaries=on_device(job).boundaries,
            placement=plan.placement,
            worker=worker,
            operations=program.of(worker),
        )
        # Storages are those of tensors: what kernels take for themselves is not among them.
        assert peak_of_storages(alone) == pytest.approx(peak_of_allocator(alone), rel=0.02)
