"""Commands that join a coordinator, or stand by for one."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from chameleon_ft.config import TrainConfig
from chameleon_ft.coordinator.events import Moment
from chameleon_ft.coordinator.journal import Journal
from chameleon_ft.errors import ControlError
from chameleon_ft.events.records import RunStatus
from chameleon_ft.storage.file_queue import FileQueue
from chameleon_ft.storage.files import ControlAddress, RunDirectory
from chameleon_ft.storage.run_lock import RunLock
from tests.cli.conftest import CommandLine, nothing_listens
from tests.coordinator.histories import new_state
from tests.golden import message

AGENT = {
    "coordinator": "10.0.0.1:4000",
    "token": "secret",
    "tls": None,
    "workers": 4,
    "host": None,
    "drained_exit_code": 0,
}
_NO_PROCESS = 2**22 + 1  # above the numbers that Linux gives
RANKS = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", TrainConfig())


def test_an_agent_joins(chameleon: CommandLine) -> None:
    assert chameleon("agent", "--coordinator", "10.0.0.1:4000", "--workers", "4", "--token", "secret") == 0
    assert chameleon.joined == [AGENT]


def test_the_run_directory_says_where_the_coordinator_is(chameleon: CommandLine, run: RunDirectory) -> None:
    run.write_control(ControlAddress(address="10.0.0.1:4000", token="secret", pid=1))
    assert chameleon("agent", "--run", run.path, "--workers", "4") == 0
    assert chameleon.joined == [AGENT]


def test_a_token_of_its_own_is_refused_where_the_run_directory_has_one(
    chameleon: CommandLine, run: RunDirectory
) -> None:
    run.write_control(ControlAddress(address="10.0.0.1:4000", token="secret", pid=1))
    told = chameleon.refused("agent", "--run", run.path, "--workers", "4", "--token", "another")
    assert "--token: for --coordinator; that of --run" in told
    assert chameleon.joined == []


def test_an_agent_hosts_a_coordinator_that_stands_by(chameleon: CommandLine, run: RunDirectory) -> None:
    run.write_control(ControlAddress(address="10.0.0.1:4000", token="secret", pid=1))
    assert chameleon("agent", "--run", run.path, "--workers", "4", "--standby") == 0
    assert chameleon.joined[0]["stands_by_for"] == run.path


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nnodes", "2", "--nproc-per-node", "4", "--rdzv-endpoint", "10.0.0.1:4000"],
        ["--nnodes=2:2", "--nproc_per_node=4", "--rdzv_endpoint=10.0.0.1:4000", "--rdzv_backend=chameleon"],
        ["--nnodes", "2", "--workers", "4", "--coordinator", "10.0.0.1:4000"],
    ],
)
def test_an_agent_takes_the_arguments_of_torchrun(chameleon: CommandLine, arguments: list[str]) -> None:
    assert chameleon("agent", *arguments, "--token", "secret") == 0
    assert chameleon.joined == [AGENT]


def test_the_number_of_machines_is_compared_with_the_workers_of_the_run(
    chameleon: CommandLine, run: RunDirectory
) -> None:
    assert run.config().workers == 4
    run.write_control(ControlAddress(address="10.0.0.1:4000", token="secret", pid=1))
    assert chameleon("agent", "--run", run.path, "--nnodes", "2", "--nproc-per-node", "2") == 0
    error = chameleon.refused("agent", "--run", run.path, "--nnodes", "2", "--nproc-per-node", "4")
    assert "the run begins with 4 workers, and 2 machines with 4 each have 8" in error
    assert len(chameleon.joined) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nnodes", "1:4", "--nproc-per-node", "4"],
        ["--nnodes", ":2", "--nproc-per-node", "4"],
        ["--nnodes", "0", "--nproc-per-node", "4"],
        ["--nproc-per-node", "gpu"],
        ["--nproc-per-node", "0"],
        [],
        ["--workers", "4", "--run", "r"],
        ["--workers", "4", "--rdzv_backend=c10d"],
        ["--workers", "4", "--rdzv_id=7"],
        ["--workers", "4", "--standalone"],
        ["--workers", "4", "--max-restarts", "3"],
        ["--workers", "4", "--no-python", "train"],
        ["--workers", "4", "-r", "3"],
        ["--workers", "4", "train.py", "--lr", "1"],
    ],
)
def test_what_agents_do_not_take_from_torchrun_is_refused_with_a_remedy(
    chameleon: CommandLine, arguments: list[str]
) -> None:
    given = ["--rdzv-endpoint", "h:1", "--token", "t", *arguments]
    message(chameleon.refused("agent", *given))
    assert not chameleon.joined


def test_a_run_that_is_not_live_cannot_be_joined(chameleon: CommandLine, run: RunDirectory) -> None:
    assert "not live" in chameleon.refused("agent", "--run", run.path, "--workers", "4", "--wait-s", "0")


def the_token_is_wrong() -> None:
    raise ControlError("wrong join token")


def test_an_agent_waits_for_its_coordinator(chameleon: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    chameleon.knocks = [nothing_listens] * 7
    assert chameleon("agent", "--coordinator", "10.0.0.1:4000", "--workers", "4", "--token", "t") == 0
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert chameleon.capture.readouterr().out == "waiting up to 300 s for the coordinator at 10.0.0.1:4000\n"


def test_a_run_is_waited_for_and_its_address_read_again(
    chameleon: CommandLine, run: RunDirectory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """First there is no directory, then no coordinator, then a new one at the port of the one that is gone."""
    late = RunDirectory(tmp_path / "late")

    def appear(_: float) -> None:
        if run.path.exists():
            run.path.rename(late.path)
        else:
            address = "10.0.0.1:4000" if not late.control_file.exists() else "10.0.0.2:5000"
            late.write_control(ControlAddress(address=address, token="secret", pid=1))

    monkeypatch.setattr(time, "sleep", appear)
    chameleon.knocks = [the_token_is_wrong]
    assert chameleon("agent", "--run", late.path, "--workers", "4") == 0
    assert [joined["coordinator"] for joined in chameleon.joined] == ["10.0.0.2:5000"]


def end(run: RunDirectory, status: RunStatus) -> None:
    """Leave what a coordinator leaves that has ended the run."""
    with FileQueue() as files:
        state = replace(new_state(), ended=(status, "because"))
        Journal(run.journal_file(1), files).begin(state, Moment(unix_s=1.0, monotonic_s=1.0))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of a clock that only sleeping moves."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("command", ["agent", "worker", "coordinator"])
def test_a_run_that_is_finished_is_not_waited_for(
    chameleon: CommandLine, run: RunDirectory, command: str, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in RANKS.items():
        monkeypatch.setenv(name, value)
    end(run, "finished")
    flag = "--standby" if command == "coordinator" else "--run"
    assert chameleon(command, flag, str(run.path), *["--workers", "4"] * (command == "agent")) == 0
    assert chameleon.capture.readouterr().out.endswith(f"{run.path}: the run is over: all of its steps are done\n")
    assert clock[0] < 10.0
    assert not chameleon.joined


def test_a_finished_run_that_is_being_resumed_is_waited_for(
    chameleon: CommandLine, run: RunDirectory, clock: list[float]
) -> None:
    end(run, "finished")
    lock = RunLock()
    lock.take(run.path)
    assert "not live" in chameleon.refused("agent", "--run", run.path, "--workers", "4")
    assert clock[0] > 290.0
    lock.release()


@pytest.mark.parametrize(
    ("directory", "lack"),
    [("missing", ", where there is no directory yet"), ("empty", ", which is not a run directory yet"), ("run", "")],
)
def test_it_is_said_at_once_why_a_run_is_waited_for(
    chameleon: CommandLine, run: RunDirectory, clock: list[float], directory: str, lack: str
) -> None:
    path = run.path.with_name(directory)
    run.path.with_name("empty").mkdir()
    assert chameleon("coordinator", "--standby", str(path)) == 2
    captured = chameleon.capture.readouterr()
    assert captured.out == f"waiting up to 300 s for the coordinator of {path}{lack}\n"
    message(captured.err)
    assert clock[0] > 290.0


def test_a_run_that_was_terminated_may_be_resumed(
    chameleon: CommandLine, run: RunDirectory, clock: list[float]
) -> None:
    end(run, "terminated")
    assert chameleon("agent", "--run", str(run.path), "--workers", "4") == 2
    captured = chameleon.capture.readouterr()
    assert captured.out == f"waiting up to 300 s for the coordinator of {run.path}, which is terminated\n"
    assert clock[0] > 290.0


def test_a_wrong_token_is_not_waited_for(chameleon: CommandLine) -> None:
    chameleon.knocks = [the_token_is_wrong]
    assert chameleon("agent", "--coordinator", "10.0.0.1:4000", "--workers", "4", "--token", "t") == 1
    assert chameleon.capture.readouterr().err == "chameleon agent: wrong join token\n"


def test_the_wait_has_an_end(chameleon: CommandLine) -> None:
    chameleon.knocks = [nothing_listens]
    arguments = ("--coordinator", "10.0.0.1:4000", "--workers", "4", "--token", "t", "--wait-s", "0.05")
    assert chameleon("agent", *arguments) == 1
    error = chameleon.capture.readouterr().err
    assert error.startswith("chameleon agent: no coordinator answers at 10.0.0.1:4000 within")


def test_tls_is_that_of_the_run_or_as_given(chameleon: CommandLine, run: RunDirectory, tmp_path: Path) -> None:
    run.write_control(ControlAddress(address="10.0.0.1:4000", token="secret", pid=1, tls=run.tls))
    moved = run.path.rename(tmp_path / "moved")
    assert chameleon("agent", "--run", str(moved), "--workers", "4") == 0
    assert chameleon("agent", "--run", str(moved), "--workers", "4", "--tls", "/etc/other") == 0
    assert chameleon("agent", "--coordinator", "h:1", "--token", "t", "--workers", "4", "--tls", "/etc/other") == 0
    assert [joined["tls"] for joined in chameleon.joined] == [moved / "tls", *[Path("/etc/other")] * 2]


def test_the_token_may_come_from_the_environment(chameleon: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAMELEON_TOKEN", "secret")
    assert chameleon("agent", "--coordinator", "10.0.0.1:4000", "--workers", "4", "--host", "10.0.0.2") == 0
    assert chameleon.joined[0]["token"] == "secret"


def test_a_worker_takes_its_place_from_the_environment(chameleon: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in RANKS.items():
        monkeypatch.setenv(name, value)
    assert chameleon("worker", "--coordinator", "10.0.0.1:4000", "--token", "secret") == 0
    assert chameleon.joined == [{"coordinator": "10.0.0.1:4000", "token": "secret", "tls": None, "rank": "3"}]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--coordinator", "10.0.0.1:4000", "--workers", "4"],
        ["--coordinator", "10.0.0.1", "--workers", "4", "--token", "t"],
        ["--coordinator", "10.0.0.1:4000", "--workers", "0", "--token", "t"],
        ["--workers", "4", "--token", "t"],
        ["--workers", "4", "--run", "r", "--coordinator", "10.0.0.1:4000"],
        ["--run", "r"],
        ["--run", "r", "--workers", "4", "--wait-s", "nan"],
        ["--coordinator", "h:1", "--token", "t", "--workers", "4", "--standby"],
        ["--run", "r", "--workers", "4", "--drained-exit-code", "256"],
    ],
)
def test_an_agent_that_cannot_join_says_why(chameleon: CommandLine, arguments: list[str]) -> None:
    message(chameleon.refused("agent", *arguments))
    assert not chameleon.joined


@pytest.mark.parametrize("changed", [{"RANK": None}, {"RANK": None, "LOCAL_RANK": "x"}, {"RANK": "8"}])
def test_a_worker_without_its_place_says_so(
    chameleon: CommandLine, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str | None]
) -> None:
    for name, value in {**RANKS, **changed}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    message(chameleon.refused("worker", "--coordinator", "10.0.0.1:4000", "--token", "t"))


@pytest.fixture
def started_twice(run: RunDirectory) -> list[str | Path]:
    """Arguments of a coordinator that a scheduler starts again, whatever became of its run."""
    return ["coordinator", "--output-dir", run.path, "--control.host", "127.0.0.2", "--resume", "auto", "--or-standby"]


def test_a_coordinator_that_is_started_again_stands_by_if_another_one_leads(
    chameleon: CommandLine, run: RunDirectory, started_twice: list[str | Path]
) -> None:
    run.write_control(ControlAddress(address="127.0.0.1:4000", token="secret", pid=os.getpid()))
    assert chameleon(*started_twice) == 0
    assert chameleon.joined == [{"stands_by_for": run.path, "host": "127.0.0.2"}]
    assert "this coordinator stands by" in chameleon.capture.readouterr().out


def test_a_coordinator_that_is_started_again_gives_way_to_one_that_takes_over(
    chameleon: CommandLine, run: RunDirectory, started_twice: list[str | Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At first the coordinator of the run is lost, and none leads."""
    run.write_control(ControlAddress(address="127.0.0.1:4000", token="secret", pid=_NO_PROCESS))
    chameleon.knocks = [nothing_listens]
    leader = ControlAddress(address="127.0.0.3:4000", token="secret", pid=os.getpid())
    monkeypatch.setattr(time, "sleep", lambda _: run.write_control(leader))
    assert chameleon(*started_twice) == 0
    assert chameleon.joined == [{"stands_by_for": run.path, "host": "127.0.0.2"}]


def test_a_coordinator_that_is_started_again_leads_if_no_other_does(
    chameleon: CommandLine, run: RunDirectory, started_twice: list[str | Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write_control(ControlAddress(address="127.0.0.1:4000", token="secret", pid=_NO_PROCESS))
    chameleon.knocks = [nothing_listens] * 2
    now_s = iter(range(0, 1000, 10))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr("chameleon_ft.session.start.time.monotonic", lambda: float(next(now_s)))
    assert chameleon(*started_twice) == 0
    assert [launched.run.path for launched in chameleon.launched] == [run.path]


@pytest.mark.parametrize("missing", ["--resume", "--output-dir"])
def test_a_coordinator_that_may_stand_by_needs_a_run_that_it_finds_again(chameleon: CommandLine, missing: str) -> None:
    given = {"--resume": "auto", "--output-dir": "run"}
    arguments = [word for flag, value in given.items() if flag != missing for word in (flag, value)]
    assert "--or-standby: needs --resume auto and --output-dir" in chameleon.refused(
        "coordinator", "--or-standby", *arguments
    )
