"""The lock of a run directory, between processes."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from chameleon_ft.errors import ConfigError, LiveRunError
from chameleon_ft.storage.run_lock import RunLock
from tests.golden import refused

HOLD = """
import errno
import fcntl
import sys
from pathlib import Path
from chameleon_ft.errors import LiveRunError
from chameleon_ft.storage.run_lock import RunLock

def no_locks(*_):
    raise OSError(errno.ENOLCK, "No locks available")

if sys.argv[2] == "False":
    fcntl.flock = no_locks
lock = RunLock()
try:
    lock.take(Path(sys.argv[1]))
except LiveRunError:
    print("refused", flush=True)
else:
    print("held", flush=True)
    sys.stdin.read()
"""


def no_locks(*_: object) -> NoReturn:
    raise OSError(errno.ENOLCK, "No locks available")


def holding(directory: Path, *, has_locks: bool) -> subprocess.Popen[str]:
    """Start a process that takes the lock of a directory, and holds it until its input ends."""
    command = [sys.executable, "-c", HOLD, str(directory), str(has_locks)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("has_locks", [True, False])
def test_of_processes_that_take_it_at_once_one_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_locks: bool
) -> None:
    if not has_locks:
        monkeypatch.setattr(fcntl, "flock", no_locks)
    directory = tmp_path / "runs" / "one"
    processes = [holding(directory, has_locks=has_locks) for _ in range(4)]
    try:
        assert sorted(map(said, processes)) == ["held", "refused", "refused", "refused"]
        with refused(LiveRunError):
            RunLock().take(directory)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    lock = RunLock()
    lock.take(directory)  # a process that was killed holds nothing
    assert RunLock.is_alone_in(directory)
    lock.release()
    assert not directory.exists()
    assert directory.parent.exists()


def test_where_there_are_no_locks_a_process_of_another_host_is_a_rival(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", no_locks)
    directory, lock = tmp_path / "run", RunLock()
    lock.take(directory)
    assert lock.rival() is None
    (directory / "lock").write_text("process 7 on elsewhere\n")
    assert lock.rival() == "process 7 on elsewhere"
    directory.rename(tmp_path / "before")
    assert lock.rival() is None, "it may have been removed by this process"
    (tmp_path / "before").rename(directory)
    lock.release()
    assert (directory / "lock").exists(), "it belongs to the other one"
    assert lock.rival() is None


def test_where_there_are_no_locks_one_that_is_refused_leaves_the_file_of_another_host_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", no_locks)
    (tmp_path / "lock").write_text("process 7 on elsewhere\n")
    lock = RunLock()
    lock.take(tmp_path)
    lock.release()
    assert (tmp_path / "lock").read_text() == "process 7 on elsewhere\n"


def test_a_directory_with_other_files_stays(tmp_path: Path) -> None:
    lock = RunLock()
    lock.take(tmp_path)
    (tmp_path / "config.toml").touch()
    assert RunLock.names_in(tmp_path) == {"config.toml"}
    assert not RunLock.is_alone_in(tmp_path)
    lock.release()
    assert [each.name for each in tmp_path.iterdir()] == ["config.toml"]
    lock.release()


def test_a_directory_that_is_renamed_is_free_for_another_run(tmp_path: Path) -> None:
    lock, other = RunLock(), RunLock()
    lock.take(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "before")
    other.take(tmp_path / "run")
    with pytest.raises(LiveRunError):
        lock.take(tmp_path / "run")
    other.take(tmp_path / "before")
    other.release()


def test_a_process_that_is_forked_does_not_hold_it(tmp_path: Path) -> None:
    lock = RunLock()
    lock.take(tmp_path)
    readable, writable = os.pipe()
    if (child := os.fork()) == 0:
        os.close(writable)
        os.read(readable, 1)  # until the parent is done
        os._exit(0)
    try:
        with pytest.raises(LiveRunError):
            RunLock().take(tmp_path)
        lock.release()
        after = RunLock()
        after.take(tmp_path)
        after.release()
    finally:
        os.close(readable)
        os.close(writable)
        os.waitpid(child, 0)


def test_a_place_where_no_directory_can_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with refused(ConfigError):
        RunLock().take(tmp_path / "file" / "run")
