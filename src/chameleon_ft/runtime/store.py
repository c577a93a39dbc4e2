"""The rendezvous store: a process of its own beside the coordinator, never a rank, since any rank may be lost."""

from __future__ import annotations

import contextlib
import socket
from multiprocessing.connection import Connection

from chameleon_ft.runtime.communicators.c10d import host_store
from chameleon_ft.runtime.process import end_with_parent, ignore_interrupts

__all__ = ["store_main"]

_BACKLOG = 1024
_TIMEOUT_S = 30.0


def store_main(host: str, pipe: Connection) -> None:
    """Serve a store on `host`, send its port through `pipe`, and end when the other end of `pipe` is closed."""
    end_with_parent()
    ignore_interrupts()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Torch would listen on every address of the machine.
    listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
    port = listener.getsockname()[1]
    store = host_store(host, port, listener.detach(), timeout_s=_TIMEOUT_S)
    with contextlib.suppress(EOFError, OSError):
        pipe.send(port)
        pipe.recv()
    del store
