"""The whole way from one placement to another."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.cluster import Cluster, Link, Worker
from chameleon_ft.errors import ConfigError, NoHolderError, PlanError
from chameleon_ft.plan import LayerRange, Placement
from chameleon_ft.transfer import Message, Transfer, plan_transfer, transfer_s, transfer_to, worker_kinds
from tests.golden import refused
from tests.transfer.instances import layers_of, placements_of_five

CLUSTER = Cluster(
    tuple(Worker(worker, "a" if worker < 2 else "b", speed=1.0 + worker // 3) for worker in range(4)),
    Link(1.0, 100.0),
    Link(2.0, 10.0),
)


def test_the_worked_example_moves_two_layers_both_to_the_new_worker() -> None:
    """With layers from 0: three workers hold three layers each, a fourth joins with none."""
    current = Placement(9, {worker: (LayerRange(3 * worker, 3 * worker + 3),) for worker in range(3)})
    slots = [LayerRange(0, 2), LayerRange(2, 4), LayerRange(4, 6), LayerRange(6, 9)]
    new = Placement(9, {place: (slot,) for place, slot in enumerate(slots)})

    found = plan_transfer(current, new, kinds=dict.fromkeys(range(4)), layers=layers_of([14] * 9))

    assert found.roles == {0: 0, 1: 3, 2: 1, 3: 2}
    assert found.placement == Placement(9, {0: (slots[0],), 1: (slots[2],), 2: (slots[3],), 3: (slots[1],)})
    assert set(found.messages) == {Message(0, 3, LayerRange(2, 3), 14), Message(1, 3, LayerRange(3, 4), 14)}
    assert [len(messages) for messages in found.rounds] == [1, 1]
    assert found.total_bytes == 28


def holds(placement: Placement, worker: int) -> set[int]:
    return set(placement.layers_of(worker))


@given(placements_of_five(complete=True), placements_of_five(complete=True), st.data())
def test_after_the_messages_every_worker_holds_what_the_placement_says(
    current: Placement, new: Placement, data: st.DataObject
) -> None:
    spare = data.draw(st.sets(st.integers(0, 9), max_size=2))
    kinds = dict.fromkeys(sorted({*current.workers, *new.workers, *spare}))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=5, max_size=5))

    found = plan_transfer(current, new, kinds=kinds, layers=layers_of(sizes))
    as_asked = transfer_to(current, new, live=kinds, layers=layers_of(sizes))

    assert as_asked.placement == new
    assert found.total_bytes <= as_asked.total_bytes
    for transfer in (found, as_asked):
        assert {transfer.roles[p]: new.ranges_of(p) for p in new.workers} == dict(transfer.placement.ranges)
        for worker in transfer.placement.workers:
            received = [n for m in transfer.messages if m.destination == worker for n in m.layers]
            assert sorted(received) == sorted(holds(transfer.placement, worker) - holds(current, worker))
        for message in transfer.messages:
            assert set(message.layers) <= holds(current, message.source)


def test_lost_workers_send_nothing() -> None:
    both = Placement(2, {0: (LayerRange(0, 2),), 1: (LayerRange(0, 2),)})
    new = Placement(2, {2: (LayerRange(0, 2),)})

    found = transfer_to(both, new, live=[1, 2], layers=layers_of([1, 1]))

    assert found.messages == (Message(1, 2, LayerRange(0, 2), 2),)
    with pytest.raises(NoHolderError):
        transfer_to(both, new, live=[2], layers=layers_of([1, 1]))
    with pytest.raises(NoHolderError):
        plan_transfer(None, new, kinds={2: None}, layers=layers_of([1, 1]))


def test_a_worker_is_of_the_kind_of_its_speed_and_memory() -> None:
    kinds = worker_kinds(CLUSTER)
    current = Placement(1, {0: (LayerRange(0, 1),), 1: (LayerRange(0, 1),)})

    found = plan_transfer(current, Placement(1, {2: (LayerRange(0, 1),)}), kinds=kinds, layers=layers_of([1]))
    faster = plan_transfer(current, Placement(1, {3: (LayerRange(0, 1),)}), kinds=kinds, layers=layers_of([1]))

    assert (found.roles, found.messages) == ({2: 0}, ())
    assert faster.roles == {3: 3}


def test_a_worker_waits_for_its_own_messages_only() -> None:
    first = (Message(0, 1, LayerRange(0, 1), 100), Message(2, 3, LayerRange(0, 1), 500))
    second = (Message(1, 0, LayerRange(1, 2), 300), Message(3, 1, LayerRange(1, 2), 80))

    # In the first round, 1 + 1 s in host a and 1 + 5 s in host b; then 1 + 3 s at once, and 2 + 8 s when 3 is ready.
    assert transfer_s([first], CLUSTER) == 6.0
    assert transfer_s([first, second[:1]], CLUSTER) == 6.0
    assert transfer_s([first, second], CLUSTER) == 16.0
    assert transfer_s([], CLUSTER) == 0.0
    with refused(ConfigError):
        transfer_s([(Message(0, 9, LayerRange(0, 1), 1),)], CLUSTER)


@pytest.mark.parametrize(
    ("messages", "end"),
    [
        ((Message(0, 1, LayerRange(0, 1), 1), Message(0, 2, LayerRange(0, 1), 1)), "source"),
        ((Message(0, 2, LayerRange(0, 1), 1), Message(1, 2, LayerRange(1, 2), 1)), "destination"),
    ],
)
def test_a_round_in_which_a_worker_is_asked_twice_is_refused(messages: tuple[Message, ...], end: str) -> None:
    placement = Placement(2, {2: (LayerRange(0, 2),)})

    with refused(PlanError):
        Transfer(placement=placement, roles={2: 2}, rounds=(messages,))


def test_a_placement_that_does_not_fit_is_refused() -> None:
    current, new = Placement(2, {0: (LayerRange(0, 2),)}), Placement(2, {0: (LayerRange(0, 2),)})

    with refused(PlanError):
        plan_transfer(current, new, kinds={1: None}, layers=layers_of([1, 1]))
    with refused(PlanError):
        transfer_to(current, new, live=[1], layers=layers_of([1, 1]))
    with refused(PlanError):
        transfer_to(current, new, live=[0], layers=layers_of([1, 1, 1]))


def test_only_what_is_used_is_loaded() -> None:
    code = "import sys, chameleon_ft.transfer; print(sorted({'scipy', 'rustworkx', 'numba'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
