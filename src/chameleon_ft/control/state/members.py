"""The members of a run: workers with their connections, and the agents that start them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from chameleon_ft.control.wire.messages import Hello, HostHello, Spawn
from chameleon_ft.errors import ControlError
from chameleon_ft.plan.frozen_map import FrozenMap

__all__ = ["Members", "Worker"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One incarnation of a worker: after a loss, another process can take its number.

    Attributes:
        id: number of the worker.
        incarnation: counted from 1.
        agent: connection of the agent that started it; None if a cluster's launcher did, or if that agent is gone.
        connection: its control connection, from its first message until it closes.
        host: address of its host; empty before its first message.
        takes_part: whether the generations count on it, as one that trains or as a spare.
        first_step: steps that had been committed when it could take part; None as long as it cannot.
        lost: whether it was given up.
        exit_code: how its process ended, as `subprocess` gives it.
        crash: the error that it reported before it ended.
        since: when this incarnation began, in Unix seconds.
    """

    id: int
    incarnation: int = 1
    agent: int | None = None
    connection: int | None = None
    host: str = ""
    takes_part: bool = False
    first_step: int | None = None
    lost: bool = False
    exit_code: int | None = None
    crash: str | None = None
    since: float = 0.0

    @property
    def is_live(self) -> bool:
        return self.takes_part and self.connection is not None and not self.lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """All workers of the run, by number. The first `count` train from the beginning; others may join later.

    Attributes:
        former: incarnations that others have followed, oldest first.
        agents: connection -> host of every agent.
        fenced: connections of lost workers; what is still read from them counts for nothing.
    """

    count: int
    workers: Mapping[int, Worker] = FrozenMap({})
    former: tuple[Worker, ...] = ()
    agents: Mapping[int, str] = FrozenMap({})
    fenced: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "workers", FrozenMap(self.workers))
        object.__setattr__(self, "agents", FrozenMap(self.agents))

    # --- queries -----------------------------------------------------------------------------------------------------

    def __getitem__(self, worker: int) -> Worker:
        return self.workers[worker]

    def __contains__(self, worker: int) -> bool:
        return worker in self.workers

    def __iter__(self) -> Iterator[Worker]:
        return iter(sorted(self.workers.values(), key=lambda worker: worker.id))

    def live(self) -> tuple[int, ...]:
        """Workers that take part and are not lost, ascending."""
        return tuple(worker.id for worker in self if worker.is_live)

    def hosts(self) -> dict[int, str]:
        """The host of every worker that has ever joined."""
        return {worker.id: worker.host for worker in self if worker.host}

    def is_loading(self) -> bool:
        """Whether there are workers that are started, or are loading what they need, and do not take part yet."""
        return any(not worker.lost and not worker.takes_part for worker in self.workers.values())

    def worker_of(self, connection: int) -> Worker | None:
        """Return the worker whose control connection this is."""
        return next((worker for worker in self.workers.values() if worker.connection == connection), None)

    def incarnation_of(self, worker: int, incarnation: int) -> Worker | None:
        """Return one incarnation of a worker as it is or was."""
        now = self.workers.get(worker)
        if now is not None and now.incarnation == incarnation:
            return now
        return next((each for each in self.former if (each.id, each.incarnation) == (worker, incarnation)), None)

    def started_by(self, agent: int, worker: int, incarnation: int) -> Worker:
        """Return an incarnation that this agent has started. Raises ControlError if it has not."""
        found = self.incarnation_of(worker, incarnation)
        if found is None or found.agent != agent:
            raise ControlError(f"worker {worker} was not started by this agent")
        return found

    # --- changes -----------------------------------------------------------------------------------------------------

    def changed(self, worker: Worker, **changes: Any) -> Self:
        """Return the members with changes to an incarnation, present or former."""
        now = self.workers.get(worker.id)
        if now is not None and now.incarnation == worker.incarnation:
            return replace(self, workers={**self.workers, worker.id: replace(now, **changes)})
        key = worker.id, worker.incarnation
        former = tuple(replace(each, **changes) if (each.id, each.incarnation) == key else each for each in self.former)
        return replace(self, former=former)

    def with_host(self, agent: int, hello: HostHello, *, now: float) -> tuple[Self, Spawn]:
        """Give an agent the lowest free workers; return what it is to start. Raises ControlError if none is free."""
        free = [worker for worker in range(self.count) if worker not in self.workers][: hello.slots]
        if not free:
            raise ControlError(f"host {hello.host} is not needed yet: all {self.count} workers have a place")
        return self._spawned(agent, hello.host, free, now=now)

    def with_late_host(
        self, agent: int, hello: HostHello, *, blocklist: Collection[int], now: float
    ) -> tuple[Self, Spawn]:
        """Give an agent that comes while the run goes on as many workers as it can start; return them to be started.

        They are those that no process has, or has any more, and then new ones; not those of the `blocklist`.
        """
        numbers = range(max(self.count, 1 + max(self.workers, default=0)) + hello.slots)
        free = [worker for worker in numbers if self._is_free(worker) and worker not in blocklist][: hello.slots]
        return self._spawned(agent, hello.host, free, now=now)

    def respawned(self, worker: Worker, *, now: float) -> tuple[Self, Spawn]:
        """Have the agent of a lost worker start it again."""
        assert worker.lost
        assert worker.agent is not None
        return self._spawned(worker.agent, self.agents[worker.agent], [worker.id], now=now)

    def joined(self, connection: int, hello: Hello, *, now: float) -> Self:
        """Take in a rank. Raises ControlError that says why it cannot be."""
        number = hello.worker
        self.require_number(number)
        members = self
        if not hello.incarnation and self._is_free(number):
            members = self._born([number], agent=None, now=now)
        worker = members.workers.get(number)
        if worker is None:
            raise ControlError(f"worker {number} was started by no agent")
        if worker.connection is not None or worker.lost:
            raise ControlError(f"worker {number} {'is lost' if worker.lost else 'has joined already'}")
        if worker.agent is not None and hello.incarnation != worker.incarnation:
            raise ControlError(f"worker {number} is started by its host's agent, and this is another process")
        return members.changed(worker, connection=connection, host=hello.host)

    def require_number(self, number: int) -> None:
        """Raise ControlError if no worker has this number."""
        if number not in self.workers and not 0 <= number < self.count:
            raise ControlError(f"worker {number} does not exist: the run has {self.count}, numbered from 0")

    def without_agent(self, agent: int) -> Self:
        """Forget an agent whose connection has ended. A worker of it that has not joined will never come."""
        orphans = {
            worker.id: replace(worker, agent=None, lost=worker.lost or worker.connection is None)
            for worker in self.workers.values()
            if worker.agent == agent
        }
        agents = {each: host for each, host in self.agents.items() if each != agent}
        return replace(self, workers={**self.workers, **orphans}, agents=agents)

    def fence(self, worker: int) -> Self:
        """Mark a worker as lost, and pass over whatever may still be read from its connection."""
        lost = self.workers[worker]
        fenced = self.fenced if lost.connection is None else self.fenced | {lost.connection}
        return replace(self.changed(lost, lost=True, connection=None), fenced=fenced)

    def _is_free(self, number: int) -> bool:
        """Whether no process has a worker's number, and none that is lost is going to be started again by its agent."""
        worker = self.workers.get(number)
        return worker is None or (worker.lost and worker.agent is None)

    def _spawned(self, agent: int, host: str, numbers: Collection[int], *, now: float) -> tuple[Self, Spawn]:
        members = replace(self._born(numbers, agent=agent, now=now), agents={**self.agents, agent: host})
        incarnations = tuple(members[number].incarnation for number in numbers)
        return members, Spawn(workers=tuple(numbers), incarnations=incarnations)

    def _born(self, numbers: Collection[int], *, agent: int | None, now: float) -> Self:
        before = [self.workers[number] for number in numbers if number in self.workers]
        fresh = {number: Worker(id=number, agent=agent, since=now) for number in numbers}
        again = {
            worker.id: replace(fresh[worker.id], incarnation=worker.incarnation + 1, host=worker.host)
            for worker in before
        }
        return replace(self, workers={**self.workers, **fresh, **again}, former=(*self.former, *before))
