"""Checksums of layers in the vote: every flipped bit shows, and nothing else does."""

from __future__ import annotations

import random

import pytest
import torch

from chameleon_ft.plan import LayerRange
from chameleon_ft.sync import Segment
from chameleon_ft.worker.execution.commit import StateCheck, StateDiffersError
from chameleon_ft.worker.execution.gradients import GradientBuffers
from chameleon_ft.worker.execution.layers import HeldLayers
from chameleon_ft.worker.fault_injection import flip_random_bit
from chameleon_ft.worker.mover import Mover
from tests.worker.switchboard import Line, Switchboard
from tests.worker.toy import SEED, toy_job, toy_rank

LAYERS = 3
CPU = torch.device("cpu")


def trained_layers() -> HeldLayers:
    """Layers with parameters and optimizer state after two updates."""
    held = HeldLayers(toy_job(LAYERS), range(LAYERS), seed=SEED, device=CPU)
    buffers = GradientBuffers(held, [Segment(LayerRange(0, LAYERS), (0,))])
    for step in range(2):
        for buffer in buffers.of(buffers.segments[0]):
            buffer.copy_(torch.linspace(-1.0, 1.0, buffer.numel()))
        held.update(step)
    return held


def checks(*held: HeldLayers, segments: list[Segment] | None = None) -> list[StateCheck]:
    segments = segments or [Segment(LayerRange(0, LAYERS), tuple(range(len(held))))]
    mover = Mover(Line(0, Switchboard()))
    return [StateCheck(toy_rank(toy_job(LAYERS), worker=i), each, segments, mover=mover) for i, each in enumerate(held)]


def vote(found: list[StateCheck]) -> list[float]:
    """Return the sums of a vote."""
    for check in found:
        check.begin()
    return [sum(each) for each in zip(*(check.ballot() for check in found), strict=True)]


def test_each_of_a_hundred_flipped_bits_shows() -> None:
    random.seed(7)
    held = [trained_layers() for _ in range(3)]
    found = checks(*held)
    sums = vote(found)
    assert all(check.compare(sums) for check in found)
    for _ in range(100):
        worker = random.randrange(3)
        flipped = flip_random_bit({layer: held[worker].replicated_state_of(layer) for layer in range(LAYERS)})
        sums = vote(found)
        for check in found:
            with pytest.raises(StateDiffersError) as error:
                check.compare(sums)
            ((layer, checksums),) = error.value.checksums.items()
            assert flipped.endswith(f"of layer {layer}")
            assert checksums.keys() == {0, 1, 2}
            (odd,) = [each for each, value in checksums.items() if list(checksums.values()).count(value) == 1]
            assert odd == worker
        held[worker] = found[worker]._held = trained_layers()


def test_flips_that_cancel_in_a_sum_show() -> None:
    held = [trained_layers(), trained_layers()]
    tensor = next(value for key, value in held[0].replicated_state_of(1).items() if value.numel() > 1)
    tensor.data.view(-1)[[0, 1]] = tensor.data.view(-1)[[1, 0]].clone()
    found = checks(*held)
    sums = vote(found)
    with pytest.raises(StateDiffersError):
        found[0].compare(sums)


def test_what_only_one_worker_holds_is_not_compared() -> None:
    held = [trained_layers(), trained_layers()]
    segments = [Segment(LayerRange(0, 1), (0, 1)), Segment(LayerRange(1, LAYERS), (0,))]
    held[1].keep_only({0})
    found = checks(*held, segments=segments)
    sums = vote(found)
    assert len(sums) == 2
    assert found[0].compare(sums)


def test_a_layer_that_has_not_arrived_yet_is_left_out() -> None:
    held = [trained_layers(), trained_layers()]
    held[1].keep_only({0, 1})
    found = checks(*held)
    assert found[0].compare(vote(found))


def test_nothing_is_compared_without_a_check() -> None:
    found = checks(trained_layers(), trained_layers())
    assert [check.ballot() for check in found] == [[], []]
    assert not found[0].compare([])


def test_the_order_of_the_state_does_not_matter() -> None:
    held = [trained_layers(), trained_layers()]
    state = held[0].snapshot(1)
    held[1].restore(1, dict(reversed(state.items())))
    found = checks(*held)
    assert found[0].compare(vote(found))
