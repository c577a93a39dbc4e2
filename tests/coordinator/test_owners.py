"""The owners of slices of the optimizer's state under the plans that a run chooses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chameleon_ft.coordinator.decisions.redundancy import (
    lacks_copies,
    restoring_copies,
    with_owners,
    with_owners_between,
)
from chameleon_ft.coordinator.state.checkpoints import Checkpoints
from chameleon_ft.plan import data_pipeline_plan
from chameleon_ft.plan.shards import UNITS, Sharding, shard_optimizer
from chameleon_ft.protocol.messages import CheckpointSaved
from chameleon_ft.recovery.generation import GenerationSpec
from chameleon_ft.recovery.transition import plan_transition
from chameleon_ft.transfer import Transfer
from chameleon_ft.workload import LayerCost
from tests.coordinator.plans import spec_of

LAYERS = tuple(LayerCost(f"layer {number}", 1.0, 1.0, 1.0) for number in range(4))
HOSTS = {worker: f"host {worker // 2}" for worker in range(8)}


def a_plan(workers: range | tuple[int, ...], *, dp: int, pp: int = 1) -> GenerationSpec:
    plan = data_pipeline_plan(layer_costs=[1.0] * 4, dp=dp, pp=pp, micro_batches=12, workers=tuple(workers))
    return spec_of(plan, load="initial")


def started(workers: range, *, dp: int, pp: int = 1, redundancy: int = 2) -> GenerationSpec:
    return with_owners(a_plan(workers, dp=dp, pp=pp), None, HOSTS, redundancy)


def left_of(plan: GenerationSpec, *lost: int) -> Sharding:
    assert plan.sharding is not None
    live = [worker for worker in plan.plan.workers if worker not in lost]
    return plan.sharding.left_to({worker: range(4) for worker in live})


def test_a_run_begins_with_full_copies() -> None:
    plan = started(range(6), dp=3, pp=2)
    assert plan.sharding is not None
    assert plan.sharding.copies == 2
    assert not lacks_copies(plan.sharding, 2)


def test_without_moves_the_owners_that_are_left_go_on_and_a_switch_is_looked_for() -> None:
    left = left_of(started(range(4), dp=4), 2)
    kept = replace(a_plan((0, 1, 3), dp=3), load="keep")
    found = with_owners(kept, left, HOSTS, 2)
    assert found.sharding == left
    assert found.transition is None
    assert lacks_copies(left, 2)


def test_after_a_return_to_a_checkpoint_owners_are_chosen_anew() -> None:
    left = left_of(started(range(4), dp=4, redundancy=1), 2)
    assert left.lost_layers == (0, 1, 2, 3)
    found = with_owners(replace(a_plan((0, 1, 3), dp=3), load=7), left, HOSTS, 1)
    assert found.sharding is not None
    assert found.sharding.lost_layers == ()


def test_slices_move_with_layers() -> None:
    first = started(range(4), dp=4)
    left = left_of(first, 1)
    anew = a_plan((0, 2), dp=1, pp=2)
    held = {worker: range(4) for worker in (0, 2, 3)}
    transition = plan_transition(first.plan.placement, anew.plan.placement, held=held, layers=LAYERS)
    found = with_owners(replace(anew, load="keep", transition=transition), left, HOSTS, 2)
    assert found.sharding is not None
    assert found.transition is not None
    assert found.transition.sharding is not None
    assert found.transition.sharding.layers == left.layers
    # Worker 3 holds nothing afterwards: what it alone owned goes to others while it still takes part.
    assert 3 in found.transition.participants
    assert {move.source for move in found.sharding.moves_from(left)} <= {0, 2, 3}


def followed_by(active: GenerationSpec, *plans: GenerationSpec, migrates: bool = True) -> tuple[GenerationSpec, ...]:
    live = active.plan.workers
    return with_owners_between(plans, active, HOSTS, 2, migrates=migrates, live=live, layers=LAYERS)


@pytest.mark.parametrize("migrates", [True, False])
def test_lost_owners_are_replaced_by_a_switch_to_the_same_plan(migrates: bool) -> None:
    left = left_of(started(range(4), dp=4), 2)
    active = replace(a_plan((0, 1, 3), dp=3), sharding=left)
    assert lacks_copies(left, 2)
    *moving, found = followed_by(active, restoring_copies(active, 2), migrates=migrates)
    assert found.plan == active.plan
    assert found.sharding is not None
    assert found.sharding.copies == 2
    if migrates:
        (while_moving,) = moving
        assert (while_moving.plan, while_moving.sharding) == (active.plan, left)
        assert while_moving.migration is not None
        assert while_moving.migration.messages == ()
        assert while_moving.migrating_slices == found.sharding.moves_from(left) != ()
        assert found.transition is None
    else:
        assert moving == []
        assert found.transition is not None
        assert found.transition.transfer.messages == ()
        assert found.transition.participants == (0, 1, 3)
    (again,) = followed_by(found, found)
    assert again.sharding == found.sharding


def test_slices_migrate_with_the_layers_of_each_wave() -> None:
    active = started(range(4), dp=4)
    waves = [a_plan(range(4), dp=2, pp=2), a_plan((0, 1, 2), dp=3)]
    migrating = [
        replace(wave, migration=Transfer(placement=wave.plan.placement, roles={}, rounds=())) for wave in waves
    ]
    found = followed_by(active, migrating[0], waves[0], migrating[1], waves[1])
    assert len(found) == 4
    first, reached, second, last = found
    assert first.sharding == active.sharding
    assert first.next_sharding == reached.sharding == second.sharding
    assert second.next_sharding == last.sharding
    assert all(plan.transition is None for plan in found)
    assert reached.migrating_slices == last.migrating_slices == ()
    # A worker that leaves is an owner until the switch.
    assert second.sharding is not None
    assert last.sharding is not None
    assert second.sharding.owned_by(3)
    assert not last.sharding.owned_by(3)


def test_a_switch_that_changes_no_owner_needs_no_transition() -> None:
    active = started(range(4), dp=4)
    (found,) = followed_by(active, a_plan(range(4), dp=4))
    assert (found.sharding, found.transition) == (active.sharding, None)


def test_a_checkpoint_is_complete_with_all_slices() -> None:
    sharding = shard_optimizer(a_plan(range(2), dp=2).plan.placement, HOSTS, 1)
    slices = [(layer, each.start, each.stop) for layer, own in enumerate(sharding.layers) for each in own.slices]
    events = Checkpoints()
    for place in slices[:-1]:
        part = CheckpointSaved(generation=1, step=3, layers=(0, 1, 2, 3), slices=(place,))
        events, complete = events.saved(part, num_layers=4, has_slices=True)
        assert complete is None
    # After a change of owners a slice may be cut elsewhere, and overlap.
    last = CheckpointSaved(generation=2, step=3, layers=(), slices=((3, 9, UNITS),))
    _, complete = events.saved(last, num_layers=4, has_slices=True)
    assert complete is not None
    assert complete.slices == {*slices[:-1], (3, 9, UNITS)}
