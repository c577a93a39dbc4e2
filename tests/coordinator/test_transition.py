"""The orders of each worker in a change of placement, and that no failure leaves it half done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_ft.errors import ControlError, NoHolderError
from chameleon_ft.plan import LayerRange, Placement
from chameleon_ft.recovery.transition import LayerMove, PlannedTransition, placement_of, plan_transition
from chameleon_ft.workload import LayerCost
from tests.golden import refused

LAYERS = 4
COSTS = tuple(LayerCost(f"layer {n}", 1.0, 1.0, 1.0, param_bytes=10 + n, optimizer_bytes=20) for n in range(LAYERS))
OLD = {0: (0, 1), 1: (2, 3), 2: (0, 1), 3: (2, 3)}


def placed(held: Mapping[int, Sequence[int]]) -> Placement:
    return placement_of(held, LAYERS)


def test_layers_become_ranges() -> None:
    assert placed({1: [3, 0, 1], 2: []}).ranges == {1: (LayerRange(0, 2), LayerRange(3, 4))}


def test_without_a_change_there_is_no_transition() -> None:
    held = {worker: layers for worker, layers in OLD.items() if worker != 1}
    assert plan_transition(placed(OLD), placed(held), held=held, layers=COSTS) is None
    # Layers that a worker has received beside its own make no difference to that, nor does a spare.
    assert plan_transition(placed(OLD), placed(held), held={**held, 0: (0, 1, 2), 7: ()}, layers=COSTS) is None


def test_what_moves_and_what_is_kept() -> None:
    held = {0: (0, 1), 2: (0, 1), 3: (2, 3)}  # worker 1 is lost
    planned = plan_transition(placed(OLD), placed({0: [0], 2: [1, 2], 3: [3]}), held=held, layers=COSTS)
    assert planned is not None
    assert planned.participants == (0, 2, 3)
    assert planned.keep == held, "all that is in force, although worker 0 does not need layer 1 any more"
    parts = planned.orders(COSTS)
    assert parts[2].moves == parts[3].moves == (LayerMove(3, 2, 2, 32),)
    assert parts[0].moves == ()


def test_who_has_no_part_in_the_new_plan_takes_part_until_the_switch() -> None:
    held = {0: (0, 1), 2: (0, 1), 3: (2, 3)}
    planned = plan_transition(placed(OLD), placed({0: range(4)}), held=held, layers=COSTS)
    assert planned is not None
    assert planned.participants == (0, 2, 3)
    assert planned.keep[2] == (0, 1)


def test_a_spare_begins_anew() -> None:
    held = {0: (0, 1), 3: (2, 3), 7: ()}
    planned = plan_transition(placed(OLD), placed({0: [0, 1], 7: [2, 3]}), held=held, layers=COSTS)
    assert planned is not None
    assert planned.participants == (0, 3, 7)
    assert planned.keep[7] == ()


def test_what_was_received_in_an_attempt_that_failed_is_not_sent_again() -> None:
    held = {0: (0, 1, 2), 2: (0, 1, 3), 3: (2, 3)}
    planned = plan_transition(placed(OLD), placed({0: [0, 1, 2], 2: [0, 1], 3: [3]}), held=held, layers=COSTS)
    assert planned is not None
    assert planned.transfer.messages == ()
    assert planned.keep == {0: (0, 1, 2), 2: (0, 1), 3: (2, 3)}, "unneeded layers are given up"


def test_a_layer_that_no_worker_holds() -> None:
    with pytest.raises(NoHolderError) as caught:
        plan_transition(placed(OLD), placed({0: range(4)}), held={0: (0, 1), 2: (0, 1)}, layers=COSTS)
    assert caught.value.layers == (2, 3)


def test_states_that_the_protocol_rules_out_are_not_patched_up() -> None:
    with refused(ControlError):
        plan_transition(placed(OLD), placed({0: range(4)}), held={0: (0, 1), 2: (0,), 3: (2, 3)}, layers=COSTS)


# --- the protocol, with failures anywhere ----------------------------------------------------------------------------


@dataclass
class Model:
    """Workers that follow docs/transition.md to the letter, and the coordinator's view of what is in force."""

    held: dict[int, set[int]]
    in_force: Placement
    placed: dict[int, int] = field(default_factory=dict)
    generation: int = 1

    def __post_init__(self) -> None:
        self.placed = dict.fromkeys(self.held, self.generation)

    def attempt(self, new: Placement, planned: PlannedTransition, data: st.DataObject) -> None:
        """One transition that ends anywhere: each worker gets as far as it may before the failure comes."""
        self.generation += 1
        begun = {worker for worker in planned.participants if data.draw(st.booleans(), label=f"{worker} begins")}
        for worker in begun:
            self.held[worker] = set(planned.keep[worker])
        complete = begun == set(planned.participants) and data.draw(st.booleans(), label="all have confirmed")
        for worker in begun:
            arriving = [m for m in planned.transfer.messages if m.destination == worker]
            layers = {layer for message in arriving for layer in message.layers}
            for message in arriving:
                assert set(planned.keep[message.source]).issuperset(message.layers), "a source keeps what it sends"
            got = layers if complete else data.draw(st.sets(st.sampled_from(sorted(layers)))) if layers else set()
            self.held[worker] |= got
            if complete and data.draw(st.booleans(), label=f"{worker} switches"):
                self.held[worker] = set(new.layers_of(worker))
                self.placed[worker] = self.generation

    def settle(self, new: Placement, live: set[int]) -> None:
        """Return the coordinator's plan for the reports of the survivors."""
        if any(self.placed[worker] == self.generation for worker in live):
            self.in_force = new


@given(st.data())
def test_whatever_fails_when_all_survivors_hold_their_part_of_the_placement_in_force(data: st.DataObject) -> None:
    workers = range(5)
    placements = st.lists(st.sets(st.sampled_from(workers), min_size=1), min_size=LAYERS, max_size=LAYERS)

    def draw_placement(live: set[int]) -> Placement:
        found = data.draw(placements)
        return placed({w: [n for n, own in enumerate(found) if w in (own & live or live)] for w in sorted(live)})

    first = draw_placement(set(workers))
    model = Model({w: set(first.layers_of(w)) for w in workers}, first)
    live = set(workers)
    for _ in range(4):
        live -= data.draw(st.sets(st.sampled_from(sorted(live)), max_size=len(live) - 1), label="lost")
        own = {w: set(model.in_force.layers_of(w)) for w in live}
        for worker in live:
            assert own[worker] <= model.held[worker], "what is in force is held"
        held = {w: tuple(sorted(model.held[w])) if own[w] else () for w in sorted(live)}
        new = draw_placement(live)
        try:
            planned = plan_transition(model.in_force, new, held=held, layers=COSTS)
        except NoHolderError:
            return
        if planned is None:
            continue
        for worker, kept in planned.keep.items():
            assert set(kept) <= set(held[worker]), "no worker can keep what it does not hold"
            wanted = set(new.layers_of(worker))
            receives = {n for m in planned.transfer.messages if m.destination == worker for n in m.layers}
            assert wanted == (wanted & set(kept)) | receives, "with what it keeps and receives, it has its part"
        model.attempt(new, planned, data)
        live -= data.draw(st.sets(st.sampled_from(sorted(live)), max_size=len(live) - 1), label="lost in it")
        model.settle(new, live)
