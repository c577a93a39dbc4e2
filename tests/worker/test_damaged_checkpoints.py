"""Checkpoints whose files are deleted, cut short or changed: every damage is noticed, and an older one is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chameleon_ft.config import Batch, Checkpoint, Parallel
from chameleon_ft.errors import CheckpointError, DamagedCheckpointError
from chameleon_ft.events.kinds import CheckpointComplete
from chameleon_ft.events.lines import Record
from chameleon_ft.events.records import FailureRecord
from chameleon_ft.launch.live_run import inject
from chameleon_ft.plan import LayerRange
from chameleon_ft.storage.checkpoints import (
    checked_files,
    complete_checkpoints,
    damage_of,
    incomplete_checkpoints,
    mark_complete,
    mark_damaged,
    seal_layer,
    sound_checkpoint,
)
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.recorder import View
from chameleon_ft.sync import Segment
from chameleon_ft.worker.checkpoint import CheckpointWriter, read_layer
from chameleon_ft.worker.execution.gradients import GradientBuffers
from chameleon_ft.worker.execution.layers import HeldLayers
from tests.examples import examples
from tests.golden import refused
from tests.harness import Ended, assert_as_the_plain_loop, fails, in_thread, resume_here, small_config, train_here
from tests.stored import layer_directory, step_directory
from tests.worker.toy import SEED, toy_job

LAYERS = 3
OLDER, NEWER = 4, 7


@dataclass(frozen=True)
class Damage:
    """A change to a file, drawn before the files are known: fractions stand for a file, a byte and a bit."""

    kind: str
    file: float
    byte: float
    bit: int

    def apply_to(self, directory: Path) -> Path:
        """Damage a file of a checkpoint, and return it."""
        files = sorted(path for path in directory.rglob("*") if path.is_file())
        path = files[int(self.file * len(files))]
        content = bytearray(path.read_bytes())
        place = int(self.byte * len(content))
        match self.kind:
            case "delete":
                path.unlink()
            case "truncate":
                path.write_bytes(content[:place])
            case "flip":
                content[place] ^= 1 << self.bit
                path.write_bytes(content)
        return path


below_one = st.floats(0, 1, exclude_max=True)
damages = st.builds(
    Damage, st.sampled_from(["delete", "truncate", "flip", "flip", "flip"]), below_one, below_one, st.integers(0, 7)
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two complete checkpoints."""
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    whole = LayerRange(0, LAYERS)
    held = HeldLayers(toy_job(LAYERS), whole, seed=SEED, device=torch.device("cpu"))
    GradientBuffers(held, [Segment(whole, (0,))])
    for step in (OLDER, NEWER):
        held.update(step)
        write(checkpoints, step, held)
    return checkpoints


def write(checkpoints: Path, step: int, held: HeldLayers) -> None:
    errors: list[str | None] = []
    writer = CheckpointWriter(checkpoints, saved=lambda part: errors.append(part.error), before_write=lambda step: None)
    writer.submit(1, step, {layer: held.snapshot(layer) for layer in range(LAYERS)}, copy_s=0.0)
    assert writer.join(unless=lambda: False)
    assert errors == [None]
    mark_complete(checkpoints, step, model="a model", num_layers=LAYERS)


def read_all(checkpoints: Path, step: int) -> None:
    for layer in range(LAYERS):
        read_layer(checkpoints, step, layer)


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage=damages)
def test_every_damage_is_noticed_and_the_file_is_named(written: Path, tmp_path: Path, damage: Damage) -> None:
    checkpoints = tmp_path / "checkpoints"
    shutil.rmtree(checkpoints, ignore_errors=True)
    shutil.copytree(written, checkpoints)
    assert sound_checkpoint(checkpoints) == (NEWER, {})
    file = damage.apply_to(step_directory(checkpoints, NEWER))
    newest, found = sound_checkpoint(checkpoints)
    if newest == OLDER:
        assert file.name in found[NEWER] if NEWER in found else NEWER in incomplete_checkpoints(checkpoints)
    else:
        # Only the tensors' own checksums show this one. A file that cannot be opened may be a matter of this host.
        with pytest.raises(DamagedCheckpointError, match=file.name):
            read_all(checkpoints, NEWER)
    assert damage_of(checkpoints, OLDER) is None
    read_all(checkpoints, OLDER)


