"""The fork server, which has loaded what ranks need, so that a rank starts in milliseconds; and how processes end.

The processes that it forks are children of the process that asked for them and not of the server (see
PR_SET_CHILD_SUBREAPER in prctl(2)). So they end with that one and not with the server, which can be replaced at any
time, for example if it is stopped or killed.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final, NoReturn

from chameleon_ft.errors import ControlError
from chameleon_ft.host.processes import HostProcess, is_stopped

SAME_SIGNAL_S = 1.0
"""Seconds in which `terminations` count once: a batch system sends SIGTERM to all processes, and some pass it on."""

_LIBC = ctypes.CDLL(None)
_F_SETSIG = 10
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_TIMERSLACK = 29


class Terminated(SystemExit):
    """The end of this process by one of `terminations`, told apart from an exit of the code that it runs."""

    def __init__(self) -> None:
        super().__init__(os.EX_TEMPFAIL)


def exit_immediately(code: int) -> NoReturn:
    """End this process without the interpreter's own shutdown.

    The shutdown would wait for threads of libraries, or end in SIGABRT if one of them returns to the interpreter
    meanwhile.
    """
    for output in (sys.stdout, sys.stderr):
        with suppress(OSError):
            output.flush()
    os._exit(code)


def terminations() -> tuple[signal.Signals, ...]:
    """Return the signals that ask this process to end: SIGTERM, and SIGHUP unless that is ignored, as under nohup."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM,) if is_ignored else (signal.SIGTERM, signal.SIGHUP)


def end_with(parent: int) -> None:
    """Have the kernel end this process with its parent of that number, so that no process is left behind."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # The parent has ended before.
        os._exit(1)


def outlive_parent() -> None:
    """Undo `end_with`."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, 0)


def name_process(name: str) -> None:
    """Set the name of this process that ps and top show, up to 15 characters; processes that it forks have it, too."""
    _LIBC.prctl(_PR_SET_NAME, name.encode())


class Lifeline:
    """A pipe whose write end only this process holds: what ends with its holder, at any depth, watches the read end.

    Attributes:
        descriptor: the read end, to be passed to other processes for `end_with_holder`.
    """

    def __init__(self) -> None:
        self.descriptor, self._held = os.pipe()
        os.register_at_fork(after_in_child=self._let_go)

    def close(self) -> None:
        """End all processes that watch it."""
        self._let_go()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _let_go(self) -> None:
        if self._held >= 0:
            os.close(self._held)
            self._held = -1


