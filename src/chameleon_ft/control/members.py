"""Who is in the run: workers with their connections, and the hosts that run them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from chameleon_ft.control.messages import Hello, HostHello, Kill, Message, Spawn
from chameleon_ft.control.server import Peer
from chameleon_ft.errors import ControlError

__all__ = ["Members", "Worker"]


@dataclass(slots=True)
class Worker:
    """A worker of the run."""

    id: int
    supervisor: Peer | None = None
    """Who started it; None where a cluster's launcher did."""
    peer: Peer | None = None
    """Its control connection, once it has joined and until that closes."""
    host: str = ""
    lost: bool = False
    exit_code: int | None = None
    crash: str | None = None
    """The error it reported before it ended."""


@dataclass(slots=True)
class Members:
    """All workers of the run, by number; fixed from the start, as is which host runs which."""

    count: int
    _workers: dict[int, Worker] = field(default_factory=dict)
    _supervisors: dict[Peer, str] = field(default_factory=dict)
    _fenced: set[Peer] = field(default_factory=set)

    def add_host(self, peer: Peer, hello: HostHello) -> None:
        """Give a supervisor the lowest free workers and have it start them. Raises ControlError if none is free."""
        free = [worker for worker in range(self.count) if worker not in self._workers][: hello.slots]
        if not free:
            raise ControlError(f"host {hello.host} is not needed: all {self.count} workers have a place")
        self._supervisors[peer] = hello.host
        for worker in free:
            self._workers[worker] = Worker(worker, supervisor=peer)
        peer.send(Spawn(workers=tuple(free)))

    def join(self, peer: Peer, hello: Hello) -> None:
        """Take in a rank. Raises ControlError that says why it cannot be."""
        if not 0 <= hello.worker < self.count:
            raise ControlError(f"worker {hello.worker} does not exist: the run has {self.count}, numbered from 0")
        worker = self._workers.setdefault(hello.worker, Worker(hello.worker))
        if worker.peer is not None or worker.lost:
            raise ControlError(f"worker {hello.worker} {'is lost' if worker.lost else 'has joined already'}")
        worker.peer = peer
        worker.host = hello.host

    def worker_of(self, peer: Peer) -> Worker | None:
        """Return the worker whose control connection this is."""
        return next((worker for worker in self._workers.values() if worker.peer is peer), None)

    def __getitem__(self, worker: int) -> Worker:
        return self._workers[worker]

    def __contains__(self, worker: int) -> bool:
        return worker in self._workers

    def is_supervisor(self, peer: Peer) -> bool:
        return peer in self._supervisors

    def is_fenced(self, peer: Peer) -> bool:
        """Whether this was the connection of a worker that is lost; what is still read from it counts for nothing."""
        return peer in self._fenced

    def started_by(self, peer: Peer, worker: int) -> Worker:
        """Return a worker that this supervisor has started. Raises ControlError where it has not."""
        found = self._workers.get(worker)
        if found is None or found.supervisor is not peer:
            raise ControlError(f"worker {worker} was not started by this supervisor")
        return found

    @property
    def supervisors(self) -> tuple[Peer, ...]:
        return tuple(self._supervisors)

    def remove_supervisor(self, peer: Peer) -> str | None:
        """Forget a supervisor whose connection has ended; return its host, None where it was not one."""
        for worker in self._workers.values():
            if worker.supervisor is peer:
                worker.supervisor = None
        return self._supervisors.pop(peer, None)

    def live(self) -> list[int]:
        """Workers that have joined and are not lost, ascending."""
        return [worker.id for worker in self if worker.peer is not None and not worker.lost]

    def hosts(self) -> dict[int, str]:
        """The host of every worker that has ever joined."""
        return {worker.id: worker.host for worker in self if worker.host}

    def __iter__(self) -> Iterator[Worker]:
        return iter(sorted(self._workers.values(), key=lambda worker: worker.id))

    def tell(self, message: Message) -> None:
        """Send to every live worker."""
        for worker in self:
            if worker.peer is not None and not worker.lost:
                worker.peer.send(message)

    def send(self, worker: int, message: Message) -> None:
        """Send to one worker, if its connection is there."""
        if (peer := self._workers[worker].peer) is not None:
            peer.send(message)

    def fence(self, worker: Worker) -> None:
        """See to it that a lost worker takes no further part: its process is ended and its connection dropped."""
        worker.lost = True
        if worker.supervisor is not None:
            worker.supervisor.send(Kill(worker=worker.id))
        if worker.peer is not None:
            worker.peer.drop()
            self._fenced.add(worker.peer)
            worker.peer = None
