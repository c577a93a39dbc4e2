"""File operations keep their order, and no caller waits for a disk that is full or does not answer."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path

import pytest

from chameleon_ft.config import TrainConfig
from chameleon_ft.events.base import Event
from chameleon_ft.events.lines import Record
from chameleon_ft.events.summary import Summary
from chameleon_ft.storage import file_queue
from chameleon_ft.storage.file_queue import CaughtUp, FileQueue, Late
from chameleon_ft.storage.files import RunDirectory, detach
from chameleon_ft.storage.recorder import Recorder, View
from tests.mounts import fill, small_disk
from tests.report.queues import hanging, until
from tests.report.records import step_record


def test_everything_is_done_in_its_order_when_a_method_returns(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    with FileQueue() as files:
        files.append(path, "a\n")
        assert path.read_text() == "a\n"
        files.replace(path, lambda: "b\n", mode=0o600)
        files.append(path, "c\n")
        assert path.read_text() == "b\nc\n"
        assert files.ask(path, path.read_text).result(0) == "b\nc\n"
        assert not files.is_late
        assert files.news() is None


def test_lines_wait_for_room_on_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", megabytes=1) as disk, FileQueue() as files:
        path = disk / "lines"
        files.append(path, "first\n")
        ballast = fill(disk)
        lines = [f"{number} {'x' * 1000}\n" for number in range(100)]
        for line in lines:
            files.append(path, line)
        assert not files.wait()
        late = files.news()
        assert isinstance(late, Late)
        assert late == Late(path, f"[Errno {errno.ENOSPC}] No space left on device")
        assert files.news() is None, "it is announced once"
        ballast.unlink()
        until(lambda: not files.num_waiting)
        news = files.news()
        assert isinstance(news, CaughtUp)
        assert news.dropped == 0
        assert not files.is_late
        assert path.read_text() == "first\n" + "".join(lines)


def test_no_method_waits_for_a_disk_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines"
    with FileQueue() as files:
        with hanging(files, tmp_path / "hanging"):
            assert files.is_late
            assert files.news() is None, "it is not worth a line yet"
            monkeypatch.setattr(file_queue, "_ANNOUNCED_AFTER_S", 0.0)
            assert files.news() == Late(tmp_path / "hanging", "no answer for 0 s")
            for number in range(1000):
                files.append(path, f"{number}\n")
            answer = files.ask(path, path.read_text)
            assert not answer.done()
            assert not path.exists()
        assert answer.result(10.0).splitlines() == [str(number) for number in range(1000)]
        until(lambda: not files.num_waiting)
        assert isinstance(files.news(), CaughtUp)
        files.append(path, "on\n")
        assert path.read_text().endswith("999\non\n")


def test_beyond_a_bound_the_oldest_lines_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    with small_disk(tmp_path / "disk", megabytes=1) as disk, FileQueue(longest_bytes=50) as files:
        ballast = fill(disk)
        files.append(disk / "lines", "x" * 9 + "\n")
        for number in range(10):
            files.append(path, f"{number}".ljust(9) + "\n")
        assert isinstance(files.news(), Late)
        ballast.unlink()
        until(lambda: not files.num_waiting)
        news = files.news()
        assert isinstance(news, CaughtUp)
        assert news.dropped == 6
    assert path.read_text().split() == ["0", "1", "2", "3"]


def test_an_operation_is_tried_again_only_if_the_disk_is_to_blame(tmp_path: Path) -> None:
    failures: list[OSError] = []
    causes = [errno.ESTALE, errno.EIO, errno.ENOENT]

    def fail() -> None:
        raise OSError(causes.pop(0), "no")

    with FileQueue() as files:
        files.submit(tmp_path, fail, failed=failures.append)
        until(lambda: not files.num_waiting)
    assert [failure.errno for failure in failures] == [errno.ENOENT]
    assert not causes


def test_other_errors_are_raised(tmp_path: Path) -> None:
    with FileQueue() as files:
        files.submit(tmp_path, lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            files.news()


def test_an_operation_that_waits_can_be_cancelled(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with FileQueue() as files:
        with hanging(files, path):
            number = files.replace(path, lambda: "a", mode=0o600)
            files.cancel(number)
        until(lambda: not files.num_waiting)
    assert not path.exists()


def test_a_run_whose_disk_stays_full_ends_with_its_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, str]] = []

    class Noting(View):
        def show(self, record: Record) -> None:
            if isinstance(record, Event):
                shown.append((record.name, record.message or ""))

        def finished(self, summary: Summary) -> None:
            shown.append((summary.status, str(summary.steps)))

    with small_disk(tmp_path / "disk", megabytes=1) as disk:
        run = RunDirectory.create(disk / "run", TrainConfig())
        with Recorder(run, Noting()) as recorder:
            recorder.record(step_record(0))
            fill(disk)
            for step in range(1, 40):
                recorder.record(step_record(step))
            recorder.watch_files()
            summary = recorder.finish("finished", reason="all steps are trained")
            full = f"[Errno {errno.ENOSPC}] No space left on device, at {run.metrics_file}"
            assert summary.steps == 40
            assert shown[:2] == [
                ("records_late", f"{full}; training continues, and all is written as soon as that is possible"),
                ("finished", "40"),
            ]
            name, message = shown[2]
            assert name == "records_lost"
            assert message.startswith(f"{full}; not written: ")
            assert f" of {run.metrics_file}, 2 lines of {run.events_file}" in message
        written = [json.loads(line) for line in run.metrics_file.read_text().splitlines(keepends=True) if "\n" in line]
        assert [line["step"] for line in written] == list(range(len(written)))


# --- coordinators that do not lead any more --------------------------------------------------------------------------


def test_operations_wait_while_another_coordinator_may_lead(tmp_path: Path) -> None:
    leads, path = threading.Event(), tmp_path / "lines"
    with FileQueue(may_write=leads.is_set) as files:
        files.append(path, "a\n")
        files.replace(tmp_path / "whole", lambda: "b", mode=0o600)
        assert files.is_late
        assert list(tmp_path.iterdir()) == []
        leads.set()
        until(files.wait)
        assert path.read_text() == "a\n"
        assert (tmp_path / "whole").read_text() == "b"


def test_nothing_is_written_after_the_queue_was_abandoned(tmp_path: Path) -> None:
    leads, path = threading.Event(), tmp_path / "lines"
    with FileQueue(may_write=leads.is_set) as files:
        files.append(path, "a\n")
        files.abandon()
        leads.set()
        files.append(path, "b\n")
        files.submit(path, path.touch)
        assert files.wait()
        assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_opened_too_late_is_left_as_it_is(tmp_path: Path) -> None:
    """The process is stopped between the question whether it may write and the opening of the file."""
    path, asked = tmp_path / "lines", []

    def may_write() -> bool:
        asked.append(path.read_text())
        path.write_text("of the coordinator that has taken over, in the middle of a li")
        return len(asked) == 1

    path.write_text("of this one\n")
    with FileQueue(may_write=may_write) as files:
        files.append(path, "a\n")
        until(lambda: len(asked) >= 2)
        files.abandon()
    assert path.read_text() == "of the coordinator that has taken over, in the middle of a li"


def test_a_line_that_comes_late_goes_to_a_file_without_a_name(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    with FileQueue() as lost, FileQueue() as leading:
        lost.append(path, "a\n")
        detach(path)
        leading.append(path, "b\n")
        lost.append(path, "c\n")
        leading.append(path, "d\n")
        assert path.read_text() == "a\nb\nd\n"


def test_a_file_that_does_not_exist_need_not_be_detached(tmp_path: Path) -> None:
    detach(tmp_path / "lines")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_not_detached_for_a_coordinator_that_does_not_lead_any_more(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    with FileQueue() as leading:
        leading.append(path, "a\n")
        detach(path, may_write=lambda: False)
        leading.append(path, "b\n")
    assert path.read_text() == "a\nb\n"
    assert list(tmp_path.iterdir()) == [path]
