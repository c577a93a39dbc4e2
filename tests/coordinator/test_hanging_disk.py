"""The event loop of the coordinator does not wait for a disk that does not answer, whatever it needs of it."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from chameleon_ft.config import TrainConfig
from chameleon_ft.coordinator import coordinator as coordinators
from chameleon_ft.coordinator import run_files as run_checkpoints
from chameleon_ft.coordinator.coordinator import _ACKNOWLEDGE_EVERY
from chameleon_ft.coordinator.run_files import RunCheckpoints, RunFiles
from chameleon_ft.events.records import RunStatus
from chameleon_ft.events.summary import Summary
from chameleon_ft.protocol.messages import Acknowledged, CheckpointState, Hello, ReadRunFile, RunFilePart, SlowIO
from chameleon_ft.protocol.parts import Member
from chameleon_ft.storage import file_queue, recorder
from chameleon_ft.storage.checkpoints import complete_checkpoints, mark_complete, require_sound, seal_layer
from chameleon_ft.storage.file_queue import FileQueue
from chameleon_ft.storage.files import FaultLog, RunDirectory
from chameleon_ft.storage.plans import read_generation
from chameleon_ft.storage.recorder import Recorder, View
from chameleon_ft.storage.stores import Directory, Storage
from tests.coordinator.plans import a_plan
from tests.coordinator.stage import Puppet, Stage, scene
from tests.report.queues import hanging, until
from tests.report.records import step_record
from tests.stored import layer_directory, step_directory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", TrainConfig())


def write_checkpoint(checkpoints: Path, step: int, *, is_marked: bool = True) -> None:
    directory = layer_directory(checkpoints, step, 0)
    directory.mkdir(parents=True)
    (directory / "tensors").write_text("layer 0")
    seal_layer(directory, {})
    if is_marked:
        mark_complete(checkpoints, step, model="a model", num_layers=1)


def checkpoints_of(run: RunDirectory, files: FileQueue, *, keep: int = 9) -> RunCheckpoints:
    return RunCheckpoints(
        cast(Storage, Directory(run.checkpoints)),
        files,
        model="a model",
        num_layers=1,
        keep=keep,
        base=None,
        not_marked=lambda step, reason: None,
        copy_records=lambda: None,
        takes_over=False,
    )


def test_files_of_a_run_are_written_later(run: RunDirectory) -> None:
    with FileQueue() as queue:
        files = RunFiles(run, queue)
        with hanging(queue, run.path):
            files.log_kill(3)
            log = files.log_error(ValueError("a mistake"))
            files.save_evidence("worker-3-1.txt", "stacks")
            assert files.faults() is None, "they are not known now"
            assert not run.faults_file.exists()
            assert not log.exists()
            assert not run.incidents.exists()
        until(lambda: not queue.num_waiting)
        queue.news()
        assert FaultLog(run.faults_file).since(0)[0]["worker"] == 3
        assert "a mistake" in log.read_text()
        assert (run.incidents / "worker-3-1.txt").read_text() == "stacks"


def test_a_disk_that_hangs_while_it_is_asked_is_not_waited_for(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()
    monkeypatch.setattr(FaultLog, "since", lambda *_: answered.wait() and [])
    with FileQueue() as queue:
        files = RunFiles(run, queue)
        assert files.faults() is None
        answered.set()
        until(lambda: not queue.num_waiting)
        assert files.faults() == ()


def test_checkpoints_are_marked_and_examined_later(run: RunDirectory) -> None:
    for step in (2, 4, 6):
        write_checkpoint(run.checkpoints, step, is_marked=step < 6)
    with FileQueue() as files:
        checkpoints = checkpoints_of(run, files)
        with hanging(files, run.path):
            write_checkpoint(run.checkpoints, 5)
            assert checkpoints.steps() == [2, 4], "as far as known"
            examining = checkpoints.examine(4)
            checkpoints.mark_damaged(2)
            checkpoints.complete(6, agreed=None)
            checkpoints.discard(8, agreed=None)
            assert not examining.done()
            assert complete_checkpoints(run.checkpoints) == [2, 4, 5]
            assert checkpoints.steps() == [4]
        assert examining.result(10.0).damage is None
        until(lambda: not files.num_waiting)
        assert checkpoints.steps() == [4, 5, 6]


def test_records_do_not_wait_for_the_removal_of_old_checkpoints(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    pruned = threading.Event()
    monkeypatch.setattr(run_checkpoints, "prune_checkpoints", lambda *_, **__: pruned.wait() and set())
    write_checkpoint(run.checkpoints, 2, is_marked=False)
    with FileQueue() as files:
        checkpoints_of(run, files).complete(2, agreed=None)
        until(lambda: not files.num_waiting)
        files.append(run.metrics_file, "a line\n")
        assert run.metrics_file.read_text() == "a line\n"
        pruned.set()


def test_plans_are_written_later(run: RunDirectory) -> None:
    spec, file = replace(a_plan([0, 1], first_step=2), generation=3), run.plan_file(3)
    with Recorder(run, View()) as records:
        with hanging(records.files, run.path):
            records.plan(spec)
            assert not file.exists()
        until(lambda: not records.files.num_waiting)
        assert read_generation(file).plan == spec.plan


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_CATCH_UP_S", 0.1)
    monkeypatch.setattr(recorder, "_SUMMARY_S", 0.1)


@pytest.mark.usefixtures("impatient")
def test_a_run_ends_though_its_files_can_neither_be_read_nor_written(run: RunDirectory) -> None:
    answered = threading.Event()

    def read(_: RunDirectory) -> tuple[list[object], list[object]]:
        answered.wait()
        return [], []

    with pytest.MonkeyPatch.context() as patch, Recorder(run, View()) as records:
        records.record(step_record(0))
        patch.setattr(recorder, "_readable", read)
        with hanging(records.files, run.path):
            records.record(step_record(1))
            asyncio.run(records.catch_up())
            assert records.finish("finished", reason="all steps are trained").status == "finished"
        answered.set()


# --- with a coordinator ----------------------------------------------------------------------------------------------


def test_it_is_decided_once_the_disk_tells_whether_a_checkpoint_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()

    def find_damage(checkpoints: Path | Storage, step: int) -> None:
        answered.wait()
        require_sound(checkpoints, step)

    @scene()
    async def first(stage: Stage) -> None:
        stage.train(steps=5)
        for step in (2, 4):
            stage.save(step, 0, 0, 1, 2, 3)

    @scene(resume=True)
    async def second(stage: Stage) -> None:
        monkeypatch.setattr(run_checkpoints, "require_sound", find_damage)
        (layer_directory(stage.run.checkpoints, 4, 1) / "tensors").unlink()
        stage.gather(4)
        assert all(stage.order_of(worker) is None for worker in range(4))
        answered.set()
        while stage.order_of(0) is None:
            await asyncio.sleep(0)
        assert (stage.order().first_step, stage.order().load) == (2, 2)
        assert [event["step"] for event in stage.events("checkpoint_unreadable")] == [4]
        assert (step_directory(stage.run.checkpoints, 4) / "damaged.json").exists()

    first(tmp_path)
    second(tmp_path)


def test_files_that_others_read_are_sent_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()

    def read(*_: object) -> RunFilePart:
        answered.wait()
        return RunFilePart(content="", size=0)

    monkeypatch.setattr(coordinators, "read_part", read)

    @scene()
    async def reading(stage: Stage) -> None:
        stage.train()
        stage.say(stage.ranks[1], ReadRunFile(name="metrics.jsonl"))
        await asyncio.sleep(0)
        stage.commit(3)
        assert stage.ranks[1].count(RunFilePart) == 0
        answered.set()
        while not stage.ranks[1].count(RunFilePart):
            await asyncio.sleep(0)

    reading(tmp_path)


@scene()
async def test_messages_are_acknowledged_as_written_once_the_disk_answers(stage: Stage) -> None:
    """Until then their sender keeps them, for another coordinator would have to be told again."""
    stage.train()
    files, before = stage.coordinator._recorder.files, stage.ranks[1]
    said = SlowIO(generation=1, doing="loading layers", since_s=10.0)
    with hanging(files, stage.run.path):
        acknowledged = before.count(Acknowledged)
        for _ in range(_ACKNOWLEDGE_EVERY):
            stage.say(before, said)
        assert before.count(Acknowledged) == acknowledged
        stage.depart(before)
        after = Puppet("worker 1")
        stage.say(after, Hello(member=Member(1, 1), host="10.0.0.1", resumes=before.number, known=1))
        assert after.last(Acknowledged).received > _ACKNOWLEDGE_EVERY
        assert after.last(Acknowledged).written == 0
    until(lambda: not files.num_waiting)
    files.news()
    for _ in range(_ACKNOWLEDGE_EVERY):
        stage.say(after, said)
    assert (after.last(Acknowledged).written or 0) > _ACKNOWLEDGE_EVERY


def test_a_command_that_waits_for_a_checkpoint_is_told_that_the_disk_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_queue, "_ANNOUNCED_AFTER_S", 0.0)

    @scene()
    async def asking(stage: Stage) -> None:
        stage.train()
        command = Puppet("command")
        with hanging(stage.coordinator._recorder.files, stage.run.path):
            stage.say(command, CheckpointState(committed=3))
        assert command.last(CheckpointState).late == f"no answer for 0 s, at {stage.run.path}"

    asking(tmp_path)


def test_the_end_of_a_run_waits_for_records_that_are_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[int] = []
    finish = Recorder.finish

    def finished(self: Recorder, status: RunStatus, *, reason: str) -> Summary:
        late.append(self.files.num_waiting)
        return finish(self, status, reason=reason)

    monkeypatch.setattr(Recorder, "finish", finished)

    @scene(steps=4)
    async def ending(stage: Stage) -> None:
        stage.train(steps=3)
        with hanging(stage.coordinator._recorder.files, stage.run.path):
            stage.commit(3)
            stage.finish(4)
            waiting = asyncio.ensure_future(stage.coordinator.wait())
            for _ in range(20):
                await asyncio.sleep(0)
            assert late == []
        assert await waiting == "finished"
        assert late == [0]

    ending(tmp_path)