def end_with_holder(descriptor: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the holder of a `Lifeline` ends.

    By default this ends the process, even if it is stopped.
    """
    # Its owner and signal belong to an open file, which other processes share until it is opened anew.
    own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own, _F_SETSIG, by)
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    with suppress(BlockingIOError):
        os.read(own, 1)
        # The holder has ended before.
        os._exit(1)


def end_with_parent() -> None:
    """Have the kernel end this process with its present parent."""
    end_with(os.getppid())


def ignore_interrupts() -> None:
    """Leave Ctrl-C, which a terminal sends to every process, to the coordinator."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def wake_on_time() -> None:
    """Have this thread's sleeps end on time, and not up to 50 us later, the kernel's default."""
    _LIBC.prctl(_PR_SET_TIMERSLACK, 1)


_PR_SET_CHILD_SUBREAPER: Final = 36
_ATTEMPTS: Final = 3
# A server that has loaded answers within this time. Loading may take long, depending on the file system.
_ANSWER_S: Final = 10.0
_LOOK_EVERY_S: Final = 0.5
_POLL_S: Final = 0.0005
_MAX_FILES: Final = 8
_LOADED: Final = b"loaded"
_REQUEST: Final = b"fork"
_BOOTSTRAP: Final = (
    "import sys, json; path, *arguments = json.loads(sys.argv[1]); sys.path[:] = path; "
    "from chameleon_ft.host.fork_server import _serve; _serve(*arguments)"
)

_logger = logging.getLogger(__name__)


class ForkServer:
    """Starts the server at once, in the background, and a new one whenever that does not answer.

    One that ends is replaced at once in an event loop in which it has forked before, so that the next process does not
    wait until another server has loaded.

    To be made in the main thread, because the kernel ends the server with the thread that started it.

    Args:
        preload: module that the server imports.
        blocked: signals that are blocked in it from before its first import, and in all processes that it forks. A
            terminal sends its Ctrl-C, and a batch system its SIGTERM, to every process of the group, but only the
            starter shall react.
    """

    def __init__(self, preload: str, blocked: Iterable[signal.Signals] = ()) -> None:
        self._preload = preload
        self._blocked = tuple(blocked)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._server = _Server(preload, self._blocked)
        atexit.register(self.end)

    @property
    def pid(self) -> int:
        """The number of the present server's process."""
        return self._server.pid

    def end(self) -> None:
        """End the present server; the processes that it has forked live on."""
        self._server.end()

    async def fork(self, function: str, *files: int, **arguments: Any) -> HostProcess:
        """Call a function in a new process, which ends with this one.

        Args:
            function: Its "module:name". Its positional arguments are its own descriptors of `files`.
            arguments: keyword arguments, which are pickled.

        Raises:
            ControlError: no server can be started, or none can fork.
        """
        call = pickle.dumps((function, arguments))
        for _ in range(_ATTEMPTS):
            server = self._server
            try:
                process = await server.fork(call, files)
            except ConnectionError as error:
                reason = str(error)
            else:
                self._watch(self._server)
                return process
            self._replace(server, reason)
        raise ControlError(
            f"no process can be started: {_ATTEMPTS} fork servers in a row failed, and the last one {reason}; look at "
            "the output above, and at the memory and the limits of processes (ulimit -u) of this host"
        )

    def _watch(self, server: _Server) -> None:
        def ended() -> None:
            loop.remove_reader(server.pidfd)
            # Otherwise the next one may not load, either.
            if server.has_loaded():
                self._replace(server, server.describe_end())
                self._watch(self._server)

        loop = asyncio.get_running_loop()
        loop.add_reader(server.pidfd, ended)

    def _replace(self, server: _Server, reason: str) -> None:
        """Replace a server, unless that has been done."""
        if server is self._server:
            _logger.warning("the fork server %s; it is replaced", reason)
            if server.pidfd >= 0:
                asyncio.get_running_loop().remove_reader(server.pidfd)
            server.end()
            self._server = _Server(self._preload, self._blocked)


class _Server:
    """One process that serves, and the socket to it."""

    def __init__(self, preload: str, blocked: Iterable[signal.Signals]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._is_loaded = False
        before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            self._process = self._start(theirs.fileno(), preload)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)

    def _start(self, descriptor: int, preload: str) -> subprocess.Popen[bytes]:
        """Start the process, which serves at that descriptor of a socket."""
        arguments = json.dumps([sys.path, descriptor, os.getpid(), preload])
        return subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP, arguments],
            stdin=subprocess.DEVNULL,
            pass_fds=(descriptor,),
            # The function takes no lock. The server could be stopped before it did this itself.
            preexec_fn=partial(end_with, os.getpid()),
        )

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._socket.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    async def fork(self, call: bytes, files: Iterable[int]) -> HostProcess:
        """Raises ConnectionError, which completes the sentence "the fork server", if the server is to be replaced."""
        ours, theirs = socket.socketpair()
        with ours:
            ours.setblocking(False)
            with theirs:
                self._request(theirs.fileno(), *files)
            answer = await self._answer(ours)
            kind, _, text = answer.partition(" ")
            if kind != "pid":
                raise ConnectionError(f"cannot fork: {text}")
            process = HostProcess(int(text))
            try:
                # Only with this does the process call the function; without, it ends.
                await asyncio.get_running_loop().sock_sendall(ours, call)
            except BaseException:
                process.kill()
                raise
        return process

    def _request(self, *files: int) -> None:
        try:
            socket.send_fds(self._socket, [_REQUEST], files)
        except BlockingIOError:
            raise ConnectionError("takes no requests") from None
        except OSError:
            raise ConnectionError(self.describe_end()) from None

    async def _answer(self, connection: socket.socket) -> str:
        """Return the answer to a request. Raises ConnectionError if the server ends or is stopped, or takes long."""
        loop = asyncio.get_running_loop()
        answering = asyncio.ensure_future(loop.sock_recv(connection, 1024))
        try:
            since_s, was_stopped = loop.time(), False
            while not answering.done():
                await asyncio.wait({answering}, timeout=_LOOK_EVERY_S)
                stopped = is_stopped(self.pid)
                if stopped and was_stopped and not answering.done():
                    raise ConnectionError("is stopped")
                was_stopped = stopped
                if not self.has_loaded():
                    since_s = loop.time()
                elif loop.time() - since_s > _ANSWER_S and not answering.done():
                    raise ConnectionError(f"does not answer for {_ANSWER_S:.0f} s")
            answer = answering.result()
        except OSError as error:
            raise ConnectionError(str(error)) from None
        finally:
            answering.cancel()
        if not answer:
            raise ConnectionError(self.describe_end())
        return answer.decode()

    def has_loaded(self) -> bool:
        """Return whether it has loaded what it forks."""
        if not self._is_loaded:
            with suppress(OSError):
                self._is_loaded = self._socket.recv(len(_LOADED)) == _LOADED
        return self._is_loaded

    def describe_end(self) -> str:
        """Complete the sentence "the fork server"."""
        try:
            return f"has ended with exit code {self._process.wait(1)}"
        except subprocess.TimeoutExpired:
            return "has closed its socket"


