"""The members of a run: workers with their connections, the agents that start them, and their next incarnations.

Hosts on their way into the run.

Plans that are considered while training continues: for workers that join or leave, become slow or recover, or after
a plan that was chosen without a search.

A worker that joins is a spare until a decision considers it, and then part of the plan if that is worth it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Self

from chameleon_ft.config import Recovery
from chameleon_ft.coordinator.detectors.slowness import workers_of_link
from chameleon_ft.errors import ControlError
from chameleon_ft.plan.frozen_map import FrozenMap, updated, without
from chameleon_ft.protocol.messages import Adopt, Hello, HostHello, Spawn
from chameleon_ft.protocol.parts import HostReport, Member, RankProcess

# After a death at a link, so many times as many steps are needed.
_LINK_STEPS: Final = 10
# Messages may still arrive of so many former incarnations of a worker.
_FORMER: Final = 4
# An incarnation that lasts for this many steps was healthy: earlier deaths are forgotten.
_SETTLED_STEPS: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One incarnation of a worker: after a loss, another process can take its number."""

    id: int
    # Counted from 1.
    incarnation: int = 1
    # The connection of its agent; None if a launcher started it, or if the agent is gone.
    agent: int | None = None
    # The host of its agent, as that calls it, also if the agent is gone; empty if it never had one.
    agent_host: str = ""
    # Its control connection, from its first message until it closes.
    connection: int | None = None
    # The address of its host; empty before its first message.
    host: str = ""
    # None before its first message.
    process: RankProcess | None = None
    # Available on its host when it started; None if it is not known.
    memory_bytes: int | None = None
    # Whether generations include it, training or as a spare.
    takes_part: bool = False
    # `Kill` was sent to it on this connection, because it had no agent.
    kill_connection: int | None = None
    # Whether it is to leave, and not to come back; it counts as lost once it may leave.
    draining: bool = False
    # The committed steps when it became able to take part; None until then.
    first_step: int | None = None
    # Whether it has finished a step with the layers that it runs now.
    has_stepped: bool = False
    lost: bool = False
    # Whether it is lost, and another process may take its number although its agent is there.
    is_vacant: bool = False
    # As `subprocess` gives it.
    exit_code: int | None = None
    # The error that it reported before it ended.
    crash: str | None = None
    # The activity in which it hung.
    hung_in: str = ""
    # The line of code in which it hung.
    hung_at: str = ""
    # When this incarnation began, in Unix seconds.
    since: float = 0.0

    @property
    def member(self) -> Member:
        return Member(self.id, self.incarnation)

    @property
    def is_live(self) -> bool:
        return self.takes_part and self.connection is not None and not self.lost

    @property
    def is_orphan(self) -> bool:
        """Whether it was started by an agent that is gone, and its process is known."""
        return self.agent is None and bool(self.agent_host) and self.process is not None


