"""The state of a rank: layers and their optimizer, and gradients in flat buffers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from chameleon_ft.plan import LayerRange
from chameleon_ft.sync import Segment
from chameleon_ft.worker.execution.gradients import GradientBuffers
from tests.worker.toy import toy_job
from tests.worker.toy_state import LAYERS, WHOLE, held_layers, set_gradients, weights


def test_a_layer_is_the_same_wherever_it_is_built() -> None:
    whole, part = held_layers(), held_layers(layers=range(2, 4))
    assert part.layers == {2, 3}
    for one, other in zip(weights(part, LayerRange(2, 4)), weights(whole, LayerRange(2, 4)), strict=True):
        assert torch.equal(one, other)


def test_state_moves_to_another_rank_with_its_optimizer() -> None:
    source = held_layers()
    GradientBuffers(source, [Segment(WHOLE, (0,))])
    for step in range(3):
        set_gradients(source, step)
        source.update(step)
    target = held_layers(layers=range(1, 4))
    for layer in range(1, 4):
        target.restore(layer, source.snapshot(layer))
    part = LayerRange(1, 4)
    for held in (source, target):
        GradientBuffers(held, [Segment(part, (0,))])
        random = torch.Generator().manual_seed(9)
        for parameter in held.parameters(part):
            assert parameter.grad is not None
            parameter.grad.copy_(torch.randn(parameter.shape, generator=random))
        held.update(3)
    for one, other in zip(weights(target, part), weights(source, part), strict=True):
        assert torch.equal(one, other)


def test_a_snapshot_does_not_change_with_training() -> None:
    held = held_layers()
    GradientBuffers(held, [Segment(WHOLE, (0,))])
    set_gradients(held, 0)
    held.update(0)
    snapshot = held.snapshot(4)
    before = {key: value.clone() for key, value in snapshot.items() if isinstance(value, Tensor)}
    set_gradients(held, 1)
    held.update(1)
    assert any(key.startswith("optimizer/") for key in snapshot)
    for key, value in before.items():
        assert torch.equal(snapshot[key], value)
    changed = held.snapshot(4)
    assert not all(torch.equal(changed[key], value) for key, value in before.items())


def test_layers_without_parameters_have_nothing_to_update() -> None:
    held = held_layers(layers=range(2, 3))  # a ReLU
    assert held.update(1) == pytest.approx(0.025)
    assert GradientBuffers(held, [Segment(LayerRange(2, 3), (0,))]).square_sum(0) == 0.0
    held.restore(2, held.snapshot(2))


def test_the_learning_rate_is_set_for_each_step_or_unchanged() -> None:
    scheduled = held_layers()
    assert [scheduled.update(step) for step in range(3)] == pytest.approx([0.05, 0.025, 0.05 / 3])
    left_alone = held_layers(dataclasses.replace(toy_job(LAYERS), learning_rate=None))
    assert left_alone.update(5) == 0.05


def test_gradients_accumulate_in_flat_buffers_by_element_type() -> None:
    held = held_layers()
    segments = (Segment(LayerRange(0, 3), (0, 1)), Segment(LayerRange(3, 5), (0,)))
    buffers = GradientBuffers(held, segments)
    for segment in segments:
        flat = buffers.of(segment)
        parameters = held.parameters(segment.layers)
        assert {buffer.dtype for buffer in flat} == {torch.float32, torch.float64}
        assert sum(buffer.numel() for buffer in flat) == sum(p.numel() + 1 for p in parameters), "each has a flag"
    buffers.zero()
    for _ in range(2):
        sum(p.sum() for p in held.parameters(WHOLE)).backward()  # type: ignore[union-attr]
    for parameter in held.parameters(WHOLE):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.full_like(parameter, 2.0))
    buffers.scale(0.25)
    for parameter in held.parameters(WHOLE):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.full_like(parameter, 0.5))
    buffers.zero()
    assert buffers.square_sum(0) == 0.0


def test_the_norm_counts_every_layer_once_over_all_workers() -> None:
    segments = (Segment(LayerRange(0, 2), (0, 1)), Segment(LayerRange(2, 4), (1, 2)), Segment(LayerRange(4, 5), (2,)))
    total = 0.0
    for worker, layers in [(0, range(2)), (1, range(4)), (2, range(2, 5))]:
        held = held_layers(layers=layers)
        buffers = GradientBuffers(held, segments)
        assert buffers.segments == tuple(s for s in segments if worker in s.holders)
        for segment in buffers.segments:
            for buffer in buffers.of(segment):
                buffer.fill_(2.0)
        total += buffers.square_sum(worker)
    assert total == 4.0 * sum(p.numel() for p in held_layers().parameters(WHOLE))
