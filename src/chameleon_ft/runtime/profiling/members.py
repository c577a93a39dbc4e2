"""Processes that take part in an exchange, each with the communicators of a rank."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext

from chameleon_ft.config import RunConfig
from chameleon_ft.control.wire.address import join_address
from chameleon_ft.errors import ChameleonError, ControlError
from chameleon_ft.runtime.communicators import Channel, Membership, communicators_for
from chameleon_ft.runtime.communicators.c10d import host_store
from chameleon_ft.runtime.device import claim_device
from chameleon_ft.runtime.process import (
    end_now,
    end_with_parent,
    end_with_starter,
    ignore_interrupts,
    interrupts_held,
    signals_blocked,
)
from chameleon_ft.runtime.profiling.exchange import Exchange, Exchanged, run_exchange

__all__ = ["Member", "memberships", "rendezvous_store", "run_members"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One process of an exchange.

    Attributes:
        config: names the backend, the device and the timeouts.
        address: address of this host by which the others reach it.
        local_index: number of this process on its host, which picks its accelerator.
    """

    config: RunConfig
    membership: Membership
    exchange: Exchange
    address: str
    local_index: int


def memberships(workers: int, reducing: Sequence[int], *, store: str) -> list[Membership]:
    """The memberships of `workers` workers, of which the first so many, for each number in `reducing`, reduce."""
    members = tuple(range(workers))
    ends = (Channel(0, 1, forward=True), Channel(1, 0, forward=True))
    return [
        Membership(
            generation=1,
            worker=worker,
            members=members,
            groups=tuple(members[:count] for count in reducing),
            channels=ends if worker < 2 else (),
            store=store,
        )
        for worker in members
    ]


@contextmanager
def rendezvous_store(host: str, *, timeout_s: float) -> Iterator[str]:
    """Serve a store on `host` inside the block, which gets its address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    store = host_store(host, port, listener.detach(), timeout_s=timeout_s)
    try:
        yield join_address(host, port)
    finally:
        del store


def run_members(members: Sequence[Member]) -> Exchanged:
    """Run one process for each member and return what the first has seen. Afterwards none of them is left.

    Raises:
        ChameleonError: one of them could not take part.
    """
    context = _fork_server()
    pipes: list[Connection] = []
    processes = []
    try:
        for member in members:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_member_main, args=(member, theirs), daemon=True)
            with interrupts_held():  # or one that has started would not be among those to end
                process.start()
                processes.append(process)
            theirs.close()
            pipes.append(ours)
        return _answers(pipes)[0]
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()


def _answers(pipes: Sequence[Connection]) -> list[Exchanged]:
    """Wait for all, and no longer than until the first error: those that need the one that failed hang meanwhile."""
    found: dict[int, Exchanged] = {}
    while len(found) < len(pipes):
        waiting = [pipe for number, pipe in enumerate(pipes) if number not in found]
        for pipe in multiprocessing.connection.wait(waiting):
            assert isinstance(pipe, Connection)
            found[pipes.index(pipe)] = _answer(pipe)
    return [found[number] for number in range(len(pipes))]


def _answer(pipe: Connection) -> Exchanged:
    try:
        found = pipe.recv()
    except EOFError:
        raise ControlError("a process that measures links has ended without a word") from None
    if isinstance(found, ChameleonError):
        raise found
    assert isinstance(found, Exchanged)
    return found


def _member_main(member: Member, pipe: Connection) -> None:
    ignore_interrupts()
    end_with_parent()
    end_with_starter()
    found: Exchanged | ChameleonError
    try:
        device = claim_device(member.config, member.local_index)
        communicators = communicators_for(member.config, address=member.address)
        try:
            communicators.open(member.membership)
            found = run_exchange(member.exchange, communicators, worker=member.membership.worker, device=device)
        finally:
            communicators.close()
    except ChameleonError as error:
        found = ControlError(f"links cannot be measured: {error}")
    with contextlib.suppress(OSError):  # interrupted meanwhile, nobody may be there to hear it
        pipe.send(found)
    pipe.close()
    end_now(0)


def _fork_server() -> ForkServerContext:
    """Return a fork server that has torch loaded, and have it begin at once; a Ctrl-C means nothing to it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    # Torch would say of every connection to the store that it does not know the name of its other end.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    resource_tracker.ensure_running()  # its own start would lift the block
    with signals_blocked(signal.SIGINT):
        forkserver.ensure_running()
    return context