async def receive(pipe: Connection) -> Any:
    """Return what comes through `pipe`. Raises EOFError if its other end is closed."""
    readable, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(pipe.fileno(), readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(pipe.fileno())
    return pipe.recv()


# --- in the server ---------------------------------------------------------------------------------------------------


def _serve(descriptor: int, starter: int, preload: str) -> None:
    """Import the module, and fork at each request until the starter ends."""
    name_process("fork server")
    requests = socket.socket(fileno=descriptor)
    requests.set_inheritable(False)
    importlib.import_module(preload)
    # Or the first full collection in each process would copy the pages of all that is loaded, to write to its objects.
    gc.collect()
    gc.freeze()
    with suppress(OSError):
        requests.send(_LOADED)
        while True:
            request, files, _, _ = socket.recv_fds(requests, len(_REQUEST), _MAX_FILES)
            if not request:
                return
            connection = socket.socket(fileno=files[0])
            _fork_twice(requests, connection, files[1:], starter)
            connection.close()
            for file in files[1:]:
                os.close(file)


def _fork_twice(requests: socket.socket, connection: socket.socket, files: list[int], starter: int) -> None:
    """Fork a process whose parent ends at once, so that the kernel makes it a child of the starter."""
    try:
        if child := os.fork():
            os.waitpid(child, 0)
            return
    except OSError as error:
        connection.sendall(f"error {error.strerror}".encode())
        return
    parent = os.getpid()
    # Otherwise the starter would not see the end of the server.
    requests.close()
    try:
        if os.fork():
            os._exit(0)
    except OSError as error:
        connection.sendall(f"error {error.strerror}".encode())
        os._exit(1)
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    end_with(starter)
    name_process("chameleon")
    _call(connection, files)


def _call(connection: socket.socket, files: list[int]) -> NoReturn:
    """Say that this process is there, call the function that the answer names, and end."""
    code, call = 1, b""
    try:
        # The starter may not wait any more.
        with suppress(OSError), connection:
            connection.sendall(f"pid {os.getpid()}".encode())
            call = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        if call:
            function, arguments = pickle.loads(call)
            module, _, name = function.partition(":")
            getattr(importlib.import_module(module), name)(*files, **arguments)
            code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - the process ends with it
        traceback.print_exc()
    exit_immediately(code)