def test_the_tensor_is_named(written: Path, tmp_path: Path) -> None:
    checkpoints = Path(shutil.copytree(written, tmp_path / "checkpoints"))
    directory = layer_directory(checkpoints, NEWER, 0)
    (data,) = directory.glob("*.distcp")
    value = read_layer(checkpoints, NEWER, 0)["module/weight"].numpy().tobytes()
    content = data.read_bytes()
    place = content.index(value)
    data.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
    with refused(DamagedCheckpointError):
        read_layer(checkpoints, NEWER, 0)


def test_values_that_were_changed_before_they_were_written_are_noticed(written: Path, tmp_path: Path) -> None:
    # The files are as they were written, but not the tensors: the memory of the writer was changed in between.
    checkpoints = Path(shutil.copytree(written, tmp_path / "checkpoints"))
    directory = layer_directory(checkpoints, NEWER, 0)
    tensors, _ = checked_files(directory)
    (directory / "checksums.json").unlink()
    tensors["module/weight"][0] += 1
    seal_layer(directory, tensors)
    with refused(DamagedCheckpointError):
        read_layer(checkpoints, NEWER, 0)


def test_a_damaged_checkpoint_is_written_again(written: Path, tmp_path: Path) -> None:
    checkpoints = Path(shutil.copytree(written, tmp_path / "checkpoints"))
    mark_damaged(checkpoints, NEWER)
    assert complete_checkpoints(checkpoints) == [OLDER]
    assert incomplete_checkpoints(checkpoints) == []
    write(checkpoints, NEWER, HeldLayers(toy_job(LAYERS), range(LAYERS), seed=SEED, device=torch.device("cpu")))
    assert sound_checkpoint(checkpoints) == (NEWER, {})
    read_all(checkpoints, NEWER)


def test_a_checkpoint_without_checksums_is_damaged(written: Path, tmp_path: Path) -> None:
    checkpoints = Path(shutil.copytree(written, tmp_path / "checkpoints"))
    mark = step_directory(checkpoints, NEWER) / "complete.json"
    model = json.loads(mark.read_text())["model"]
    mark.write_text(json.dumps({"step": NEWER, "model": model}) + "\n")
    assert sound_checkpoint(checkpoints)[0] == OLDER
    with refused(DamagedCheckpointError):
        read_all(checkpoints, NEWER)


