"""A disk that becomes full, or does not answer for a while, does not stop a run."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from chameleon_ft.config import Checkpoint
from chameleon_ft.errors import ChameleonError
from chameleon_ft.events.base import Event
from chameleon_ft.events.lines import Record
from chameleon_ft.events.records import StepRecord
from chameleon_ft.launch.live_run import checkpoint, stop, wait_until_saved
from chameleon_ft.storage import file_queue
from chameleon_ft.storage.checkpoints import complete_checkpoints
from chameleon_ft.storage.files import ControlAddress, RunDirectory
from chameleon_ft.storage.recorder import View
from tests.harness import assert_trained_as_if_nothing_failed, small_config, train_here
from tests.mounts import fill, freezable_disk, freeze, small_disk, thaw

pytestmark = pytest.mark.multiprocess


@dataclass
class FillingView(View):
    """Fills the disk at one step and frees it at another; shows nothing."""

    disk: Path
    full_at: int
    free_at: int
    leaving: int = 0
    seen: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    ballast: Path | None = None

    def show(self, record: Record) -> None:
        if isinstance(record, Event):
            self.seen.setdefault(record.name, record.values())
        elif record.step == self.full_at:
            self.ballast = fill(self.disk, leaving=self.leaving)
        elif record.step == self.free_at and self.ballast is not None:
            self.ballast.unlink()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have files tried again, and the user told that they are late, sooner than after seconds."""
    monkeypatch.setattr(file_queue, "_ANNOUNCED_AFTER_S", 0.2)
    monkeypatch.setattr(file_queue, "_RETRY_MAX_S", 0.4)


def test_a_full_disk_makes_records_late_and_stops_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", megabytes=8) as disk:
        view = FillingView(disk, full_at=3, free_at=60)
        ended = train_here(small_config(tmp_path, steps=80), disk / "run", view=view)
        assert "No space left on device" in view.seen["records_late"]["message"]
        assert str(disk / "run") in view.seen["records_late"]["message"]
        assert "records_written" in view.seen
        assert ended.steps == list(range(80))
        assert not ended.failures
        assert [event["event"] for event in ended.events("records_written")] == ["records_written"]
        assert ended.summary["steps"] == 80
        assert ended.code == 0


def test_an_address_that_does_not_fit_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, steps = RunDirectory.write_control, list[int]()

    def write_if_there_is_room(run: RunDirectory, control: ControlAddress) -> None:
        if len(steps) < 40:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(run, control)

    @dataclass
    class CountingView(View):
        seen: dict[str, Mapping[str, Any]] = field(default_factory=dict)

        def show(self, record: Record) -> None:
            if isinstance(record, Event):
                self.seen.setdefault(record.name, record.values())
            else:
                steps.append(record.step)

    monkeypatch.setattr(RunDirectory, "write_control", write_if_there_is_room)
    view = CountingView()
    ended = train_here(small_config(tmp_path, steps=80), tmp_path / "run", view=view)
    assert_trained_as_if_nothing_failed(ended)
    assert view.seen["records_late"]["message"].startswith(
        f"[Errno 28] No space left on device, at {ended.run.control_file}; training continues"
    )
    assert "records_written" in view.seen


def test_checkpoints_that_do_not_fit_are_removed_and_tried_again(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", megabytes=8) as disk:
        view = FillingView(disk, full_at=11, free_at=31, leaving=150_000)
        config = small_config(tmp_path, steps=50, checkpoint=Checkpoint(every=10, keep=2))
        ended = train_here(config, disk / "run", view=view)
        assert ended.code == 0
        assert ended.failures == []
        assert ended.steps == list(range(50))
        left_out = {event["step"] for event in ended.events("checkpoint_failed")}
        assert left_out == {20, 30}
        message = view.seen["checkpoint_failed"]["message"]
        assert "No space left on device" in message or "as on a full disk" in message
        assert str(ended.run.checkpoints) in message
        complete = complete_checkpoints(ended.run.checkpoints)
        assert complete == [event["step"] for event in ended.events("checkpoint")][-2:]
        assert complete[-1] == 50
        left = sorted(path.name for path in ended.run.checkpoints.iterdir())
        assert left == [f"step-{step:08}" for step in complete], "nothing is left of those that do not fit"


def test_a_command_that_waits_for_a_checkpoint_is_told_that_it_does_not_fit(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", megabytes=8) as disk:
        run, errors = RunDirectory(disk / "run"), list[str]()

        def ask() -> None:
            try:
                wait_until_saved(run, checkpoint(run), after=0)
            except ChameleonError as error:
                errors.append(str(error))
            finally:
                stop(run)

        asking = Thread(target=ask)

        @dataclass
        class AskingView(FillingView):
            def show(self, record: Record) -> None:
                super().show(record)
                if isinstance(record, StepRecord) and record.step == self.full_at:
                    asking.start()

        view = AskingView(disk, full_at=3, free_at=-1)
        train_here(small_config(tmp_path, steps=100_000), run.path, view=view)
        asking.join()
    (error,) = errors
    assert "could not be written: " in error
    assert "No space left on device" in error or "as on a full disk" in error


def test_training_goes_on_while_a_disk_does_not_answer(tmp_path: Path) -> None:
    with freezable_disk(tmp_path / "disk", megabytes=64) as disk:

        @dataclass
        class FreezingView(View):
            seen: list[str] = field(default_factory=list)

            def show(self, record: Record) -> None:
                self.seen.append(record.name if isinstance(record, Event) else f"step {record.step}")
                if self.seen[-1] == "step 3":
                    freeze(disk)
                elif self.seen[-1] == "step 43":
                    thaw(disk)

        view = FreezingView()
        ended = train_here(small_config(tmp_path, steps=60), disk / "run", view=view)
        assert_trained_as_if_nothing_failed(ended)
        assert ended.failures == []
        assert ended.steps == list(range(60))
        late, written = view.seen.index("records_late"), view.seen.index("records_written")
        assert view.seen.index("step 3") < late < view.seen.index("step 43") < written
