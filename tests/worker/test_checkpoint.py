"""Checkpoints of a rank: written in the background, and read by any placement."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from torch import Tensor

from chameleon_ft.protocol.messages import CheckpointSaved
from chameleon_ft.storage.checkpoints import mark_complete
from chameleon_ft.sync import Segment
from chameleon_ft.worker.checkpoint import CheckpointWriter, read_layer
from chameleon_ft.worker.execution.gradients import GradientBuffers
from chameleon_ft.worker.execution.layers import HeldLayers
from tests.stored import layer_directory
from tests.worker.toy_state import LAYERS, WHOLE, held_layers, set_gradients


class Collected:
    """The reports of a writer."""

    def __init__(self, checkpoints: Path) -> None:
        self.reports: list[tuple[int, int, tuple[int, ...], str | None]] = []
        self.seconds: list[tuple[float, float]] = []
        self.begun: list[int] = []
        self.thread: int | None = None
        self.writer = CheckpointWriter(checkpoints, saved=self.saved, before_write=self.begun.append)

    def saved(self, part: CheckpointSaved) -> None:
        self.reports.append((part.generation, part.step, part.layers, part.error))
        self.seconds.append((part.copy_s, part.write_s))
        self.thread = threading.get_ident()


def trained() -> HeldLayers:
    held = held_layers()
    GradientBuffers(held, [Segment(WHOLE, (0,))])
    set_gradients(held, 0)
    held.update(0)
    return held


def test_a_checkpoint_is_read_by_any_placement(tmp_path: Path) -> None:
    held = trained()
    collected = Collected(tmp_path)
    collected.writer.submit(3, 7, {layer: held.snapshot(layer) for layer in (0, 2, 4)}, copy_s=0.5)
    collected.writer.submit(3, 7, {layer: held.snapshot(layer) for layer in (1, 3)}, copy_s=0.0)
    assert collected.writer.join(unless=lambda: False)
    assert collected.reports == [(3, 7, (0, 2, 4), None), (3, 7, (1, 3), None)]
    assert [copy_s for copy_s, _ in collected.seconds] == [0.5, 0.0]
    assert all(write_s > 0 for _, write_s in collected.seconds)
    assert collected.begun == [7, 7]
    assert collected.thread != threading.get_ident()
    for layers in (range(3), range(2, 5)):
        other = held_layers(layers=layers)
        for layer in layers:
            state = read_layer(tmp_path, 7, layer)
            other.restore(layer, state)
            expected = held.snapshot(layer)
            assert other.snapshot(layer).keys() == expected.keys()
            for key, value in other.snapshot(layer).items():
                assert torch.equal(value, expected[key]) if isinstance(value, Tensor) else value == expected[key]


def test_a_layer_may_be_written_twice(tmp_path: Path) -> None:
    # Its first writer was lost, or the last checkpoint is taken again by the survivors.
    held = trained()
    collected = Collected(tmp_path)
    for _ in range(2):
        collected.writer.submit(3, 7, {0: held.snapshot(0)}, copy_s=0.0)
    assert collected.writer.join(unless=lambda: False)
    assert [report[3] for report in collected.reports] == [None, None]
    assert read_layer(tmp_path, 7, 0).keys() == held.snapshot(0).keys()


def test_a_checkpoint_that_cannot_be_written_is_reported_and_the_next_one_is_written(tmp_path: Path) -> None:
    held = trained()
    collected = Collected(tmp_path)
    layer_directory(tmp_path, 7, 0).parent.write_text("in the way")
    collected.writer.submit(3, 7, {0: held.snapshot(0)}, copy_s=0.0)
    collected.writer.submit(3, 8, {0: held.snapshot(0)}, copy_s=0.0)
    assert collected.writer.join(unless=lambda: False)
    (_, step, layers, error), after = collected.reports
    assert (step, layers) == (7, (0,))
    assert error is not None
    assert after == (3, 8, (0,), None)


def held_up_writer(checkpoints: Path) -> tuple[CheckpointWriter, threading.Event]:
    """Return a writer that has begun a checkpoint, and the event for which it waits."""
    begun, go_on = threading.Event(), threading.Event()

    def before_write(step: int) -> None:
        begun.set()
        go_on.wait()

    writer = CheckpointWriter(checkpoints, saved=lambda part: None, before_write=before_write)
    assert writer.join(unless=lambda: True)
    writer.submit(3, 7, {0: trained().snapshot(0)}, copy_s=0.0)
    begun.wait()
    return writer, go_on


def test_a_writer_that_is_busy_votes_against_the_next_checkpoint(tmp_path: Path) -> None:
    writer, go_on = held_up_writer(tmp_path)
    assert not writer.votes_for(8, is_due=True, request=0)
    assert writer.left_out == 8
    assert not writer.votes_for(9, is_due=False, request=1), "a request is answered later"
    assert writer.left_out == 0
    go_on.set()
    assert writer.join(unless=lambda: False)
    assert writer.votes_for(10, is_due=True, request=0)
    assert writer.votes_for(11, is_due=False, request=1)
    assert not writer.votes_for(12, is_due=False, request=0)
    assert writer.left_out == 0


def test_waiting_for_a_checkpoint_can_be_given_up(tmp_path: Path) -> None:
    writer, go_on = held_up_writer(tmp_path)
    assert writer.is_busy
    assert not writer.join(unless=lambda: True)
    go_on.set()
    assert writer.join(unless=lambda: False)
    assert writer.join(unless=lambda: True), "nothing is left to wait for"


def test_a_complete_checkpoint_is_not_touched_again(tmp_path: Path) -> None:
    held = trained()
    collected = Collected(tmp_path)
    collected.writer.submit(3, 7, {layer: held.snapshot(layer) for layer in range(LAYERS)}, copy_s=0.0)
    assert collected.writer.join(unless=lambda: False)
    mark_complete(tmp_path, 7, model="a model", num_layers=LAYERS)
    written = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    collected.writer.submit(3, 7, {0: held.snapshot(0)}, copy_s=0.0)
    assert collected.writer.join(unless=lambda: False)
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == written
    assert collected.reports[-1] == (3, 7, (0,), None), "it is there, and that is what was asked for"