def test_a_layer_that_this_host_cannot_see_is_not_damaged(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_layer(tmp_path, NEWER, 0)
    assert not isinstance(caught.value, DamagedCheckpointError)


# --- real runs -------------------------------------------------------------------------------------------------------

DRAWN = [
    Damage("flip", 0.5, 0.5, 3),
    Damage("flip", 0.999, 0.1, 0),
    Damage("flip", 0.1, 0.7, 6),
    Damage("truncate", 0.3, 0.8, 0),
    Damage("delete", 0.7, 0.0, 0),
    Damage("delete", 0.999, 0.0, 0),
]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run that ended at a failure, with two complete checkpoints or more."""
    directory = tmp_path_factory.mktemp("interrupted")
    config = small_config(
        directory,
        workers=2,
        parallel=Parallel(dp=1, pp=2),
        steps=16,
        checkpoint=Checkpoint(every=3, keep=100),
        failures=(fails(0, step=12), fails(1, step=12)),
    )
    ended = train_here(config, directory / "run")
    assert len(complete_checkpoints(ended.run.checkpoints)) > 1, "a step takes far longer than to write one"
    return ended


def copy_of(ended: Ended, path: Path) -> Ended:
    return Ended(0, RunDirectory.open(Path(shutil.copytree(ended.run.path, path))))


@pytest.mark.multiprocess
@pytest.mark.parametrize("damage", DRAWN, ids=str)
def test_a_run_resumes_from_the_one_before_the_damaged_one(tmp_path: Path, interrupted: Ended, damage: Damage) -> None:
    ended = copy_of(interrupted, tmp_path / "run")
    *_, older, newest = complete_checkpoints(ended.run.checkpoints)
    file = damage.apply_to(step_directory(ended.run.checkpoints, newest))
    resumed = resume_here(ended)
    assert resumed.code == 0, resumed.summary["reason"]
    (event,) = resumed.events("checkpoint_unreadable") or resumed.events("checkpoint_incomplete")
    assert event["step"] == newest
    assert file.name in event["message"] or file.name == "complete.json"
    assert resumed.steps == [*range(12), *range(older, 16)]
    assert_as_the_plain_loop(resumed)
    assert sound_checkpoint(resumed.run.checkpoints) == (16, {})


@pytest.mark.multiprocess
def test_without_a_checkpoint_that_can_be_read_the_run_ends_and_says_why(tmp_path: Path, interrupted: Ended) -> None:
    ended = copy_of(interrupted, tmp_path / "run")
    steps = complete_checkpoints(ended.run.checkpoints)
    for step in steps:
        (data,) = layer_directory(ended.run.checkpoints, step, 0).glob("*.distcp")
        flip(data)
    resumed = resume_here(ended)
    assert resumed.code == 1
    assert resumed.summary["reason"].startswith("no checkpoint is left that can be read; that of step ")
    assert all(f"that of step {step} cannot be read" in resumed.summary["reason"] for step in steps)
    assert [event["step"] for event in resumed.events("checkpoint_unreadable")] == steps[::-1]
    assert complete_checkpoints(resumed.run.checkpoints) == [], "none is tried again, or counts among those to keep"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@dataclass
class DamagingView(View):
    """Damages every checkpoint but the first, and after the second has the last holders of some layers killed."""

    run: RunDirectory
    damage: Callable[[Path], None]
    written: int = 0
    damaged: set[int] = field(default_factory=set)
    is_over: bool = False

    def show(self, record: Record) -> None:
        self.is_over = self.is_over or isinstance(record, FailureRecord)
        if not isinstance(record, CheckpointComplete) or self.is_over:
            return
        self.written += 1
        if self.written > 1:
            self.damaged.add(record.step)
            (data,) = layer_directory(self.run.checkpoints, record.step, 3).glob("*.distcp")
            self.damage(data)
        if self.written == 2:
            in_thread(self._kill)()

    def _kill(self) -> None:
        for worker in (1, 3):
            inject(self.run, worker=worker, kind="kill", phase=None, step=None)


@pytest.mark.multiprocess
@pytest.mark.parametrize("damage", [flip, Path.unlink])
def test_a_live_run_returns_to_the_one_before_the_damaged_one(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    config = small_config(
        tmp_path,
        workers=4,
        parallel=Parallel(dp=2, pp=2),
        batch=Batch(micro_batches=6, micro_batch_size=1),
        steps=60,
        checkpoint=Checkpoint(every=5, keep=100),
    )
    run = RunDirectory(tmp_path / "run")
    view = DamagingView(run, damage)
    ended = train_here(config, run.path, view=view)
    assert ended.code == 0, ended.summary["reason"]
    events = ended.events("checkpoint_unreadable")
    assert {event["step"] for event in events} == view.damaged
    assert all("layer-0003" in event["message"] for event in events)
    assert ended.failures[-1].policy == "checkpoint"
    # The damaged ones are written again when their steps are trained again.
    assert sound_checkpoint(ended.run.checkpoints) == (60, {})
    assert ended.lost == {1, 3}
    repeated = len(ended.steps) - 60
    assert repeated >= 5
    assert_as_the_plain_loop(ended, steps=40)
