"""Who is in the run: workers with their connections, and the hosts that run them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from chameleon_ft.control.wire.messages import Hello, HostHello, Kill, Message, Spawn
from chameleon_ft.control.wire.server import Peer
from chameleon_ft.errors import ControlError

__all__ = ["Members", "Worker"]


@dataclass(slots=True, eq=False)
class Worker:
    """One incarnation of a worker: after a loss, another process can take its number."""

    id: int
    incarnation: int = 1
    agent: Peer | None = None
    """Who started it; None where a cluster's launcher did, and where the agent is gone."""
    peer: Peer | None = None
    """Its control connection, once it has joined and until that closes."""
    host: str = ""
    takes_part: bool = False
    """Whether the generations reckon with it, as one that trains or as a spare."""
    first_step: int | None = None
    """Steps that had been committed when it could take part; None as long as it cannot."""
    lost: bool = False
    exit_code: int | None = None
    crash: str | None = None
    """The error it reported before it ended."""
    since: float = field(default_factory=time.time)
    """When this incarnation began, in Unix seconds."""

    @property
    def is_live(self) -> bool:
        return self.takes_part and self.peer is not None and not self.lost


@dataclass(slots=True)
class Members:
    """All workers of the run, by number. The first `count` train from the beginning; others may come later."""

    count: int
    _workers: dict[int, Worker] = field(default_factory=dict)
    _former: dict[tuple[int, int], Worker] = field(default_factory=dict)  # by number and incarnation
    _agents: dict[Peer, str] = field(default_factory=dict)
    _fenced: set[Peer] = field(default_factory=set)

    def add_host(self, peer: Peer, hello: HostHello) -> None:
        """Give an agent the lowest free workers and have it start them. Raises ControlError if none is free."""
        free = [worker for worker in range(self.count) if worker not in self._workers][: hello.slots]
        if not free:
            raise ControlError(f"host {hello.host} is not needed yet: all {self.count} workers have a place")
        self._spawn(peer, hello.host, free)

    def add_late_host(self, peer: Peer, hello: HostHello, *, banned: Collection[int]) -> tuple[int, ...]:
        """Have an agent that comes while the run goes on start as many workers as it can; return them.

        They are those that nobody has, or nobody has any more, and then new ones. Those that are `banned` stay gone.
        """
        numbers = range(max(self.count, 1 + max(self._workers, default=0)) + hello.slots)
        free = [worker for worker in numbers if self._is_free(worker) and worker not in banned][: hello.slots]
        self._spawn(peer, hello.host, free)
        return tuple(free)

    def respawn(self, worker: Worker) -> None:
        """Have the agent of a lost worker start it again."""
        assert worker.lost
        assert worker.agent is not None
        self._spawn(worker.agent, self._agents[worker.agent], [worker.id])

    def join(self, peer: Peer, hello: Hello) -> Worker:
        """Take in a rank. Raises ControlError that says why it cannot be."""
        number = hello.worker
        self.require_number(number)
        if not hello.incarnation and self._is_free(number):
            self._workers[number] = self._born(number)
        worker = self._workers.get(number)
        if worker is None:
            raise ControlError(f"worker {number} was started by nobody")
        if worker.peer is not None or worker.lost:
            raise ControlError(f"worker {number} {'is lost' if worker.lost else 'has joined already'}")
        if worker.agent is not None and hello.incarnation != worker.incarnation:
            raise ControlError(f"worker {number} is started by its host's agent, and this is another process")
        worker.peer = peer
        worker.host = hello.host
        return worker

    def require_number(self, number: int) -> None:
        """Raise ControlError where no worker has this number."""
        if number not in self._workers and not 0 <= number < self.count:
            raise ControlError(f"worker {number} does not exist: the run has {self.count}, numbered from 0")

    def worker_of(self, peer: Peer) -> Worker | None:
        """Return the worker whose control connection this is."""
        return next((worker for worker in self._workers.values() if worker.peer is peer), None)

    def __getitem__(self, worker: int) -> Worker:
        return self._workers[worker]

    def __contains__(self, worker: int) -> bool:
        return worker in self._workers

    def in_life(self, worker: int, incarnation: int) -> Worker | None:
        """Return a worker as it is, or was, in one of its incarnations."""
        now = self._workers.get(worker)
        return now if now is not None and now.incarnation == incarnation else self._former.get((worker, incarnation))

    def is_agent(self, peer: Peer) -> bool:
        return peer in self._agents

    def is_fenced(self, peer: Peer) -> bool:
        """Whether this was the connection of a worker that is lost; what is still read from it counts for nothing."""
        return peer in self._fenced

    def started_by(self, peer: Peer, worker: int, incarnation: int) -> Worker:
        """Return a worker in an incarnation that this agent has started. Raises ControlError where it has not."""
        found = self.in_life(worker, incarnation)
        if found is None or found.agent is not peer:
            raise ControlError(f"worker {worker} was not started by this agent")
        return found

    @property
    def agents(self) -> tuple[Peer, ...]:
        return tuple(self._agents)

    def remove_agent(self, peer: Peer) -> str | None:
        """Forget an agent whose connection has ended; return its host, None where it was not one."""
        for worker in self._workers.values():
            if worker.agent is peer:
                worker.agent = None
                if worker.peer is None:
                    worker.lost = True  # whoever comes in its name was started by nobody who is there
        return self._agents.pop(peer, None)

    def live(self) -> list[int]:
        """Workers that take part and are not lost, ascending."""
        return [worker.id for worker in self if worker.is_live]

    def are_coming(self) -> bool:
        """Whether there are workers that are started, or are loading what they need, and do not take part yet."""
        return any(not worker.lost and not worker.takes_part for worker in self._workers.values())

    def hosts(self) -> dict[int, str]:
        """The host of every worker that has ever joined."""
        return {worker.id: worker.host for worker in self if worker.host}

    def __iter__(self) -> Iterator[Worker]:
        return iter(sorted(self._workers.values(), key=lambda worker: worker.id))

    def tell(self, message: Message) -> None:
        """Send to every live worker."""
        for worker in self:
            if worker.is_live and worker.peer is not None:
                worker.peer.send(message)

    def tell_everyone(self, message: Message) -> None:
        """Send to all that are connected: workers, also those that do not take part yet, and agents."""
        for worker in self:
            if worker.peer is not None and not worker.lost:
                worker.peer.send(message)
        for agent in self._agents:
            agent.send(message)

    def send(self, worker: int, message: Message) -> None:
        """Send to one worker, if its connection is there."""
        if (peer := self._workers[worker].peer) is not None:
            peer.send(message)

    def fence(self, worker: Worker) -> None:
        """See to it that a lost worker takes no further part: its process is ended and its connection dropped."""
        worker.lost = True
        if worker.agent is not None:
            worker.agent.send(Kill(worker=worker.id))
        if worker.peer is not None:
            worker.peer.drop()
            self._fenced.add(worker.peer)
            worker.peer = None

    def _is_free(self, number: int) -> bool:
        """Whether nobody has a worker's number, or whoever had it is lost and is not going to be started again."""
        worker = self._workers.get(number)
        return worker is None or (worker.lost and worker.agent is None)

    def _spawn(self, peer: Peer, host: str, numbers: list[int]) -> None:
        self._agents[peer] = host
        for number in numbers:
            self._workers[number] = self._born(number, agent=peer)
        peer.send(
            Spawn(workers=tuple(numbers), incarnations=tuple(self._workers[number].incarnation for number in numbers))
        )

    def _born(self, number: int, *, agent: Peer | None = None) -> Worker:
        before = self._workers.get(number)
        if before is None:
            return Worker(number, agent=agent)
        self._former[number, before.incarnation] = before
        return Worker(number, incarnation=before.incarnation + 1, agent=agent, host=before.host)
