"""Pieces of checkpoints that are as they were written, but of another step, layer, slice or run, are damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from chameleon_ft.config import Checkpoint, Parallel
from chameleon_ft.errors import CheckpointError, DamagedCheckpointError
from chameleon_ft.plan import LayerRange
from chameleon_ft.plan.shards import UNITS
from chameleon_ft.protocol.messages import CheckpointSaved
from chameleon_ft.storage.checkpoints import complete_checkpoints, link_checkpoint, mark_complete, sound_checkpoint
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.stores import Directory, ObjectStore, Storage, checkpoint_storage
from chameleon_ft.sync import Segment
from chameleon_ft.worker.checkpoint import CheckpointWriter, read_layer
from chameleon_ft.worker.execution.gradients import GradientBuffers
from chameleon_ft.worker.execution.layers import HeldLayers
from tests.harness import Ended, assert_as_the_plain_loop, fails, resume_here, small_config, train_here
from tests.worker.toy import SEED, toy_job

LAYERS = 3
OLDER, NEWER = 4, 7
SLICES = [(layer, 0, UNITS) for layer in range(LAYERS)]


@pytest.fixture(params=["directory", "store"])
def place_of(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Storage]:
    """Return the place of the checkpoints of a run by its id: a directory or an object store."""

    def place(run: str) -> Storage:
        if request.param == "directory":
            return Directory(tmp_path / run, run_of=lambda _: run)
        return ObjectStore(f"file://{tmp_path / run}", timeout_s=60, run_of=lambda _: run)

    return place


def write(checkpoints: Storage, step: int, *, updates: int) -> None:
    """Write a checkpoint after so many updates, with the optimizer's state in slices."""
    whole = LayerRange(0, LAYERS)
    held = HeldLayers(toy_job(LAYERS), whole, seed=SEED, device=torch.device("cpu"))
    GradientBuffers(held, [Segment(whole, (0,))])
    for number in range(updates):
        held.update(number)
    saved: list[CheckpointSaved] = []
    writer = CheckpointWriter(checkpoints, saved=saved.append, before_write=lambda step: None)
    states = {layer: held.snapshot(layer) for layer in whole}
    parts = [
        {key: value for key, value in states[layer].items() if key.startswith("optimizer/") == is_slice}
        for is_slice in (False, True)
        for layer in whole
    ]
    layers, slices = dict(enumerate(parts[:LAYERS])), dict(zip(SLICES, parts[LAYERS:], strict=True))
    writer.submit(1, step, layers, copy_s=0.0, slices=slices)
    assert writer.join(unless=lambda: False)
    assert [part.error for part in saved] == [None]
    seals = dict(saved[0].seals)
    mark_complete(checkpoints, step, model="a model", num_layers=LAYERS, slices=SLICES, seals=seals)


def root_of(checkpoints: Storage) -> Path:
    return Path(checkpoints.place().removeprefix("file://"))


def damage_in(checkpoints: Storage, step: int) -> str:
    """Return the damage that is found before a run starts, or when its layers are read."""
    _, damages = sound_checkpoint(checkpoints)
    if step in damages:
        return damages[step]
    try:
        for layer in range(LAYERS):
            read_layer(checkpoints, step, layer)
    except DamagedCheckpointError as error:
        return str(error)
    return ""


def replace(target: Path, source: Path) -> None:
    if target.is_dir():
        shutil.rmtree(target)
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)


EXCHANGES = {
    "a layer of another step": ("layer-0001", "own", OLDER, "layer-0001"),
    "a slice of another step": ("layer-0001.00000-65536", "own", OLDER, "layer-0001.00000-65536"),
    "another layer": ("layer-0001", "own", NEWER, "layer-0002"),
    "a slice of another layer": ("layer-0001.00000-65536", "own", NEWER, "layer-0002.00000-65536"),
    "a layer of another run": ("layer-0001", "other", NEWER, "layer-0001"),
    "a layer of the step as it was written before": ("layer-0001", "own", -NEWER, "layer-0001"),
}


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_sound_piece_of_elsewhere_is_damage(place_of: Callable[[str], Storage], exchange: str) -> None:
    own, other = place_of("own"), place_of("other")
    write(own, NEWER, updates=3)
    root_of(own).rename(root_of(own).with_name("before"))
    for step, updates in ((OLDER, 1), (NEWER, 2)):
        for place in (own, other):
            write(place, step, updates=updates)
    assert not damage_in(own, NEWER)
    name, run, step, source = EXCHANGES[exchange]
    ending = "" if isinstance(own, Directory) else ".tar"
    folder = root_of(own).with_name("before") if step < 0 else root_of(place_of(run))
    replace(
        root_of(own) / f"step-{NEWER:08}" / f"{name}{ending}", folder / f"step-{abs(step):08}" / f"{source}{ending}"
    )
    assert name in damage_in(own, NEWER)
    assert not damage_in(own, OLDER)


@pytest.mark.parametrize("run", ["own", "other"])
def test_a_whole_checkpoint_of_elsewhere_is_damage(place_of: Callable[[str], Storage], run: str) -> None:
    own, other = place_of("own"), place_of(run)
    write(own, OLDER, updates=1)
    if run == "own":  # the folder of a step is renamed
        shutil.copytree(root_of(own) / f"step-{OLDER:08}", root_of(own) / f"step-{NEWER:08}")
    else:
        write(other, NEWER, updates=2)
        shutil.copytree(root_of(other) / f"step-{NEWER:08}", root_of(own) / f"step-{NEWER:08}")
    step, damages = sound_checkpoint(own)
    assert step == OLDER
    assert f"step-{NEWER:08}" in damages[NEWER]


def test_a_fork_reads_the_checkpoint_of_its_source_and_no_other(place_of: Callable[[str], Storage]) -> None:
    source, fork = place_of("source"), place_of("fork")
    for step in (OLDER, NEWER):
        write(source, step, updates=step)
    fork.run_of = lambda step: "source" if step == OLDER else "fork"
    for step in (OLDER, NEWER):
        link_checkpoint(source, step, fork)
    assert not damage_in(fork, OLDER)
    assert damage_in(fork, NEWER)


@pytest.mark.multiprocess
def test_a_run_resumes_from_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        workers=2,
        parallel=Parallel(dp=2, pp=1),
        steps=28,
        # Far enough apart for a disk that is slow to be done with one before the next is due.
        checkpoint=Checkpoint(every=8, keep=100),
        failures=(fails(0, step=27), fails(1, step=27)),
        run_id="own",
    )
    ended = train_here(config, tmp_path / "run")
    checkpoints = ended.run.checkpoints
    *_, older, newest = complete_checkpoints(checkpoints)
    renamed = newest + 1
    shutil.copytree(checkpoints / f"step-{older:08}", checkpoints / f"step-{renamed:08}")
    replace(checkpoints / f"step-{newest:08}" / "layer-0001", checkpoints / f"step-{older:08}" / "layer-0001")
    resumed = resume_here(Ended(0, RunDirectory.open(ended.run.path)))
    assert resumed.code == 0, resumed.summary["reason"]
    unreadable = {event["step"]: event["error"] for event in resumed.events("checkpoint_unreadable")}
    assert unreadable.keys() == {newest, renamed}
    assert "layer-0001" in unreadable[newest]
    assert resumed.steps[27:] == list(range(older, 28))
    assert_as_the_plain_loop(resumed)
    assert sound_checkpoint(checkpoint_storage(config, resumed.run)) == (28, {})
    with pytest.raises(CheckpointError):
        read_layer(Directory(checkpoints, run_of=lambda _: "other"), 28, 0)
