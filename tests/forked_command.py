# ruff: noqa: F401
"""A `chameleon` command in a process that has loaded all that the commands need; see `tests.forked`."""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import os
import pkgutil
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn
from unittest import mock

import chameleon_ft.launch
import chameleon_ft.worker.preload
from chameleon_ft.cli import commands, main
from chameleon_ft.host import fork_server
from chameleon_ft.host.fork_server import end_with
from chameleon_ft.launch import background
from chameleon_ft.launch.processes import SIGNALS, load_solvers
from chameleon_ft.worker import shared_reads

_CLONE_NEWNET = 0x40000000  # <linux/sched.h>
_MAX_FILES = os.sysconf("SC_OPEN_MAX")

for _module in pkgutil.iter_modules(commands.__path__, f"{commands.__name__}."):
    importlib.import_module(_module.name)
load_solvers()
importlib.import_module("s3fs")  # by every process of a run with a store


def run_command(
    output: int,
    begins: int,
    *,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    directory: Path,
    network: str | None,
) -> NoReturn:
    """Run a command as `python -m chameleon_ft` does, in a session of its own.

    Args:
        output: descriptor of its output and errors.
        begins: descriptor that is closed once it leads its session.
    """
    os.setsid()
    os.close(begins)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    os.chdir(directory)
    if network is not None:
        _enter(network)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv[1:] = arguments
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    with mock.patch.object(fork_server, "_Server", _ForkedServer), mock.patch.object(background, "_NICENESS", 0):
        try:
            sys.exit(main())
        finally:  # as an interpreter ends
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()


def _enter(network: str) -> None:
    """Enter a network namespace, as `ip netns exec` does."""
    with Path("/run/netns", network).open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {network}")


class _ForkedServer(fork_server._Server):
    """A fork server that is forked from a process that has loaded all that it needs, unless that has other threads."""

    def _start(self, descriptor: int, preload: str) -> subprocess.Popen[bytes]:
        if len(list(Path("/proc/self/task").iterdir())) > 1:
            return super()._start(descriptor, preload)
        return subprocess.Popen(
            ["a fork server"],
            stdin=subprocess.DEVNULL,
            pass_fds=(descriptor,),
            restore_signals=False,
            preexec_fn=partial(_serve, descriptor, os.getpid(), preload),  # which never returns to execute anything
        )


def _serve(descriptor: int, starter: int, preload: str) -> NoReturn:
    """Be a fork server, with no files and no handlers of signals of the process that it is forked from."""
    code = 1
    try:
        end_with(starter)
        # Loaders share one file, which is opened when its module is imported.
        first, second = sorted((descriptor, shared_reads._BOARD))
        for begin, end in ((3, first), (first + 1, second), (second + 1, _MAX_FILES)):
            os.closerange(begin, end)
        gc.enable()
        gc.collect()
        gc.freeze()  # what is left of that process must close none of the files that are opened here
        for number in SIGNALS:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        fork_server._serve(descriptor, starter, preload)
        code = 0
    except BaseException:  # noqa: BLE001 - the process ends with it
        traceback.print_exc()
    finally:
        os._exit(code)