# No slots: thousands of members are searched once, not with every message.
@dataclass(frozen=True, kw_only=True)
class Members:
    """All workers of the run, by number. The first `count` train from the beginning; others may join later."""

    count: int
    workers: Mapping[int, Worker] = FrozenMap({})
    # The last `_FORMER` incarnations of each worker that were replaced, oldest first.
    former: tuple[Worker, ...] = ()
    # The host of every agent, by connection.
    agents: Mapping[int, str] = FrozenMap({})
    # The connection of every agent, by what it calls itself.
    agent_ids: Mapping[str, int] = FrozenMap({})
    # Connections of lost workers and dismissed agents, whose messages are ignored.
    fenced: frozenset[int] = frozenset()
    # Those of agents to which `Exit` was sent.
    drained_agents: frozenset[int] = frozenset()
    # The signal of each agent or worker that is to be drained, by connection.
    drain_requests: Mapping[int, str] = FrozenMap({})

    def __post_init__(self) -> None:
        object.__setattr__(self, "workers", FrozenMap(self.workers))
        object.__setattr__(self, "agents", FrozenMap(self.agents))
        object.__setattr__(self, "agent_ids", FrozenMap(self.agent_ids))
        object.__setattr__(self, "drain_requests", FrozenMap(self.drain_requests))

    def __getitem__(self, worker: int) -> Worker:
        return self.workers[worker]

    def __contains__(self, worker: int) -> bool:
        return worker in self.workers

    def __iter__(self) -> Iterator[Worker]:
        return iter(sorted(self.workers.values(), key=lambda worker: worker.id))

    def live(self) -> tuple[int, ...]:
        """Return the workers that take part and are not lost, ascending."""
        return self._live

    @cached_property
    def _live(self) -> tuple[int, ...]:
        return tuple(sorted(worker.id for worker in self.workers.values() if worker.is_live))

    @cached_property
    def unsettled(self) -> tuple[Worker, ...]:
        """The workers that are lost, not connected or do not take part, ascending."""
        return tuple(worker for worker in self if not worker.is_live)

    @cached_property
    def in_first_step(self) -> frozenset[int]:
        """The live workers that have not finished a step with the layers that they run."""
        return frozenset(worker for worker in self._live if not self.workers[worker].has_stepped)

    @cached_property
    def _by_connection(self) -> dict[int, int]:
        return {worker.connection: worker.id for worker in self.workers.values() if worker.connection is not None}

    def staying(self) -> tuple[int, ...]:
        """Return the live workers that are not to leave, ascending."""
        draining = self.draining()
        return tuple(worker for worker in self._live if worker not in draining)

    def draining(self) -> frozenset[int]:
        """Return the live workers that are to leave."""
        return frozenset(worker.id for worker in self.departing if worker.is_live)

    @cached_property
    def departing(self) -> tuple[Worker, ...]:
        """The workers that are to leave, or have left because they were."""
        return tuple(worker for worker in self.workers.values() if worker.draining)

    def hosts(self) -> dict[int, str]:
        """Return the host of every worker that has ever joined."""
        return {worker.id: worker.host for worker in self if worker.host}

    def host_memory(self) -> dict[str, int]:
        """Return the bytes that were available on each host before its live workers used any, as far as known."""
        known: dict[str, int] = {}
        for worker in self:
            if worker.memory_bytes is not None and not worker.lost:
                known[worker.host] = max(worker.memory_bytes, known.get(worker.host, 0))
        return known

    def is_loading(self) -> bool:
        """Return whether some worker is starting or loading, and does not take part yet."""
        return any(not worker.lost and not worker.takes_part for worker in self.unsettled)

    def worker_of(self, connection: int) -> Worker | None:
        """Return the worker whose control connection this is."""
        number = self._by_connection.get(connection)
        return None if number is None else self.workers[number]

    def find(self, member: Member) -> Worker | None:
        """Return an incarnation of a worker, present or former."""
        present = self.workers.get(member.worker)
        if present is not None and present.incarnation == member.incarnation:
            return present
        return next((each for each in self.former if each.member == member), None)

    def killed_on(self, connection: int) -> Worker | None:
        """Return the worker to which `Kill` was sent on this connection."""
        return next((w for w in (*self.workers.values(), *self.former) if w.kill_connection == connection), None)

    def started_by(self, agent: int, member: Member) -> Worker:
        """Return an incarnation that this agent has started, or another of its host that is gone.

        Raises ControlError if neither has.
        """
        found = self.find(member)
        if found is None or (found.agent, found.agent_host) not in (
            (agent, found.agent_host),
            (None, self.agents[agent]),
        ):
            raise ControlError(f"{member} was not started by this agent")
        return found

    def changed(self, worker: Worker, **changes: Any) -> Self:
        """Return the members with changes to an incarnation, present or former."""
        now = self.workers.get(worker.id)
        if now is not None and now.incarnation == worker.incarnation:
            after = replace(now, **changes)
            members = replace(self, workers=updated(self.workers, {worker.id: after}))
            members._derive_from(self, now, after)
            return members
        own = worker.member
        return replace(
            self, former=tuple(replace(each, **changes) if each.member == own else each for each in self.former)
        )

    def _derive_from(self, before: Members, worker: Worker, after: Worker) -> None:
        """Take over what is known of the members before this worker changed: each message of thousands changes one."""
        known = before.__dict__
        if (live := known.get("_live")) is not None and worker.is_live == after.is_live:
            self.__dict__["_live"] = live
        elif live is not None:
            place = bisect_left(live, worker.id)
            added = (worker.id,) if after.is_live else ()
            self.__dict__["_live"] = (*live[:place], *added, *live[place + 1 - len(added) :])
        if "unsettled" in known and worker.is_live and after.is_live:
            self.__dict__["unsettled"] = before.unsettled
        if "departing" in known and not worker.draining and not after.draining:
            self.__dict__["departing"] = before.departing
        if "_by_connection" in known:
            connections = before._by_connection
            if worker.connection != after.connection:
                connections = connections.copy()
                if after.connection is not None:
                    connections[after.connection] = worker.id
                if worker.connection is not None:
                    del connections[worker.connection]
            self.__dict__["_by_connection"] = connections

    def with_new_layers(self, workers: Collection[int]) -> Self:
        """Note that these workers run layers that they have not run before."""
        fresh = {worker: replace(self.workers[worker], has_stepped=False) for worker in workers}
        return replace(self, workers=updated(self.workers, fresh))

    def with_host(
        self, agent: int, hello: HostHello, *, is_late: bool = False, blocklist: Collection[int] = (), now: float
    ) -> tuple[Self, Adopt, Spawn]:
        """Have an agent adopt the workers of its host whose agent is gone, and start the lowest free ones beside them.

        An agent that joins after the run has begun also gets numbers that no worker has had.

        Args:
            blocklist: workers that are not started again.

        Raises:
            ControlError: all workers of a run that has not begun are taken.
        """
        members, adopt = self._adopted(agent, hello)
        # On a host whose other workers continue, numbers that were drained stay free.
        drained = {each.id for each in self.departing if each.lost and each.agent_host == hello.host}
        left = drained if adopt.ranks else set()
        slots = hello.slots - len(adopt.ranks) - len(left)
        end = max(self.count, 1 + max(self.workers, default=0)) + max(0, slots) if is_late else self.count
        kept = {*blocklist, *left}
        given_up = {each.id for each in self.workers.values() if each.lost and self._is_free(each.id) and each.id < end}
        free = sorted((set(range(end)).difference(self.workers) | given_up) - kept)[: max(0, slots)]
        if not free and not adopt.ranks:
            raise ControlError(f"host {hello.host} is not needed yet: all {self.count} workers have a place")
        members = replace(
            members,
            agents={**self.agents, agent: hello.host},
            agent_ids={**self.agent_ids, hello.id: agent} if hello.id else self.agent_ids,
        )
        members, spawn = members._spawned(agent, free, now=now)
        return members, adopt, spawn

    def respawned(self, worker: Worker, *, now: float) -> tuple[Self, Spawn]:
        """Have the agent of a lost worker start it again."""
        assert worker.lost
        assert worker.agent is not None
        return self._spawned(worker.agent, [worker.id], now=now)

    def joined(self, connection: int, hello: Hello, *, now: float) -> Self:
        """Admit a rank. Raises ControlError if it must not join."""
        number, incarnation = hello.member
        self.require_number(number)
        members = self
        if not incarnation and self._is_free(number):
            members = self._with_new_incarnations([number], agent=None, now=now)
        worker = members.workers.get(number)
        if worker is None:
            raise ControlError(f"worker {number} was started by no agent")
        if worker.connection is not None or worker.lost:
            raise ControlError(f"worker {number} {'is lost' if worker.lost else 'has joined already'}")
        if worker.agent is not None and incarnation != worker.incarnation:
            raise ControlError(f"worker {number} is started by its host's agent, and this is another process")
        return members.changed(
            worker,
            connection=connection,
            host=hello.host,
            process=hello.process,
            memory_bytes=hello.memory_bytes,
        )

    def require_number(self, number: int) -> None:
        """Raise ControlError if no worker has this number."""
        if number not in self.workers and not 0 <= number < self.count:
            raise ControlError(f"worker {number} does not exist: the run has {self.count}, numbered from 0")

    def reconnected(self, before: int, connection: int) -> Self:
        """Return the members after a worker or an agent has replaced its connection."""
        if (worker := self.worker_of(before)) is not None:
            members = self.changed(worker, connection=connection)
        else:
            own = {each.id: replace(each, agent=connection) for each in self.workers.values() if each.agent == before}
            members = replace(
                self,
                workers=updated(self.workers, own),
                former=tuple(replace(each, agent=connection) if each.agent == before else each for each in self.former),
                agents={connection if each == before else each: host for each, host in self.agents.items()},
                agent_ids={name: connection if each == before else each for name, each in self.agent_ids.items()},
            )
        if (signal := self.drain_requests.get(before)) is None:
            return members
        requests = without(self.drain_requests, before)
        return replace(members, drain_requests=updated(requests, {connection: signal}))

    def without_agent(self, agent: int) -> Self:
        """Remove an agent whose connection has ended, with its workers that have not joined.

        The others live on, and another agent of their host can adopt them.
        """
        orphans = {
            worker.id: replace(worker, agent=None, lost=worker.lost or worker.connection is None)
            for worker in self.workers.values()
            if worker.agent == agent
        }
        agent_ids = {name: each for name, each in self.agent_ids.items() if each != agent}
        return replace(
            self, workers=updated(self.workers, orphans), agents=without(self.agents, agent), agent_ids=agent_ids
        )

    def dismissed(self, agent: int) -> Self:
        """Remove an agent whose workers have all left, and ignore its connection from now on."""
        members = self.without_agent(agent).fence_connection(agent)
        return replace(members, drained_agents=members.drained_agents | {agent})

    def with_drain_request(self, connection: int, signal: str) -> Self:
        """Note that an agent or a worker has asked to be drained, because of a signal."""
        return replace(self, drain_requests=updated(self.drain_requests, {connection: signal}))

    def fence(self, worker: int) -> Self:
        """Mark a worker as lost, and ignore its connection from now on."""
        lost = self.workers[worker]
        after = self.changed(lost, lost=True, connection=None)
        return after if lost.connection is None else after.fence_connection(lost.connection)

    def fence_connection(self, connection: int) -> Self:
        """Ignore a connection from now on."""
        return replace(self, fenced=self.fenced | {connection})

    def _is_free(self, number: int) -> bool:
        """Return whether a worker has no process, and no agent that will start it again."""
        worker = self.workers.get(number)
        return worker is None or (worker.lost and (worker.agent is None or worker.is_vacant))

    def _adopted(self, agent: int, hello: HostHello) -> tuple[Self, Adopt]:
        """Give an agent the workers of its host whose agent is gone, as many as it can run.

        It also ends processes of workers that were given up when they had no agent.
        """
        every = (*self.workers.values(), *self.former)
        left = [each for each in every if each.agent is None and each.is_orphan and each.agent_host == hello.host]
        living = [each for each in left if each.connection is not None][: hello.slots]
        given_up = [each for each in left if each.lost]
        members = self
        for worker in living:
            members = members.changed(worker, agent=agent)
        for worker in given_up:
            members = members.changed(worker, process=None)
        return members, Adopt(
            ranks=tuple((each.member, each.process) for each in living if each.process is not None),
            given_up=tuple(each.process for each in given_up if each.process is not None),
        )

    def _spawned(self, agent: int, numbers: Sequence[int], *, now: float) -> tuple[Self, Spawn]:
        members = self._with_new_incarnations(numbers, agent=agent, now=now)
        return members, Spawn(members=tuple(members[number].member for number in numbers))

    def _with_new_incarnations(self, numbers: Sequence[int], *, agent: int | None, now: float) -> Self:
        """Return the members with a new incarnation of each of these workers."""
        before = {number: self.workers[number] for number in numbers if number in self.workers}
        agent_host = "" if agent is None else self.agents[agent]
        born = {number: Worker(id=number, agent=agent, agent_host=agent_host, since=now) for number in numbers}
        for number, former in before.items():
            born[number] = replace(born[number], incarnation=former.incarnation + 1, host=former.host)
        newest = {number: former.incarnation - _FORMER for number, former in before.items()}
        kept = (each for each in self.former if each.incarnation > newest.get(each.id, 0))
        return replace(self, workers=updated(self.workers, born), former=(*kept, *before.values()))


