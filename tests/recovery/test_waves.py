"""Waves: layers move in several parts if memory does not hold all of them during training."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import event, given, settings
from hypothesis import strategies as st

from chameleon_ft.cost.memory import program_memory
from chameleon_ft.plan import LayerRange, Placement, data_pipeline_plan
from chameleon_ft.recovery import DecisionContext
from chameleon_ft.recovery.migration import Wave, present_draft, waves_to, without_shadow_holders
from chameleon_ft.schedule import CostModel, check_program
from chameleon_ft.transfer import Transfer, transfer_to
from tests.examples import examples
from tests.recovery.contexts import context, contexts, layer


def layers_of(placement: Placement) -> dict[int, set[int]]:
    return {worker: {each for own in ranges for each in own} for worker, ranges in placement.ranges.items()}


def with_memory(now: DecisionContext, memory_bytes: int | None) -> CostModel:
    workers = tuple(replace(each, memory_bytes=memory_bytes) for each in now.costs.cluster.workers)
    return replace(now.costs, cluster=replace(now.costs.cluster, workers=workers))


def moves_to(target: Placement, now: DecisionContext) -> Transfer:
    return transfer_to(now.plan.placement, target, live=now.live, layers=now.costs.workload.layers)


def check_waves(waves: tuple[Wave, ...], now: DecisionContext, transfer: Transfer, costs: CostModel) -> None:
    """Check that the waves lead from the plan in force to the target, and that every plan on the way can be trained."""
    held, target = layers_of(now.plan.placement), layers_of(transfer.placement)
    for wave in waves:
        for draft in (wave.migrating, wave.reached):
            if draft is not None:
                course = draft.course()
                check_program(course.program, course.plan)
                memory = program_memory(course.program, course.plan.placement, costs.workload)
                for worker, own in memory.items():
                    capacity = costs.cluster.worker(worker).memory_bytes
                    assert capacity is None or own.peak_bytes <= capacity
        moved = wave.migrating.transfer
        assert moved is not None
        assert moved.messages
        assert layers_of(without_shadow_holders(wave.migrating.plan.placement, moved)) == held
        for message in moved.messages:
            assert held[message.source].issuperset(message.layers), "sources hold what they send"
            assert target[message.destination].issuperset(message.layers), "nothing moves in vain"
        arrived = layers_of(wave.migrating.plan.placement)
        if wave.reached is None:
            assert wave is waves[-1]
            assert all(arrived[worker] >= own for worker, own in target.items())
            return
        assert not wave.reached.plan.placement.unheld_layers
        held = layers_of(wave.reached.plan.placement)
        assert all(held[worker] <= arrived[worker] for worker in held)
    raise AssertionError("the last wave is followed by the course")


@settings(max_examples=examples(60), deadline=None)
@given(now=contexts(intact=True), data=st.data())
def test_every_plan_on_the_way_fits_and_the_last_wave_brings_what_is_left(
    now: DecisionContext, data: st.DataObject
) -> None:
    num_layers = now.plan.placement.num_layers
    stages = data.draw(st.integers(1, min(len(now.live), num_layers)))
    order = data.draw(st.permutations(now.live))[: len(now.live) // stages * stages]
    target = data_pipeline_plan(
        layer_costs=[1.0] * num_layers,
        dp=len(order) // stages,
        pp=stages,
        micro_batches=len(order),
        workers=order,
    ).placement
    transfer = moves_to(target, now)
    alone = max(present_draft(now).estimate.peak_bytes.values())
    for share in (0.8, 1.0, 1.2, 1.5, 2.5):
        costs = with_memory(now, round(alone * share))
        if transfer.messages and (waves := waves_to(present_draft(now), transfer, costs)):
            event(f"{min(len(waves), 4)} waves")
            check_waves(waves, now, transfer, costs)
    assert not transfer.messages or len(waves_to(present_draft(now), transfer, with_memory(now, None))) == 1


def test_two_workers_exchange_their_layers_one_after_the_other() -> None:
    now = context(dp=2, pp=2, layers=(layer(100), layer(100)))
    target = Placement(
        2, {0: (LayerRange(1, 2),), 1: (LayerRange(0, 1),), 2: (LayerRange(0, 1),), 3: (LayerRange(1, 2),)}
    )
    transfer = moves_to(target, now)
    costs = with_memory(now, 808)  # a byte less than for both, with 400 for a layer's state and gradients
    waves = waves_to(present_draft(now), transfer, costs)
    check_waves(waves, now, transfer, costs)
    assert [[m.destination for m in wave.migrating.transfer.messages] for wave in waves if wave.migrating.transfer] == [
        [1],
        [0],
    ]
    assert waves_to(present_draft(now), transfer, with_memory(now, 700)) == ()
