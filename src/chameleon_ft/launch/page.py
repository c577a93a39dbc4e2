"""The page of a run, in a process of its own: no browser and no scrape can delay a run."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO, cast

from chameleon_ft.config import FailureKind
from chameleon_ft.errors import ConfigError
from chameleon_ft.host.fork_server import Terminated
from chameleon_ft.launch.live_run import checkpoint, drain, inject, stop
from chameleon_ft.protocol.address import join_address, split_address
from chameleon_ft.storage.files import RunDirectory, replace_file

_NEEDED: Final = ("starlette", "uvicorn", "prometheus_client")
# Ranks that compute on all cores come first.
_NICENESS: Final = 10
# Browsers may still be sent how the run ended for this time.
_LAST_NEWS_S: Final = 2
_END_S: Final = 10.0
# A page tells a scraper how its run has ended for this time.
_SCRAPE_S: Final = 30.0
_NOTICE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class _RunActions:
    """Requests of the page to the coordinator of the run."""

    run: RunDirectory

    def inject(self, *, worker: int, kind: str, factor: float | None) -> str:
        """Make a worker fail. Raises ChameleonError if it cannot."""
        inject(self.run, worker=worker, kind=cast("FailureKind", kind), factor=factor)
        return f"worker {worker}: {kind}"

    def drain(self, *, workers: tuple[int, ...], host: str | None) -> str:
        """Take workers out of the run. Raises ChameleonError if the coordinator refuses."""
        leaving = drain(self.run, workers=workers, host=host)
        return f"draining {', '.join(map(str, leaving))}: they train until a plan without them is in force"

    def checkpoint(self) -> str:
        """Write a checkpoint now. Raises ChameleonError if the coordinator refuses."""
        return f"a checkpoint is written after step {checkpoint(self.run)} or the next one"

    def finish(self) -> str:
        """End the run with a checkpoint. Raises ChameleonError if the coordinator refuses."""
        stop(self.run)
        return "the run ends after this step with a checkpoint"


class PageServer:
    """The address of a page, which is taken before anything else is begun.

    Args:
        address: HOST:PORT, or PORT on this machine alone; port 0: any that is free.

    Raises:
        ConfigError: it is taken, or libraries are missing.
    """

    def __init__(self, address: str) -> None:
        if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
            raise ConfigError(
                f"--page: {', '.join(missing)} is not installed; run `pip install 'chameleon-ft[page]'`, or leave out "
                "the page"
            )
        host, port = split_address(address if ":" in address else f"127.0.0.1:{address}")
        try:
            family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._listener = socket.create_server(place[:2], family=family)
        except OSError as error:
            reason = (error.strerror or str(error)).partition(" (while")[0]
            raise ConfigError(
                f"--page {address}: cannot listen there: {reason}; give another HOST:PORT, or port 0 "
                "for any that is free"
            ) from None
        self.host = host
        self.address = join_address(host, self._listener.getsockname()[1])
        self.token = secrets.token_urlsafe(16)
        self._announced: dict[str, object] = {}

    def close(self) -> None:
        """Give the address back; a process that serves the page keeps it."""
        self._listener.close()

    def announce(self, run: RunDirectory) -> None:
        """Print the address, and write it with the token to a file that only the owner can read.

        If the file is there already, the run has or had another page: this one takes its token, so that browsers that
        come from there can still act.
        """
        file, is_known = run.path / "page.json", False
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            self.token, is_known = str(json.loads(file.read_text(encoding="utf-8"))["token"]), True
        values = {"address": self.address, "token": self.token, "host": socket.gethostname(), "pid": os.getpid()}
        self._announced = values
        place = f"the token for its buttons is in {file}"
        try:
            replace_file(file, json.dumps(values) + "\n", mode=0o600)
        except OSError as error:
            # A run of another user, or on a read-only disk, is shown all the same.
            if not is_known:
                place = (
                    f"its buttons need a token, which cannot be written to {file} ({error.strerror}); to use them, run "
                    f"`chameleon page {run.path}` on a terminal, which shows the token"
                )
        url = f"http://{self.address}/"
        if sys.stdout.isatty():
            print(f"page: {url}#token={self.token}", flush=True)
        else:
            # The token goes to no log.
            print(f"page: {url} ({place})", flush=True)

    @contextmanager
    def beside(self, run: RunDirectory) -> Iterator[None]:
        """Serve the page of a run in another process inside the block."""
        self.announce(run)
        descriptor = self._listener.fileno()
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(run.path), self.host, str(descriptor)],
            pass_fds=[descriptor],
            # It carries the token, too, because command lines can be read by all users.
            stdin=subprocess.PIPE,
            # Ctrl-C ends the run, and then its page.
            start_new_session=True,
        )
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.write(f"{self.token}\n".encode())
            process.stdin.flush()
        self.close()
        try:
            yield
            with contextlib.suppress(KeyboardInterrupt, Terminated):
                _await_scrape(process)
        finally:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            with contextlib.suppress(OSError):
                process.stdin.close()
            self._withdraw(run)

    def serve(self, run: RunDirectory) -> int:
        """Serve the page of a run in this process until it is interrupted. Returns the exit code."""
        self.announce(run)
        try:
            serve_page(run, self._listener, host=self.host, token=self.token)
        finally:
            self._withdraw(run)
        return 0

    def _withdraw(self, run: RunDirectory) -> None:
        """Remove the file of `announce`, unless another page has written it since."""
        file = run.path / "page.json"
        with contextlib.suppress(OSError, ValueError):
            if json.loads(file.read_text(encoding="utf-8")) == self._announced:
                file.unlink()


def _await_scrape(process: subprocess.Popen[bytes]) -> None:
    """Wait until the end of the run has been scraped from its page, or `_SCRAPE_S`."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        # Tells the page that its run's command is at its end.
        process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_NOTICE_S)
        return
    print(f"page: stays until /metrics is scraped, at most {_SCRAPE_S:.0f} s; Ctrl-C ends it now", flush=True)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_SCRAPE_S + _NOTICE_S)