@dataclass(frozen=True, slots=True)
class Respawns:
    """Recent deaths of each worker, which determine when it is started again, if at all."""

    recovery: Recovery
    # Deaths since the last long incarnation of a worker.
    deaths: Mapping[int, int] = FrozenMap({})
    # Workers that died last because messages with others failed.
    at_links: frozenset[int] = frozenset()
    # When a worker is started again, in monotonic seconds.
    due: Mapping[int, float] = FrozenMap({})

    def __post_init__(self) -> None:
        object.__setattr__(self, "deaths", FrozenMap(self.deaths))
        object.__setattr__(self, "due", FrozenMap(self.due))

    def died(self, worker: int, *, steps: int, at_link: bool = False) -> Self:
        """Count the death of an incarnation in which `steps` were committed.

        A link that has failed shows in more steps that it holds. As it may be healed at any time, its worker is taken
        again however often, after ever longer delays.
        """
        settled_steps = _SETTLED_STEPS * (_LINK_STEPS if worker in self.at_links else 1)
        before = 0 if steps >= settled_steps else self.deaths.get(worker, 0)
        at_links = self.at_links | {worker} if at_link else self.at_links - {worker}
        return replace(self, deaths={**self.deaths, worker: before + 1}, at_links=at_links)

    def reaped(self, worker: int, now: float) -> Self:
        """Schedule the next incarnation of a worker whose process is gone, unless it is blocked."""
        if not self.recovery.respawn or self.is_blocked(worker):
            return self
        return replace(self, due={**self.due, worker: now + self.delay_s(worker)})

    def at(self, now: float) -> tuple[Self, tuple[int, ...]]:
        """Return the workers due for a start, and the record without them."""
        ready = tuple(worker for worker, due in self.due.items() if due <= now)
        if not ready:
            return self, ()
        return replace(self, due={worker: due for worker, due in self.due.items() if worker not in ready}), ready

    def delay_s(self, worker: int) -> float:
        """Seconds to wait before the next incarnation: twice as long after each death."""
        return float(self.recovery.respawn_delay_s * 2 ** max(0, self.deaths.get(worker, 0) - 1))

    def is_blocked(self, worker: int) -> bool:
        """Return whether the worker is not taken again."""
        return worker not in self.at_links and self.deaths.get(worker, 0) > self.recovery.max_respawns


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAdmission:
    """Agents that have connected and are not members yet, by connection, and the reports on hosts that are.

    Attributes:
        examining: agents that examine their hosts.
        waiting: agents that join once earlier agents of their hosts, which are awaited, are back or lost.
        reports: host that was examined and admitted -> what its agent has found there.
    """

    examining: Mapping[int, HostHello] = FrozenMap({})
    waiting: Mapping[int, HostHello] = FrozenMap({})
    reports: Mapping[str, HostReport] = FrozenMap({})

    def __post_init__(self) -> None:
        for name in ("examining", "waiting", "reports"):
            object.__setattr__(self, name, FrozenMap(getattr(self, name)))

    @property
    def connections(self) -> tuple[int, ...]:
        """The connections of all agents that are not members yet."""
        return *self.waiting, *self.examining

    def examined_by(self, agent: int, hello: HostHello) -> Self:
        """Note that an agent examines its host; an earlier connection of the same agent does not count any more."""
        return replace(self, examining={**_without_agent(self.examining, hello), agent: hello})

    def awaited_by(self, agent: int, hello: HostHello) -> Self:
        """Note that an agent waits for another one of its host; an earlier connection of it does not count any more."""
        return replace(self, waiting={**_without_agent(self.waiting, hello), agent: hello})

    def with_report(self, host: str, report: HostReport) -> Self:
        """Keep the report on a host that is admitted."""
        return replace(self, reports=updated(self.reports, {host: report}))

    def without(self, agent: int) -> Self:
        """Remove an agent that joins, is refused, or whose connection has ended."""
        return replace(self, examining=without(self.examining, agent), waiting=without(self.waiting, agent))


