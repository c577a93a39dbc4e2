"""bf16: layers in bfloat16, gradients and updates in float32, held to a loop that shares no code with the package."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from chameleon_ft.config import Batch, LlamaConfig, Parallel, Recovery, RunConfig
from chameleon_ft.data import SampleOrder
from chameleon_ft.job.computation import Precision
from chameleon_ft.job.job import Job
from chameleon_ft.keys import init_key, step_key
from chameleon_ft.models.build import gradient_bytes, param_bytes, tensor_bytes, tied_bytes
from chameleon_ft.models.checks import boundary_specs
from chameleon_ft.models.optimizer import state_bytes
from chameleon_ft.models.precision import cast_layer
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, RecomputedLayers, Route, data_pipeline_plan
from chameleon_ft.schedule import best_program
from chameleon_ft.sync import Segment, gradient_segments, tied_segments
from chameleon_ft.trees import BoundarySpec
from chameleon_ft.worker.communicators.base import Communicators, InFlight
from chameleon_ft.worker.execution.backward import input_gradient
from chameleon_ft.worker.execution.commit import CommitContext, Committer, ComputedStep, StateCheck, StateDiffersError
from chameleon_ft.worker.execution.executor import Executor
from chameleon_ft.worker.execution.gradients import GradientBuffers
from chameleon_ft.worker.execution.layers import HeldLayer, HeldLayers
from chameleon_ft.worker.execution.micro_batches import DatasetReads, MicroBatches
from chameleon_ft.worker.execution.reductions import Reductions
from chameleon_ft.worker.execution.steps import StepState
from chameleon_ft.worker.mover import Mover
from tests.harness import assert_trained_as_if_nothing_failed, fails, small_config, train_here
from tests.strategies import equal_costs
from tests.worker.switchboard import Line, Switchboard
from tests.worker.toy import toy_rank

WIDTH, IDS, SEED, TIME = 16, 11, 5, 6
CPU = torch.device("cpu")
BF16 = Precision("bf16", RunConfig().fp32_modules)
RATE = 0.01


class Block(nn.Module):
    """A norm, which stays in float32, a matrix, a dropout and a table that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.dropout = nn.Dropout(0.2)
        self.table: Tensor
        self.register_buffer("table", torch.linspace(0, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.dropout(torch.tanh(self.inner(self.norm(x))) * self.table + self.frozen)
        return x + change


class Ids:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(IDS, (TIME + 1,), generator=torch.Generator().manual_seed(index))
        return ids[:-1], ids[1:]


def loss(output: Tensor, targets: Tensor) -> Tensor:
    assert output.dtype == torch.float32
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")


def bf16_job(*, tied: bool = False, clip_norm: float | None = 0.5) -> Job:
    embedding, head = partial(nn.Embedding, IDS, WIDTH), partial(nn.Linear, WIDTH, IDS, bias=False)
    return Job(
        layers=[embedding, Block, Block, head],
        loss=loss,
        loss_terms=Tensor.numel,
        dataset=Ids(),
        optimizer=partial(torch.optim.AdamW, lr=RATE, weight_decay=0.1),
        clip_norm=clip_norm,
        tied=(((0, "weight"), (3, "weight")),) if tied else (),
        precision=BF16,
    )


class PlainMixedPrecision:
    """Mixed precision written out by hand: bfloat16 copies, float32 masters, sums and updates."""

    def __init__(self, factories: Sequence[Callable[[], nn.Module]], *, tied: bool, clip_norm: float | None) -> None:
        self.layers = []
        for number, factory in enumerate(factories):
            torch.manual_seed(init_key(SEED, number))
            self.layers.append(factory())
        self.clip_norm = clip_norm
        self.parameters = [p for p in nn.ModuleList(self.layers).parameters() if p.requires_grad]
        self.masters = [p.detach().clone().requires_grad_() for p in self.parameters]
        if tied:  # the first and the last layer are two rounded copies of one matrix
            self.masters[-1] = self.masters[0]
        self.sums = {master: torch.zeros_like(master) for master in self.masters}
        for layer in self.layers:
            layer.to(torch.bfloat16)
            if isinstance(layer, Block):
                layer.norm.float()
                layer.norm.forward = partial(self._norm, layer.norm)  # type: ignore[method-assign]
        self._round()
        self.optimizer = torch.optim.AdamW(list(self.sums), lr=RATE, weight_decay=0.1)

    @staticmethod
    def _norm(norm: nn.RMSNorm, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), norm.normalized_shape, norm.weight, norm.eps).to(torch.bfloat16)

    def _round(self) -> None:
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master)

    def run_step(self, step: int, batch: Batch) -> float:
        order, total, terms = SampleOrder(40, SEED).ids(step, batch.samples), 0.0, 0
        for gradient in self.sums.values():
            gradient.zero_()
        for micro_batch in range(batch.micro_batches):
            own = order[micro_batch * batch.micro_batch_size : (micro_batch + 1) * batch.micro_batch_size]
            x, targets = (torch.stack(each) for each in zip(*(Ids()[i] for i in own), strict=True))
            for number, layer in enumerate(self.layers):
                torch.manual_seed(step_key(SEED, step=step, micro_batch=micro_batch, layer=number))
                x = layer(x)
            assert x.dtype == torch.bfloat16
            value = functional.cross_entropy(x.float().flatten(0, 1), targets.flatten(), reduction="sum")
            value.backward()
            total, terms = total + value.item(), terms + targets.numel()
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                assert parameter.grad is not None
                self.sums[master] += parameter.grad.to(torch.bfloat16).float()
                parameter.grad = None
        for master, gradient in self.sums.items():
            master.grad = gradient / terms
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(list(self.sums), self.clip_norm)
        self.optimizer.step()
        self._round()
        return total / terms