def serve_page(
    run: RunDirectory, listener: socket.socket, *, host: str, token: str, until: TextIO | None = None
) -> None:
    """Serve the page of a run until a signal ends it.

    Args:
        listener: listens on the address of the page.
        host: The host of that address.
        token: needed for actions.
        until: a file at whose end the page ends, too: once the end of the run has been scraped, or after `_SCRAPE_S`.
    """
    import uvicorn

    from chameleon_ft.report.follower import RunWatcher
    from chameleon_ft.report.page.app import page_app
    from chameleon_ft.report.page.metrics import exposition

    # A browser's mistakes are not for the terminal of the run.
    log = logging.getLogger("uvicorn")
    log.addHandler(logging.FileHandler(run.logs / "page.log", delay=True))
    log.propagate = False
    has_told = threading.Event()

    def scraped(is_over: bool) -> None:
        (has_told.set if is_over else has_told.clear)()

    app = page_app(RunWatcher(run), token=token, actions=_RunActions(run), host=host, scraped=scraped)
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="off",
        access_log=False,
        server_header=False,
        log_config=None,
        timeout_graceful_shutdown=_LAST_NEWS_S,
        backlog=128,
    )
    server = uvicorn.Server(config)

    def end_after_the_run(commands: TextIO) -> None:
        commands.read()
        watcher = RunWatcher(run)
        watcher.update_readable()
        report = watcher.report()
        if report.is_over:
            with contextlib.suppress(OSError):
                replace_file(run.path / "metrics.prom", exposition(watcher.view, report)[0].decode(), mode=0o644)
        # A run that was ended from outside ends at once.
        if report.condition in ("finished", "failed"):
            has_told.wait(_SCRAPE_S)
        server.should_exit = True

    if until is not None:
        threading.Thread(target=end_after_the_run, args=[until], daemon=True).start()
    server.run(sockets=[listener])


def _main(path: str, host: str, descriptor: str) -> None:
    from chameleon_ft.host.fork_server import end_with_parent

    end_with_parent()
    os.nice(_NICENESS)
    token = sys.stdin.readline().strip()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(descriptor)) as listener:
        serve_page(RunDirectory.open(Path(path)), listener, host=host, token=token, until=sys.stdin)


if __name__ == "__main__":
    _main(*sys.argv[1:])
