"""Agents and ranks of some hosts, without processes of their own and without torch, for `control_plane`.

Each has a control connection as in a run, and says on it what a real one would: who it is, that its communicators are
formed, its steps, that it has stopped, that it has prepared another generation. All whose connections are lost come
back to the coordinator that takes over at the same address. Commands are lines of JSON on standard input, [name,
argument]; what happens is told likewise on standard output, [name, argument, monotonic seconds]:

    ["step", number, switches]  every rank commits this step, and then switches to the generation that it has prepared
    ["lose", worker]     the process of a rank is killed: its connection ends, and its agent reports that
    -> ["begun", 0, ...]             the agents are about to connect
    -> ["orders", generation, ...]   the last of the ranks here has its orders of a generation
    -> ["started", generation, ...]  the last of them has met the others
    -> ["switching", generation, ...]  the last of them is to switch to a generation with its next step
    -> ["committed", step, ...]      the last of them has said that it has committed a step
    -> ["lost", worker, ...]         a rank is about to be lost
    -> ["returning", term, ...]      the first of them is taken back by the coordinator of a term
    -> ["returned", term, ...]       the last of them is
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from chameleon_ft.errors import ControlError
from chameleon_ft.plan.vote import Vote
from chameleon_ft.protocol.address import TOKEN_VARIABLE
from chameleon_ft.protocol.background_tasks import BackgroundTasks
from chameleon_ft.protocol.codec import decode, encode
from chameleon_ft.protocol.connection import HeardConnection, control_connection, watch_heartbeat
from chameleon_ft.protocol.messages import (
    Acknowledged,
    Committed,
    Exit,
    Hello,
    HostHello,
    LookUp,
    Message,
    Position,
    Prepare,
    Prepared,
    Probe,
    ProcessState,
    Publish,
    Quiesced,
    Ready,
    Refused,
    Spawn,
    Started,
    StartGeneration,
    Stop,
    Switch,
    Welcome,
    WorkerExited,
)
from chameleon_ft.protocol.parts import Member, OperationTimes

_HEAD: Final = re.compile(rb'\{"type":"(\w+)"(?:,"orders":\{)?,?(?:"generation":(\d+))?')
_STEP_S: Final = 30.0  # of a step, as ranks report it; the watchdog asks nothing meanwhile
_RETRY_S: Final = 0.5
_PATIENCE_S: Final = 60.0
_ADDRESS: Final = b"10.0.0.1:29000"  # what the first member of a group publishes


@dataclass(slots=True)
class _Peer:
    """One end of a control connection."""

    connection: ClientConnection
    watching: asyncio.Task[None] | None = None
    number: int | None = None  # of the newest connection that was acknowledged

    async def send(self, message: Message) -> None:
        await self.connection.send(encode(message))

    def acknowledged(self, message: Acknowledged) -> bool:
        """Begin the heartbeats of this end, as `ControlConnection` does; return whether it has come back."""
        before, self.number = self.number, message.connection
        if before != self.number:
            connection, half_s = self.connection, message.lease_s / 2
            assert isinstance(connection, HeardConnection)
            self.watching = asyncio.create_task(
                watch_heartbeat(connection, every_s=half_s, timeout_s=half_s, silent=_silent)
            )
        return before not in (None, self.number)


@dataclass(slots=True)
class _Rank(_Peer):
    worker: int = 0
    incarnation: int = 0
    agent: _Peer | None = None
    placed: int = 0  # the generation of its orders
    prepared: int = 0  # the newest one that it has orders to prepare
    met: int = 0  # the newest one in which it has met the others


def _silent(since_s: float) -> None:
    print(f"the coordinator has not answered a heartbeat for {since_s:.1f} s", file=sys.stderr, flush=True)


@dataclass(slots=True)
class _Generation:
    """The part of a generation that is the same for all ranks, read from the orders of one of them."""

    number: int
    members: tuple[int, ...]
    layers: dict[int, list[int]]
    groups: list[tuple[int, ...]]

    @classmethod
    def of(cls, received: str | bytes) -> _Generation:
        message = decode(received)
        assert isinstance(message, StartGeneration | Prepare)
        order = message.orders
        layers: dict[int, list[int]] = {}
        segments = [each for each in order.segments if not each.tied]
        for segment in segments:
            for worker in segment.holders:
                layers.setdefault(worker, []).extend(segment.layers)
        groups = [order.members, *dict.fromkeys(each.holders for each in segments if len(each.holders) > 1)]
        return cls(order.generation, order.members, layers, groups)


@dataclass(slots=True)
class Hosts:
    """The agents and ranks of some hosts."""

    address: str
    token: str
    per_host: int
    expected: int = 0
    ranks: dict[int, _Rank] = field(default_factory=dict)
    _patient_until_s: float = 0.0
    _returns: bool = False  # whether a coordinator was lost
    _known: dict[int, _Generation] = field(default_factory=dict)
    _generation: int = 0  # that trains
    _committed: int = 0
    _vote: Vote | None = None
    _with_orders: Counter[int] = field(default_factory=Counter)  # by generation
    _started: Counter[int] = field(default_factory=Counter)
    _switching: Counter[int] = field(default_factory=Counter)
    _returned: Counter[int] = field(default_factory=Counter)  # by term
    _tasks: BackgroundTasks = field(default_factory=lambda: BackgroundTasks(failed=_end))

    async def serve(self, hosts: Sequence[int]) -> None:
        """Start agents, which start their ranks, and follow commands until there are none."""
        self.expected = len(hosts) * self.per_host
        self._patient_until_s = asyncio.get_running_loop().time() + _PATIENCE_S
        _tell("begun", 0)
        for host in hosts:
            self._tasks.start(self._agent(host))
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            match json.loads(line):
                case ["step", int(step), bool(switches)]:
                    await self._commit(step, switches=switches)
                case ["lose", int(worker)]:
                    await self._lose(worker)

    async def _agent(self, host: int) -> None:
        peer = _Peer(await self._connected())
        own: dict[int, int] = {}
        while True:
            await peer.send(
                HostHello(
                    host=f"host-{host}",
                    slots=self.per_host,
                    id=f"agent-{host}",
                    ranks=tuple(own.items()),
                    resumes=peer.number,
                )
            )
            try:
                while await self._agent_told(peer, own, decode(await peer.connection.recv())):
                    pass
                return
            except ConnectionClosed:
                peer.connection = await self._connected_again()

    async def _agent_told(self, peer: _Peer, own: dict[int, int], message: Message) -> bool:
        """Obey an order; return whether more may come."""
        match message:
            case Acknowledged():
                peer.acknowledged(message)
            case Spawn(members=members):
                own |= members
                for worker, incarnation in members:
                    self._tasks.start(self._rank(worker, incarnation, peer))
            case Probe(probe=probe, worker=only):
                for worker, incarnation in own.items():
                    if only in (None, worker):
                        state = ProcessState(probe=probe, member=Member(worker, incarnation), stopped=False)
                        await peer.send(state)
            case Exit() | Refused():
                print(f"{message.type}: {message.reason}", file=sys.stderr, flush=True)
                return False
        return True

    async def _connected(self) -> ClientConnection:
        """Connect, again and again as ranks do while a coordinator is too busy to renew its lease, or is replaced."""
        while True:
            try:
                return await control_connection(self.address, self.token)
            except (OSError, InvalidHandshake) as error:
                if asyncio.get_running_loop().time() > self._patient_until_s:
                    raise
                if not self._returns:
                    print(f"trying again: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                await asyncio.sleep(_RETRY_S)

    async def _connected_again(self) -> ClientConnection:
        self._returns = True
        self._patient_until_s = asyncio.get_running_loop().time() + _PATIENCE_S
        return await self._connected()

    async def _rank(self, worker: int, incarnation: int, agent: _Peer) -> None:
        rank = self.ranks[worker] = _Rank(await self._connected(), worker=worker, incarnation=incarnation, agent=agent)
        while True:
            known = max(rank.placed, rank.prepared)
            hello = Hello(member=Member(worker, incarnation), host="127.0.0.1", resumes=rank.number, known=known)
            await rank.send(hello)
            try:
                await self._listen(rank)
            except ConnectionClosed:
                if worker not in self.ranks:
                    return
                rank.connection = await self._connected_again()

    async def _listen(self, rank: _Rank) -> None:
        while True:
            # On a host of its own a rank reads its orders while others do. Here one process would for thousands.
            received = await rank.connection.recv()
            head = _HEAD.match(received.encode() if isinstance(received, str) else received)
            assert head is not None
            match head[1].decode():
                case "start_generation" | "prepare":
                    await self._ordered(rank, int(head[2]), received, prepares=head[1] == b"prepare")
                case "published":
                    await self._met(rank, int(head[2]))
                case "migrate":
                    pass  # nothing moves between ranks that compute nothing
                case _:
                    await self._told(rank, decode(received))

    async def _told(self, rank: _Rank, message: Message) -> None:
        match message:
            case Acknowledged():
                if rank.acknowledged(message):
                    self._count_return(message.term)
            case Stop(generation=generation):
                layers = self._known[rank.placed].layers.get(rank.worker, ()) if rank.placed else ()
                await rank.send(
                    Quiesced(
                        generation=generation,
                        committed=self._committed,
                        reduced=False,
                        last_vote=self._vote,
                        placed=rank.placed,
                        layers=tuple(sorted(layers)),
                    )
                )
            case Switch(generation=generation):
                self._switching[generation] += 1
                if self._switching[generation] == self.expected:
                    _tell("switching", generation)
            case Welcome():
                await rank.send(Ready())
            case Probe(probe=probe):
                await rank.send(Position(probe=probe, doing="a forward", waiting=True, since_s=0.1))
            case Refused(reason=reason):
                raise ControlError(f"worker {rank.worker}: {reason}")

    def _count_return(self, term: int) -> None:
        self._returned[term] += 1
        if self._returned[term] == 1:
            _tell("returning", term)
        if self._returned[term] == self.expected:
            _tell("returned", term)

    async def _ordered(self, rank: _Rank, generation: int, received: str | bytes, *, prepares: bool) -> None:
        """Take an order, and look up where the others of this rank's groups are, as nccl does."""
        if prepares:
            rank.prepared = generation
        else:
            rank.placed = self._generation = generation
            self._with_orders[generation] += 1
            if self._with_orders[generation] == self.expected:
                _tell("orders", generation)
        if generation not in self._known:
            self._known[generation] = _Generation.of(received)
        for index, group in enumerate(self._known[generation].groups):
            if group[0] == rank.worker:
                await rank.send(Publish(generation=generation, key=f"group-{index}/0", value=_ADDRESS))
        await rank.send(LookUp(generation=generation, key="group-0/0"))

    async def _met(self, rank: _Rank, generation: int) -> None:
        if generation <= rank.met:
            return
        rank.met = generation
        if generation == rank.prepared:
            await rank.send(Prepared(generation=generation))
        else:
            await self._start(rank)

    async def _start(self, rank: _Rank) -> None:
        await rank.send(Started(generation=rank.placed))
        self._started[rank.placed] += 1
        if self._started[rank.placed] == self.expected:
            _tell("started", rank.placed)

    async def _commit(self, step: int, *, switches: bool) -> None:
        vote = Vote(grad_square_sum=4.0, loss_sum=12.0, terms=12, samples=12, finish=False, switch=switches)
        times = OperationTimes(forward_s=0.01, backward_s=0.02, longest_s=0.03)
        common = {"generation": self._generation, "step": step, "vote": vote, "times": times}
        committed = Committed(grad_norm=0.5, lr=0.1, step_s=_STEP_S, **common)
        self._committed, self._vote = step + 1, vote
        for rank in list(self.ranks.values()):
            await rank.send(committed)
        _tell("committed", step)
        if switches:
            for rank in list(self.ranks.values()):
                rank.placed = self._generation = rank.prepared
                await self._start(rank)

    async def _lose(self, worker: int) -> None:
        if (rank := self.ranks.pop(worker, None)) is None:
            return  # another process has it
        self.expected -= 1
        assert rank.agent is not None
        if rank.watching is not None:
            rank.watching.cancel()
        _tell("lost", worker)
        rank.connection.transport.abort()
        await rank.agent.send(WorkerExited(member=Member(worker, rank.incarnation), exit_code=-9))


def _end(error: Exception) -> None:
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def _tell(name: str, about: int) -> None:
    print(json.dumps([name, about, time.monotonic()]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--address", required=True, help="host:port of the coordinator; its token is in the environment"
    )
    parser.add_argument("--first", type=int, required=True, help="first host")
    parser.add_argument("--stop", type=int, required=True, help="host after the last")
    parser.add_argument("--per-host", type=int, required=True, help="ranks of a host")
    given = parser.parse_args()
    hosts = Hosts(given.address, os.environ[TOKEN_VARIABLE], given.per_host)
    asyncio.run(hosts.serve(range(given.first, given.stop)))


if __name__ == "__main__":
    main()