MICRO_BATCHES = 4
BATCH = Batch(micro_batches=MICRO_BATCHES, micro_batch_size=2)


class Trained:
    """A worker that holds all layers, or some, and trains by a program of `hops` hops."""

    def __init__(
        self,
        job: Job,
        *,
        hops: int = 1,
        split: bool = False,
        recompute: RecomputedLayers | None = None,
        layers: LayerRange | None = None,
        communicators: Communicators | None = None,
    ) -> None:
        edges = [job.num_layers * hop // hops for hop in range(hops + 1)]
        whole = LayerRange(0, job.num_layers)
        ways = tuple(Hop(0, LayerRange(start, stop)) for start, stop in pairwise(edges))
        plan = Plan(
            Placement(job.num_layers, {0: (whole,)}),
            tuple(Route(m, ways) for m in range(MICRO_BATCHES)),
            split,
            {} if recompute is None else {0: recompute},
        )
        costs = equal_costs(layers=job.num_layers, micro_batches=MICRO_BATCHES, workers=1)
        self.operations = best_program(plan, costs).program.of(0)
        self.communicators = communicators or Line(0, Switchboard())
        self.held = HeldLayers(job, layers or whole, seed=SEED, device=CPU)
        rank = toy_rank(job, micro_batch_size=BATCH.micro_batch_size)
        shared = [(0, job.num_layers - 1)] if job.tied else []
        segments = (*gradient_segments(plan.placement), *tied_segments(plan.placement, shared))
        self.committer = Committer(
            rank=rank,
            held=self.held,
            buffers=GradientBuffers(self.held, segments),
            contributions=lambda step: MICRO_BATCHES * job.num_layers,
            committed=0,
        )
        self.executor = Executor(
            rank=rank,
            held=self.held,
            micro_batches=MicroBatches(DatasetReads(job, BATCH, seed=SEED), CPU, job),
            communicators=self.communicators,
        )

    def run_step(self, step: int) -> float:
        state = self.committer.begin()
        reductions = Reductions(self.committer.buffers, self.operations, Mover(self.communicators))
        stats = self.executor.run(state, self.operations, after=lambda count: None)
        computed = ComputedStep(stats=stats, reductions=reductions, contributions=state.contributions())
        context = CommitContext(communicators=self.communicators, members=(0,))
        vote = self.committer.commit(computed, context).vote
        return vote.loss_sum / vote.terms


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize(
    ("hops", "recompute"),
    [(1, None), (3, None), (1, RecomputedLayers(0, 4)), (2, RecomputedLayers(0, 4, 4))],
    ids=str,
)
def test_a_run_does_what_mixed_precision_written_by_hand_does(
    hops: int, recompute: RecomputedLayers | None, split: bool, tied: bool
) -> None:
    job = bf16_job(tied=tied)
    plain = PlainMixedPrecision(job.layers, tied=tied, clip_norm=job.clip_norm)
    run = Trained(job, hops=hops, split=split, recompute=recompute)
    for step in range(8):
        assert run.run_step(step) == pytest.approx(plain.run_step(step, BATCH), rel=1e-4), step


def test_the_state_has_float32_alone_and_training_resumes_from_it_to_the_same_bits() -> None:
    job = bf16_job(tied=True)
    run, resumed = Trained(job), Trained(job)
    for step in range(3):
        run.run_step(step)
    for layer in range(job.num_layers):
        state = run.held.snapshot(layer)
        types = {key: value.dtype for key, value in state.items() if key != "module/frozen" and key != "module/table"}
        assert set(types.values()) == {torch.float32}, types
        resumed.held.restore(layer, state)
    resumed.committer.committed = 3
    assert [resumed.run_step(step) for step in (3, 4)] == [run.run_step(step) for step in (3, 4)]
    for layer in range(job.num_layers):
        one, other = (each.held.compared_state_of(layer) for each in (run, resumed))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_the_sizes_are_those_of_the_tensors() -> None:
    job = bf16_job(tied=True)
    run = Trained(job)
    run.run_step(0)
    held = [HeldLayer.initial(job, layer, seed=SEED, device=CPU) for layer in range(job.num_layers)]
    assert param_bytes(job) == tuple(sum(p.nbytes for p in own.module.parameters()) for own in held)
    assert state_bytes(job) == tuple(tensor_bytes(run.held.state_of(layer)) for layer in range(job.num_layers))
    matrix = IDS * WIDTH
    assert param_bytes(job)[0] == 2 * matrix
    assert gradient_bytes(job)[0] == tied_bytes(job)[0, 3] == 4 * matrix
    assert state_bytes(job)[0] == 12 * matrix + 4
    masters = [each for own in held for name, each in own.masters.items()]
    assert run.held.master_bytes == sum(each.nbytes for each in masters)
    assert len(masters) == 1 + 2 * 2 + 1, "the norms have none"


def test_messages_and_activations_are_in_bfloat16() -> None:
    job = bf16_job()
    assert [spec.leaves[0].dtype for spec in boundary_specs(job, 2)] == [torch.bfloat16] * 4
    assert boundary_specs(job, 2, device=torch.device("meta")) == boundary_specs(job, 2)
    full = dataclasses.replace(job, precision=Precision(), loss=loss)
    assert [spec.num_bytes for spec in boundary_specs(full, 2)] == [
        2 * each.num_bytes for each in boundary_specs(job, 2)
    ]
    stated = dataclasses.replace(full, boundaries=_stated)
    assert boundary_specs(dataclasses.replace(stated, precision=BF16), 2) == boundary_specs(job, 2)


class Counting(Line):
    """A line that counts the bytes of the tensors that it sends."""

    sent_bytes = 0

    def send(self, tensor: Tensor, *, peer: int, tag: int, stands_for_bytes: int | None = None) -> InFlight:
        self.sent_bytes += tensor.nbytes
        return super().send(tensor, peer=peer, tag=tag, stands_for_bytes=stands_for_bytes)


def sent_bytes(job: Job) -> list[int]:
    """Run the forwards and backwards of a step on two stages; return the bytes that each sends to the other."""
    plan = data_pipeline_plan(layer_costs=(1.0,) * 4, dp=1, pp=2, micro_batches=MICRO_BATCHES, split_backward=False)
    program = best_program(plan, equal_costs(layers=4, micro_batches=MICRO_BATCHES, workers=2)).program
    board = Switchboard()
    lines = [Counting(worker, board) for worker in (0, 1)]

    def take_part(worker: int) -> None:
        run = Trained(job, layers=plan.placement.ranges_of(worker)[0], communicators=lines[worker])
        run.committer.buffers.zero()
        run.executor.run(StepState(0), program.of(worker), after=lambda count: None)

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(take_part, worker) for worker in (0, 1)]:
            done.result(timeout=60)
    return [line.sent_bytes for line in lines]


