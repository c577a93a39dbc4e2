"""Any valid plan, run by real processes over gloo, does what one plain loop does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from chameleon_ft.config import Batch
from chameleon_ft.plan import Hop, LayerRange, Placement, Plan, RecomputedLayers, Route, data_pipeline_plan
from chameleon_ft.recovery import reroute
from chameleon_ft.schedule import Operation, best_program, check_program
from chameleon_ft.sync import Segment, gradient_rounds, gradient_segments, tied_segments
from chameleon_ft.worker.communicators.base import Membership
from chameleon_ft.worker.execution.commit import CommitContext, Committer, ComputedStep
from chameleon_ft.worker.execution.executor import Executor
from chameleon_ft.worker.execution.gradients import GradientBuffers
from chameleon_ft.worker.execution.layers import HeldLayers
from chameleon_ft.worker.execution.micro_batches import DatasetReads, MicroBatches
from chameleon_ft.worker.execution.reductions import Reductions
from chameleon_ft.worker.execution.steps import StepState
from chameleon_ft.worker.mover import Mover
from tests.examples import examples
from tests.strategies import equal_costs, plans, some_fused, some_recompute
from tests.worker.ranks import Ranks, opened
from tests.worker.toy import SEED, PlainStep, toy_job, toy_rank, train_plainly

pytestmark = pytest.mark.multiprocess

MAX_RANKS = 6
STEPS = 2
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(MAX_RANKS) as started:
        yield started


@dataclass(frozen=True)
class Task:
    """The inputs of one rank of a plan."""

    membership: Membership
    operations: tuple[Operation, ...]
    segments: tuple[Segment, ...]
    layers: int
    batch: Batch
    clip_norm: float | None
    constant_at: int | None
    late: bool
    tied: bool


class Late(Reductions):
    """Reductions that are issued at the end of the program, as far as a worker has operations."""

    def __init__(self, buffers: GradientBuffers, operations: Sequence[Operation], mover: Mover) -> None:
        super().__init__(buffers, operations, mover)
        self._last = len(operations)

    def after(self, count: int) -> None:
        if count == self._last:
            for each in range(count + 1):
                super().after(each)


def take_part(task: Task) -> list[PlainStep]:
    """Train some steps as a rank does; return the global loss and norm, and the gradients and weights held here."""
    job = toy_job(task.layers, clip_norm=task.clip_norm, constant_at=task.constant_at, tied=task.tied)
    worker = task.membership.worker
    own = (segment for segment in task.segments if worker in segment.holders and not segment.tied)
    held_layers = sorted(layer for segment in own for layer in segment.layers)
    held = HeldLayers(job, held_layers, seed=SEED, device=CPU)
    rank = toy_rank(job, worker=worker, micro_batch_size=task.batch.micro_batch_size)
    committer = Committer(
        rank=rank,
        held=held,
        buffers=GradientBuffers(held, task.segments),
        contributions=lambda step: task.batch.micro_batches * task.layers,
        committed=0,
    )
    done = []
    with ExitStack() as stack:
        communicators = stack.enter_context(opened(task.membership))
        executor = Executor(
            rank=rank,
            held=held,
            micro_batches=MicroBatches(DatasetReads(job, task.batch, seed=SEED), CPU, job),
            communicators=communicators,
        )
        kind = Late if task.late else Reductions
        reductions = stack.enter_context(kind(committer.buffers, task.operations, Mover(communicators)))
        for step in range(STEPS):
            committer.buffers.zero()
            state = StepState(step)  # held until the vote is complete
            stats = executor.run(state, task.operations, after=reductions.after)
            computed = ComputedStep(stats=stats, reductions=reductions, contributions=state.contributions())
            context = CommitContext(communicators=communicators, members=task.membership.members)
            applied = committer.commit(computed, context)
            assert applied.vote.samples == task.batch.samples
            done.append(
                PlainStep(
                    loss=applied.vote.loss_sum / applied.vote.terms,
                    auxiliary=applied.vote.auxiliary_sum / applied.vote.terms,
                    terms=applied.vote.terms,
                    grad_norm=applied.grad_norm,
                    gradients={key: gradient for key, (gradient, _) in _trained(held, held_layers).items()},
                    weights={key: weight for key, (_, weight) in _trained(held, held_layers).items()},
                )
            )
    return done


def _trained(held: HeldLayers, layers: list[int]) -> dict[tuple[int, str], tuple[Tensor, Tensor]]:
    found = {}
    for layer in layers:
        parameters = held.parameters(LayerRange(layer, layer + 1))
        for index, parameter in enumerate(parameters):
            assert parameter.grad is not None
            found[layer, str(index)] = (parameter.grad.clone(), parameter.detach().clone())
    return found


def trained(
    ranks: Ranks,
    plan: Plan,
    *,
    clip_norm: float | None = None,
    constant_at: int | None = None,
    late: bool = False,
    tied: bool = False,
) -> list[list[PlainStep]]:
    """Return the steps of every worker of a plan with workers 0, 1, 2, ..."""
    layers = plan.placement.num_layers
    batch = Batch(micro_batches=plan.micro_batches, micro_batch_size=2)
    program = best_program(
        plan, equal_costs(layers=layers, micro_batches=plan.micro_batches, workers=max(plan.workers) + 1)
    ).program
    check_program(program, plan)
    shared = [(0, layers - 1)] if tied else []
    every = (*gradient_segments(plan.placement), *tied_segments(plan.placement, shared))
    alone = (segment for segment in every if len(segment.holders) == 1)
    segments = (*gradient_rounds(plan.placement, shared).order, *alone)
    groups = dict.fromkeys(segment.holders for segment in segments if len(segment.holders) > 1)
    memberships = ranks.memberships(tuple(groups), members=plan.workers)
    tasks = [
        (Task(membership, program.of(membership.worker), segments, layers, batch, clip_norm, constant_at, late, tied),)
        for membership in memberships
    ]
    assert plan.workers == tuple(range(len(tasks))), "rank i plays worker i"
    found: list[list[PlainStep]] = ranks.run(take_part, tasks)
    return found


def assert_same_as_plain(
    ranks: Ranks,
    plan: Plan,
    *,
    clip_norm: float | None = None,
    constant_at: int | None = None,
    tied: bool = False,
) -> None:
    job = toy_job(plan.placement.num_layers, clip_norm=clip_norm, constant_at=constant_at, tied=tied)
    batch = Batch(micro_batches=plan.micro_batches, micro_batch_size=2)
    expected = train_plainly(job, batch, STEPS)
    for steps in trained(ranks, plan, clip_norm=clip_norm, constant_at=constant_at, tied=tied):
        for found, plain in zip(steps, expected, strict=True):
            assert found.loss == pytest.approx(plain.loss, rel=1e-5)
            assert found.terms == plain.terms
            assert found.grad_norm == pytest.approx(plain.grad_norm, rel=1e-5)
            by_index = _by_index(plain.gradients), _by_index(plain.weights)
            for key in found.gradients:
                torch.testing.assert_close(found.gradients[key], by_index[0][key], rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(found.weights[key], by_index[1][key], rtol=1e-4, atol=1e-4)


def _by_index(values: dict[tuple[int, str], Tensor]) -> dict[tuple[int, str], Tensor]:
    """Name the tensors of a layer by their position, as ranks do."""
    counts: dict[int, int] = {}
    named = {}
    for (layer, _), value in values.items():
        named[layer, str(counts.setdefault(layer, 0))] = value
        counts[layer] += 1
    return named


def renumbered(plan: Plan) -> Plan:
    """Return the plan with its workers renumbered 0, 1, 2, ..."""
    number = {worker: index for index, worker in enumerate(plan.workers)}
    return Plan(
        Placement(
            plan.placement.num_layers, {number[worker]: plan.placement.ranges_of(worker) for worker in plan.workers}
        ),
        tuple(
            Route(route.micro_batch, tuple(Hop(number[hop.worker], hop.layers) for hop in route.hops))
            for route in plan.routes
        ),
        plan.split_backward,
        {number[worker]: layers for worker, layers in plan.recompute.items()},
        frozenset(map(number.__getitem__, plan.fused_workers)),
    )


@settings(max_examples=examples(40), phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    plan=plans(max_micro_batches=8).flatmap(some_recompute).flatmap(some_fused),
    clip=st.booleans(),
    tied=st.booleans(),
)
def test_any_plan(ranks: Ranks, plan: Plan, clip: bool, tied: bool) -> None:
    assume(len(plan.workers) <= MAX_RANKS)
    tied = tied and plan.placement.num_layers > 1
    assert_same_as_plain(ranks, renumbered(plan), clip_norm=0.05 if clip else None, tied=tied)


def everything_at_once(*, split: bool) -> Plan:
    """Pipelines of 1, 2 and 3 stages, a worker with two ranges, detours, and a hop cut in two."""
    placement = Placement(
        6,
        {
            0: (LayerRange(0, 2), LayerRange(4, 6)),
            1: (LayerRange(2, 4),),
            2: (LayerRange(0, 3),),
            3: (LayerRange(3, 6),),
            4: (LayerRange(0, 6),),
            5: (LayerRange(1, 5),),
        },
    )

    def route(micro_batch: int, *hops: tuple[int, int, int]) -> Route:
        return Route(micro_batch, tuple(Hop(worker, LayerRange(start, stop)) for worker, start, stop in hops))

    return Plan(
        placement,
        (
            route(0, (0, 0, 2), (1, 2, 4), (0, 4, 6)),
            route(1, (2, 0, 3), (3, 3, 6)),
            route(2, (4, 0, 6)),
            route(3, (4, 0, 1), (5, 1, 5), (3, 5, 6)),
            route(4, (0, 0, 1), (0, 1, 2), (5, 2, 3), (3, 3, 4), (5, 4, 5), (4, 5, 6)),
            route(5, (2, 0, 3), (3, 3, 6)),
            route(6, (0, 0, 2), (1, 2, 4), (3, 4, 6)),
        ),
        split,
    )


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_plan_with_everything_at_once(ranks: Ranks, split: bool, tied: bool) -> None:
    assert_same_as_plain(ranks, everything_at_once(split=split), clip_norm=0.1, tied=tied)


@pytest.mark.parametrize("split", [False, True])
def test_reducing_beside_the_backward_changes_no_bit(ranks: Ranks, split: bool) -> None:
    plan = everything_at_once(split=split)
    late, overlapped = (trained(ranks, plan, clip_norm=0.1, late=late) for late in (True, False))
    for expected, found in zip(late, overlapped, strict=True):
        assert_same_bits(expected, found)


@pytest.mark.parametrize("split", [False, True])
def test_a_plan_that_has_lost_workers_twice(ranks: Ranks, split: bool) -> None:
    plan = data_pipeline_plan(layer_costs=[1.0] * 6, dp=3, pp=2, micro_batches=9, split_backward=split)
    costs = equal_costs(layers=6, micro_batches=9, workers=6)
    left = reroute(reroute(plan, [3], costs), [0], costs)
    assert_same_as_plain(ranks, renumbered(left))


@pytest.mark.parametrize("split", [False, True])
def test_many_more_messages_than_are_held_at_once(ranks: Ranks, split: bool) -> None:
    plan = data_pipeline_plan(layer_costs=[1.0] * 3, dp=1, pp=3, micro_batches=40, split_backward=split)
    assert_same_as_plain(ranks, plan)


@pytest.mark.parametrize("split", [False, True])
def test_a_layer_that_does_not_depend_on_its_input(ranks: Ranks, split: bool) -> None:
    # What comes before it gets a gradient all the same: zero.
    plan = data_pipeline_plan(layer_costs=[1.0] * 5, dp=1, pp=5, micro_batches=3, split_backward=split)
    assert_same_as_plain(ranks, plan, constant_at=2)


@pytest.mark.parametrize("split", [False, True])
def test_recomputing_changes_no_bit(ranks: Ranks, split: bool) -> None:
    plan = data_pipeline_plan(layer_costs=[1.0] * 7, dp=2, pp=3, micro_batches=8, split_backward=split)
    kept = trained(ranks, plan, clip_norm=0.1)
    # Everything, the lower part of two stages, and the upper part of one.
    spans = {worker: RecomputedLayers.in_full(plan.placement.span(worker)) for worker in (0, 1, 4, 5)}
    recompute = {
        0: spans[0],
        1: RecomputedLayers(spans[1].start, spans[1].stop - 1),
        4: RecomputedLayers(spans[4].start + 1, spans[4].stop),
        5: RecomputedLayers(spans[5].start, spans[5].stop - 1),
    }
    again = trained(ranks, dataclasses.replace(plan, recompute=recompute), clip_norm=0.1)
    for expected, found in zip(kept, again, strict=True):
        assert_same_bits(expected, found)


def assert_same_bits(expected: list[PlainStep], found: list[PlainStep]) -> None:
    for before, after in zip(expected, found, strict=True):
        assert (before.loss, before.grad_norm) == (after.loss, after.grad_norm)
        for key, weight in before.weights.items():
            assert torch.equal(weight, after.weights[key])
            assert torch.equal(before.gradients[key], after.gradients[key])


def test_more_micro_batches_than_a_rank_keeps_in_memory(ranks: Ranks) -> None:
    plan = data_pipeline_plan(layer_costs=[1.0] * 2, dp=1, pp=2, micro_batches=80)
    assert_same_as_plain(ranks, plan)
