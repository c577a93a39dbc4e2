"""The lock of a run directory: of several processes that start the same run, only one continues."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import weakref
from pathlib import Path
from typing import Final

from chameleon_ft.errors import ConfigError, LiveRunError

_NAME: Final = "lock"
_UNKNOWN: Final = "another process"


class RunLock:
    """Held by the process that starts a run, from before it looks at the directory until it ends, however it does.

    If the file system has locks (see flock(2)), it excludes processes of all hosts. Otherwise it excludes only those of
    the same user and network namespace: of several hosts, the last one gets it, `rival` tells the earlier ones, and the
    term that a coordinator claims decides soon after. Forked processes do not hold it.
    """

    _held: Final[weakref.WeakSet[RunLock]] = weakref.WeakSet()

    def __init__(self) -> None:
        self._descriptor: int | None = None
        # It holds the lock on this host if the file system has no locks.
        self._name: socket.socket | None = None
        self._file = Path()
        self._holder_before = ""

    def __del__(self) -> None:
        self._let_go()

    @property
    def directory(self) -> Path:
        """The directory that was locked last."""
        return self._file.parent

    @staticmethod
    def is_alone_in(directory: Path) -> bool:
        """Return whether a directory has the file of this lock and nothing else."""
        return directory.is_dir() and [each.name for each in directory.iterdir()] == [_NAME]

    @staticmethod
    def is_in(directory: Path) -> bool:
        """Return whether a process starts or runs the run of a directory, or was killed while it did."""
        return (directory / _NAME).exists()

    @staticmethod
    def names_in(directory: Path) -> frozenset[str]:
        """Return the names of the other files in a directory."""
        return frozenset(each.name for each in directory.iterdir()) - {_NAME}

    def take(self, directory: Path) -> None:
        """Lock a directory, in place of the one before if there is one; make it if there is none.

        Raises:
            LiveRunError: another process has locked it.
            ConfigError: the directory, or the file of the lock, cannot be made.
        """
        self._let_go()
        self._file = directory / _NAME
        try:
            while self._descriptor is None:
                directory.mkdir(parents=True, exist_ok=True)
                # It may be renamed or removed just now.
                with contextlib.suppress(FileNotFoundError):
                    self._descriptor = self._locked()
        except OSError as error:
            raise ConfigError(f"{directory}: cannot be locked: {error.strerror}; take another directory") from None
        self._held.add(self)

    def release(self) -> None:
        """Unlock the directory, and remove it if it is empty."""
        if self._descriptor is None:
            return
        if self.rival() is None:
            with contextlib.suppress(OSError):
                if self._name is not None and self._holder_before and not self._holder_before.endswith(_on_this_host()):
                    # It may still run.
                    _write(self._descriptor, self._holder_before)
                elif os.path.samestat(os.fstat(self._descriptor), self._file.stat()):
                    self._file.unlink()
                    self._file.parent.rmdir()
        self._let_go()

    def rival(self) -> str | None:
        """Return the process of another host that has taken the directory since, if the file system has no locks."""
        if self._name is None:
            return None
        try:
            holder = self._file.read_text(encoding="utf-8", errors="replace").strip()
        except FileNotFoundError:
            return None
        except OSError:
            holder = ""
        return None if holder == _this_process() else holder or _UNKNOWN

    def _locked(self) -> int | None:
        """Return the descriptor of the locked file; None if its name is another file's by now."""
        descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self._held_by(descriptor) from None
            # This file system has no locks.
            except OSError:
                self._name = self._bound_name(descriptor)
            if not os.path.samestat(os.fstat(descriptor), self._file.stat()):
                os.close(descriptor)
                self._let_go()
                return None
            self._holder_before = _holder_in(descriptor)
            _write(descriptor, _this_process())
        except BaseException:
            os.close(descriptor)
            self._let_go()
            raise
        return descriptor

    def _bound_name(self, descriptor: int) -> socket.socket:
        """Return a socket with a name that only one process can have at a time; see unix(7)."""
        file, name = os.fstat(descriptor), socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0chameleon-ft {os.getuid()} {file.st_dev} {file.st_ino}")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:  # a policy of this host: the claim of a term decides
                return name
            name.close()
            raise self._held_by(descriptor) from None
        return name

    def _held_by(self, descriptor: int) -> LiveRunError:
        return LiveRunError(self._file.parent, _holder_in(descriptor) or _UNKNOWN)

    def _let_go(self) -> None:
        if self._name is not None:
            self._name.close()
            self._name = None
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @classmethod
    def _forget(cls) -> None:
        """Close the locks of the parent in a process that it has forked; they stay its own."""
        for lock in cls._held:
            lock._let_go()


def _write(descriptor: int, holder: str) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{holder}\n".encode(), 0)


def _holder_in(descriptor: int) -> str:
    return os.pread(descriptor, 1000, 0).decode(errors="replace").strip()


def _this_process() -> str:
    return f"process {os.getpid()}{_on_this_host()}"


def _on_this_host() -> str:
    return f" on {socket.gethostname()}"


os.register_at_fork(after_in_child=RunLock._forget)