def test_messages_carry_half_the_bytes() -> None:
    in_bf16 = sent_bytes(bf16_job())
    assert in_bf16 == [MICRO_BATCHES * BATCH.micro_batch_size * TIME * WIDTH * 2] * 2
    assert sent_bytes(dataclasses.replace(bf16_job(), precision=Precision())) == [2 * each for each in in_bf16]


def _stated(size: int) -> Sequence[BoundarySpec]:
    return [BoundarySpec((size, TIME, width), torch.float32) for width in (WIDTH, WIDTH, WIDTH, IDS)]


@pytest.mark.parametrize("of", ["derived/inner.weight", "module/inner.weight", "optimizer/inner.weight/exp_avg"])
def test_a_bit_that_flips_in_any_tensor_of_a_layer_is_noticed(of: str) -> None:
    runs = [Trained(bf16_job()) for _ in range(2)]
    for run in runs:
        run.run_step(0)
    segments = [Segment(LayerRange(0, 4), (0, 1))]
    for flips in (False, True):
        if flips:
            runs[1].held.compared_state_of(1)[of].view(torch.int16).flatten()[3].bitwise_xor_(1)
        checks = [
            StateCheck(toy_rank(bf16_job(), worker=worker), run.held, segments, mover=Mover(run.communicators))
            for worker, run in enumerate(runs)
        ]
        for check in checks:
            check.begin()
        sums = [sum(each) for each in zip(*(check.ballot() for check in checks), strict=True)]
        if not flips:
            assert checks[0].compare(sums)
        else:
            with pytest.raises(StateDiffersError) as error:
                checks[0].compare(sums)
            assert list(error.value.checksums) == [1]


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
def test_all_gradients_of_a_micro_batch_have_the_bits_of_bfloat16_and_sums_of_them_have_no_order(split: bool) -> None:
    torch.manual_seed(1)
    layer = Block()
    cast_layer(layer, BF16, is_first=False)
    parameters = [each for each in layer.parameters() if each.requires_grad]
    found: list[list[Tensor]] = []
    for _ in range(6):
        x = torch.randn(2, TIME, WIDTH, dtype=torch.bfloat16).requires_grad_()
        output = layer(x)
        if split:
            input_gradient([(output, torch.ones_like(output))], [x], parameters)[1]()
        else:
            output.backward(torch.ones_like(output))
        gradients = [each.grad for each in parameters if each.grad is not None]
        assert len(gradients) == len(parameters)
        assert all(each.dtype == torch.float32 and torch.equal(each, each.bfloat16().float()) for each in gradients)
        found.append(gradients)
        layer.zero_grad()
    for alike in zip(*found, strict=True):
        assert torch.equal(sum(alike, torch.zeros(())), sum(reversed(alike), torch.zeros(())))


@pytest.mark.multiprocess
def test_a_run_with_shared_optimizer_state_and_ties_survives_a_loss(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        precision="bf16",
        steps=8,
        parallel=Parallel(dp=3, pp=2, optimizer_redundancy=2, split_backward=True),
        failures=(fails(1, step=3, phase="backward"),),
        recovery=Recovery(policy="chameleon"),
        model=LlamaConfig(
            dim=32, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=64, seq_len=32, tie_embeddings=True, dropout=0.1
        ),
    )
    ended = train_here(config, tmp_path / "run")
    assert ended.lost == {1}
    assert_trained_as_if_nothing_failed(ended)
