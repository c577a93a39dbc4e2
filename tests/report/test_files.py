"""The run directory."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from chameleon_ft.config import RunConfig, TrainConfig
from chameleon_ft.errors import ConfigError
from chameleon_ft.events.kinds import BadStep, Interrupt
from chameleon_ft.storage.files import ControlAddress, FaultLog, RunDirectory, detach
from tests.golden import refused
from tests.mounts import fill, small_disk

CONTROL = ControlAddress(address="127.0.0.1:4000", token="secret", pid=1)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "a" / "run", TrainConfig())


def test_a_new_directory_has_its_configuration(run: RunDirectory) -> None:
    assert run.checkpoints.is_dir()
    assert run.logs.is_dir()
    assert run.config() == TrainConfig(output_dir=run.path)


@pytest.mark.parametrize("mode", [None, "0750"])
def test_the_directory_has_the_rights_that_are_set(tmp_path: Path, mode: str | None) -> None:
    config = TrainConfig() if mode is None else TrainConfig(output_mode=mode)
    run = RunDirectory.create(tmp_path / "run", config)
    assert run.path.stat().st_mode & 0o777 == (0o700 if mode is None else 0o750)


def test_a_run_can_be_moved(run: RunDirectory, tmp_path: Path) -> None:
    moved = run.path.rename(tmp_path / "moved")
    assert RunDirectory.open(moved).config().output_dir == moved


def test_nothing_is_left_of_a_directory_for_which_there_is_no_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", megabytes=1) as disk:
        fill(disk)
        with refused(ConfigError):
            RunDirectory.create(disk / "run", TrainConfig())
        assert not (disk / "run").exists()


def test_a_zombie_has_no_start_time(run: RunDirectory) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        run.write_control(replace(CONTROL, pid=process.pid))
        assert run.read_control().has_process_here() is True
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert run.read_control().has_process_here() is False


def test_an_existing_directory_is_never_written_over(run: RunDirectory) -> None:
    with refused(ConfigError):
        RunDirectory.create(run.path, TrainConfig())


def test_a_directory_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with refused(ConfigError):
        RunDirectory.create(tmp_path / "file" / "run", TrainConfig())


def test_another_directory_is_not_a_run(tmp_path: Path) -> None:
    with refused(ConfigError):
        RunDirectory.open(tmp_path)
    with refused(ConfigError):
        RunDirectory.open(tmp_path / "none")


def test_a_name_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 300)
    with refused(ConfigError):
        RunDirectory.open(path)
    with refused(ConfigError):
        RunDirectory.create(path, TrainConfig())


def test_a_configuration_is_replaced(run: RunDirectory) -> None:
    run.write_config(RunConfig(job="mine.py:job"))
    assert run.config().job == "mine.py:job"


def test_only_the_owner_can_read_the_token(run: RunDirectory) -> None:
    run.write_control(CONTROL)
    run.write_control(CONTROL)
    assert stat.S_IMODE(run.control_file.stat().st_mode) == 0o600
    found = run.read_control()
    assert replace(found, host="", started=None) == CONTROL
    assert found.host == socket.gethostname()


def test_the_address_survives_a_loss_of_power(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    on_disk: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: on_disk.append(os.fstat(descriptor).st_size))
    run.write_control(CONTROL)
    assert on_disk == [run.control_file.stat().st_size]


def test_a_process_that_has_ended_is_none_though_no_other_has_reaped_it(run: RunDirectory) -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        run.write_control(ControlAddress(address="127.0.0.1:1", token="secret", pid=process.pid))
        assert run.read_control().has_process_here()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert run.read_control().has_process_here() is False


def test_a_run_that_is_not_live_has_no_address(run: RunDirectory) -> None:
    run.write_control(CONTROL)
    run.remove_control()
    run.remove_control()
    with refused(ConfigError):
        run.read_control()


@pytest.mark.parametrize("text", ["{}", "", "3", '"x"', "[]", "\0" * 80, '{"address": 3, "token": "t", "pid": 1}'])
def test_a_damaged_control_file_is_named(text: str, run: RunDirectory) -> None:
    run.control_file.write_text(text)
    with refused(ConfigError):
        run.read_control()
    run.control_file.unlink()
    run.control_file.mkdir()
    with refused(ConfigError):
        run.read_control()


def test_an_unfinished_last_line_is_passed_over(run: RunDirectory) -> None:
    run.events_file.write_text('{"event": "interrupt", "time": 1}\n{"event": "tw')
    assert run.events() == [Interrupt(time=1.0)]


def test_a_damaged_line_in_the_middle_is_named(run: RunDirectory) -> None:
    run.events_file.write_text('{"event": "one", "time": 1}\n{"event": "tw\n{"event": "three", "time": 1}\n')
    with refused(ConfigError):
        run.events()


def test_a_file_that_cannot_be_read_is_named(run: RunDirectory) -> None:
    run.events_file.mkdir()
    run.metrics_file.symlink_to(run.metrics_file)
    for read in (run.events, run.steps):
        with refused(ConfigError):
            read()


LOST_POWER = "\0" * 60 + "\n"


def test_a_run_is_resumed_without_the_samples_of_bad_steps_whatever_is_damaged(run: RunDirectory) -> None:
    bad = BadStep(step=3, why="nan", is_bad_again=True, action="skip", changed=(), origins=()).to_json()
    lines = [
        bad,
        {name: value for name, value in bad.items() if name != "step"},
        {**bad, "action": [], "step": 4},
        {**bad, "event": ["bad_step"], "step": 5},
        {**bad, "action": "rollback", "step": 6},
    ]
    run.events_file.write_text("3\n" + LOST_POWER + "".join(json.dumps(line) + "\n" for line in lines))
    assert run.skipped_steps() == {3, 6}


def test_damaged_lines_of_injected_failures_are_left_out(tmp_path: Path) -> None:
    log = FaultLog(tmp_path / "faults.jsonl")
    log.append(worker=1, kind="kill", phase=None, step=None, at_s=5.0)
    with (tmp_path / "faults.jsonl").open("a") as file:
        file.write('3\n{}\n{"time": "x", "worker": 2, "kind": "kill"}\n' + LOST_POWER)
    log.append(worker=3, kind="hang", phase=None, step=7, at_s=6.0)
    assert [line["worker"] for line in log.since(0.0)] == [1, 3]
    assert log.last(2) is None


def test_generations_are_counted_by_their_plans(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", RunConfig())
    assert run.last_generation() == 0
    run.plans.mkdir()
    for name in ("generation-00002.json", "generation-00011.json", "generation-00012-copy.json", "notes.txt"):
        (run.plans / name).touch()
    assert run.last_generation() == 11


def test_the_files_that_a_configuration_names_are_copied_and_replaced(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    first.write_text("1")
    second.write_text("2")
    run = RunDirectory.create(tmp_path / "run", TrainConfig(profile=first))
    assert run.config().profile == run.profile_file
    assert run.profile_file.read_text() == "1"
    run.write_config(TrainConfig(profile=second))
    assert run.profile_file.read_text() == "2"
    run.write_config(run.config())
    assert run.profile_file.read_text() == "2"


def test_a_file_is_detached_from_processes_that_have_it_open(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("a line\n")
    with path.open("a") as late:
        detach(path)
        late.write("a late line\n")
    assert path.read_text() == "a line\n"
    detach(tmp_path / "none")
    assert [each.name for each in tmp_path.iterdir()] == ["lines"]


def test_on_a_full_disk_it_stays(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", megabytes=1) as disk:
        path = disk / "lines"
        path.write_text("a line\n" * 1000)
        fill(disk)
        detach(path)
        assert path.read_text() == "a line\n" * 1000
        assert sorted(each.name for each in disk.iterdir()) == ["ballast", "lines"]


def test_a_configuration_with_former_names_is_read(run: RunDirectory) -> None:
    config = run.config()
    former = run.config_file.read_text()
    for name, before in (
        ("min_free_memory", "least_free_memory"),
        ("max_clock_error_s", "most_clock_error_s"),
        ("min_message_s", "least_message_s"),
        ("models.llama:llama_job", "models.llama_job:llama_job"),
    ):
        assert name in former
        former = former.replace(name, before)
    run.config_file.write_text(former)
    assert run.config() == config