def _without_agent(agents: Mapping[int, HostHello], hello: HostHello) -> dict[int, HostHello]:
    """Return the agents but the one that says hello, if it has a name."""
    return {connection: other for connection, other in agents.items() if not hello.id or other.id != hello.id}


# Newcomers are considered together this long after the last of them,
_QUIET_S: Final = 0.5
# but others that are still loading are waited for no longer than this after the first.
_GATHERING_S: Final = 10.0
# The wait after a generation could not be prepared; twice as long after each that follows.
_RETRY_S: Final = 1.0
_RETRY_MAX_S: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleUp:
    """The newcomers, and the progress of their admission. Times are monotonic seconds."""

    # Ready workers that do not take part yet, in order of arrival.
    loaded: tuple[int, ...] = ()
    # Live workers that no decision has taken into account yet.
    newcomers: frozenset[int] = frozenset()
    # When training continued under a plan that was chosen without a search.
    provisional_since_s: float | None = None
    # When the first newcomer became a spare, and the last one.
    first_at_s: float = 0.0
    last_at_s: float = 0.0
    # The generation of the decision that is being made.
    considering: int | None = None
    # The number of that decision, or of the last one.
    question: int = 0
    # As `Detectors.speeds`, for that decision.
    asked_speeds: Mapping[int, float] = FrozenMap({})
    # As `Detectors.speeds`, for the newest one that was carried out.
    speeds: Mapping[int, float] = FrozenMap({})
    # Generations in a row that could not be prepared.
    retries: int = 0
    # No other is prepared before.
    retry_at_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("asked_speeds", "speeds"):
            object.__setattr__(self, name, FrozenMap(getattr(self, name)))

    def admitted(self, now: float) -> Self:
        """Turn the ready workers into spares."""
        if not self.loaded:
            return self
        first_at_s = self.first_at_s if self.newcomers else now
        newcomers = self.newcomers.union(self.loaded)
        return replace(self, loaded=(), newcomers=newcomers, first_at_s=first_at_s, last_at_s=now)

    def without(self, worker: int) -> Self:
        """Remove a lost worker."""
        loaded = tuple(each for each in self.loaded if each != worker)
        asked_speeds, speeds = (
            {each: speed for each, speed in known.items() if worker not in (workers_of_link(each) or (each,))}
            for known in (self.asked_speeds, self.speeds)
        )
        newcomers = self.newcomers - {worker}
        return replace(self, loaded=loaded, newcomers=newcomers, asked_speeds=asked_speeds, speeds=speeds)

    def is_complete(self, now: float, *, is_loading: bool, speeds: Mapping[int, float]) -> bool:
        """Return whether to consider a plan now, with all newcomers, instead of waiting for more that are loading.

        A plan that was chosen without a search, or for other `speeds` of slow workers, may be a bad one: its successor
        waits for none.
        """
        if speeds != self.speeds:
            return True
        if not self.newcomers:
            return self.provisional_since_s is not None
        if now < self.last_at_s + _QUIET_S:
            return False
        return not is_loading or now >= self.first_at_s + _GATHERING_S

    def asked(self, generation: int, speeds: Mapping[int, float]) -> Self:
        """Note that a decision is being made in a generation, for these speeds of slow workers."""
        return replace(self, considering=generation, question=self.question + 1, asked_speeds=speeds)

    def failed(self, now: float) -> Self:
        """Note that a generation could not be prepared: the next attempt is made after a while."""
        retry_at_s = now + min(_RETRY_MAX_S, _RETRY_S * 2 ** min(self.retries, 10))
        return replace(self, retries=self.retries + 1, retry_at_s=retry_at_s)

    def with_provisional_plan(self, now: float) -> Self:
        """Note that a plan was chosen without a search: newcomers, and better plans, are still to be considered."""
        return replace(self, provisional_since_s=now)

    def settled(self) -> Self:
        """Note that the last decision is carried out: all newcomers are in the plan, or stay spares."""
        return replace(
            self, newcomers=frozenset(), provisional_since_s=None, speeds=self.asked_speeds, retries=0, retry_at_s=0.0
        )
