"""The rendezvous store: a process of its own beside the coordinator, never a rank, since any rank may be lost."""

from __future__ import annotations

import socket
from datetime import timedelta
from multiprocessing.connection import Connection

import torch.distributed as dist

from chameleon_ft.runtime.process import end_with_parent, ignore_interrupts

__all__ = ["store_main"]

_BACKLOG = 1024


def store_main(host: str, pipe: Connection) -> None:
    """Serve a store on `host`, send its port through `pipe`, and end when the other end of `pipe` is closed."""
    end_with_parent()
    ignore_interrupts()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Torch would listen on every address of the machine.
    listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
        master_listen_fd=listener.detach(),
    )
    pipe.send(port)
    try:
        pipe.recv()
    except EOFError:
        pass
    del store
