"""Leaders that are stopped, continued and replaced, with their journals, and peers that go from one to another."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from chameleon_ft.coordinator.commands import Acknowledge, Command, Record, Resign, Send
from chameleon_ft.coordinator.events import Disconnected, Event, Moment, Received, TermClaimed, TookOver
from chameleon_ft.coordinator.journal import Journal, LastEntry
from chameleon_ft.coordinator.state.state import State
from chameleon_ft.coordinator.state_machine import step
from chameleon_ft.events.records import StepRecord
from chameleon_ft.protocol.messages import Committed, Hello, Message
from chameleon_ft.protocol.parts import Member, OperationTimes
from chameleon_ft.storage.file_queue import FileQueue
from chameleon_ft.storage.files import RunDirectory, detach, read_lines
from tests.coordinator.histories import History, new_state, vote
from tests.examples import examples

AT = Moment(unix_s=1e9, monotonic_s=200.0)
WORKERS = range(4)


@dataclass(eq=False)
class Peer:
    """A worker, with the messages that it keeps until they are acknowledged; see `ControlConnection`."""

    worker: int
    number: int  # of the newest connection that was acknowledged
    term: int = 1
    leader: Leader | None = None
    connection: int = 0
    kept: deque[Message] = field(default_factory=deque)
    acknowledged: int = 0
    sent: int = 0
    obeyed: list[int] = field(default_factory=list)
    """The terms of the coordinators whose orders it has obeyed."""

    def hear(self, leader: Leader, connection: int, message: Message) -> None:
        if leader is self.leader and connection == self.connection:
            self.obeyed.append(leader.term)

    def accept(self, leader: Leader, connection: int, received: int) -> None:
        if leader is not self.leader and connection == self.number:
            return  # that connection has ended
        if leader.term < self.term:
            self.leader = None
            return
        if connection != self.number:
            self.number, self.leader, self.connection = connection, leader, connection
            self.sent = max(received, self.acknowledged)
        self.term = leader.term
        while self.acknowledged < received:
            self.kept.popleft()
            self.acknowledged += 1


class Leader:
    """A coordinator, with a real journal; where it is stopped, it does not hold its term any more."""

    def __init__(self, run: RunDirectory, peers: list[Peer], term: int, state: State) -> None:
        self.run, self.peers, self.term, self.state = run, peers, term, state
        self.holds, self.is_over = True, False
        self.stops_before_orders = False
        self.deferred: list[Callable[[], None]] = []
        self.late_orders: tuple[Command, ...] = ()
        self.received: dict[int, int] = {}
        self.files = FileQueue(may_write=lambda: self.holds)
        self.journal = Journal(run.journal_file(term), self.files)

    def handle(self, event: Event, received: dict[int, int] | None = None) -> None:
        state, orders = step(self.state, event)
        self.journal.write(event, self.state, state, orders, received=received)
        self.state = state
        if self.stops_before_orders:
            self.stops_before_orders = self.holds = False
            self.late_orders = orders
            return
        for order in orders:
            self.execute(order)

    def lapse(self) -> None:
        """Cut all connections, because the term has run out and another coordinator may lead."""
        self.holds = False
        for peer in self.peers:
            if peer.leader is self:
                peer.leader = None
                self.deferred.append(partial(self.handle, Disconnected(at=AT, connection=peer.connection)))

    def regain(self) -> None:
        """Lead again, in the next term."""
        self.holds, self.term = True, self.term + 1
        late_orders, self.late_orders = self.late_orders, ()
        for order in late_orders:
            self.execute(order)
        deferred, self.deferred = self.deferred, []
        self.handle(TermClaimed(at=AT, term=self.term))
        while deferred and self.holds:
            deferred.pop(0)()
        self.deferred += deferred

    def execute(self, order: Command) -> None:
        match order:
            case Record(record=StepRecord() as record):
                self.files.append(self.run.metrics_file, json.dumps(record.to_json()) + "\n")
            case Acknowledge(connection=connection):
                self.acknowledge(connection)
            case Resign():
                self.holds, self.is_over = False, True
            case Send(connection=connection, message=message):
                for peer in self.peers:
                    peer.hear(self, connection, message)

    def acknowledge(self, connection: int) -> None:
        for peer in self.peers:
            worker = self.state.members.worker_of(connection)
            if worker is not None and worker.id == peer.worker:
                peer.accept(self, connection, self.received.get(connection, 0))

    def message(self, connection: int, message: Message) -> None:
        if not self.holds:
            self.deferred.append(partial(self.message, connection, message))
            return
        if isinstance(message, Hello):
            count = self.received.get(message.resumes or 0, 0)
        else:
            count = self.received.get(connection, 0) + 1
        self.received[connection] = count
        self.handle(Received(at=AT, connection=connection, message=message), {connection: count})


@cache
def begun() -> State:
    """The state of a run that has begun to train, in its first term."""
    history = History(new_state(steps=1000))
    history.gather()
    history.start()
    return replace(history.state, term=1, ticked_at_s=AT.monotonic_s)


class Terms(RuleBasedStateMachine):
    """One leader after the other, in one run directory."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.run = RunDirectory(self.directory)
        state = begun()
        self.peers = [Peer(worker, state.members[worker].connection or 0) for worker in WORKERS]
        first = Leader(self.run, self.peers, 1, state)
        self.leaders = [first]
        self.steps = 0
        self.connections = 10_000
        for peer in self.peers:
            peer.leader, peer.connection = first, peer.number
        first.handle(TermClaimed(at=AT, term=1))

    @property
    def newest(self) -> Leader:
        return self.leaders[-1]

    @rule()
    def commit(self) -> None:
        """The workers apply a step: that takes no coordinator."""
        for peer in self.peers:
            times = OperationTimes(forward_s=0.01, backward_s=0.01, longest_s=0.01)
            fields: dict[str, Any] = {"grad_norm": 0.5, "lr": 0.1, "step_s": 0.1, "times": times}
            peer.kept.append(Committed(generation=1, step=self.steps, vote=vote(self.steps), **fields))
        self.steps += 1

    @rule(worker=st.sampled_from(WORKERS), count=st.integers(1, 4))
    def deliver(self, worker: int, count: int) -> None:
        peer = self.peers[worker]
        for _ in range(count):
            if peer.leader is not None and peer.sent < peer.acknowledged + len(peer.kept):
                message = peer.kept[peer.sent - peer.acknowledged]
                peer.sent += 1
                peer.leader.message(peer.connection, message)

    @rule(worker=st.sampled_from(WORKERS))
    def acknowledge(self, worker: int) -> None:
        peer = self.peers[worker]
        if peer.leader is not None and peer.leader.holds:
            peer.leader.journal.flush()
            if peer.leader.files.wait():
                peer.leader.acknowledge(peer.connection)

    @rule(in_the_middle=st.booleans())
    def stop(self, in_the_middle: bool) -> None:
        if in_the_middle:
            self.newest.stops_before_orders = True
        else:
            self.newest.holds = False

    @rule()
    def lapse(self) -> None:
        self.newest.lapse()

    @precondition(lambda self: not self.newest.holds)
    @rule()
    def regain(self) -> None:
        self.newest.regain()

    @precondition(lambda self: not self.newest.holds)
    @rule()
    def take_over(self) -> None:
        last = LastEntry.newest(self.run)
        assert last is not None
        detach(self.run.metrics_file)
        leader = Leader(self.run, self.peers, self.newest.term + 1, last.state)
        leader.received = dict(last.received)
        known = [json.dumps(line) for line in read_lines(self.run.metrics_file)]
        for name, fields in last.records:
            if name == "metrics" and json.dumps(dict(fields)) not in known:
                leader.files.append(self.run.metrics_file, json.dumps(dict(fields)) + "\n")
        self.leaders.append(leader)
        leader.handle(TookOver(at=AT, term=leader.term), leader.received)

    @rule(worker=st.sampled_from(WORKERS), number=st.integers(0, 10))
    def reconnect(self, worker: int, number: int) -> None:
        """A peer loses its connection, and tries a coordinator, maybe one that has been replaced."""
        self.connect(self.peers[worker], self.leaders[number % len(self.leaders)])

    def connect(self, peer: Peer, leader: Leader) -> None:
        peer.leader = None
        if leader.holds:
            self.connections += 1
            hello = Hello(member=Member(peer.worker, 1), host="10.0.0.1", resumes=peer.number, term=peer.term, known=1)
            leader.message(self.connections, hello)

    @precondition(lambda self: len(self.leaders) > 1)
    @rule(number=st.integers(0, 10))
    def a_line_comes_late(self, number: int) -> None:
        """A stopped leader is continued in the middle of the writing of a line."""
        old = self.leaders[number % (len(self.leaders) - 1)]
        for descriptor in old.files._open.values():
            with open(descriptor, "ab", closefd=False) as file:
                file.write(b'{"of": "the past"}\n')

    @invariant()
    def every_peer_obeys_one_leader_of_growing_terms(self) -> None:
        assert sum(leader.holds for leader in self.leaders) <= 1
        for peer in self.peers:
            assert peer.obeyed == sorted(peer.obeyed)
            assert peer.leader is None or peer.leader.term == peer.term or not peer.leader.holds

    def teardown(self) -> None:
        self.newest.holds = False
        self.take_over()
        for peer in self.peers:
            self.connect(peer, self.newest)
            assert peer.leader is self.newest
            while peer.sent < peer.acknowledged + len(peer.kept):
                self.deliver(peer.worker, 4)
        assert self.newest.files.wait(10.0)
        assert [record.step for record in self.run.steps()] == list(range(self.steps)), "complete, and once"
        assert self.newest.state.committed == self.steps
        assert self.newest.state.generation == 1
        for leader in self.leaders:
            leader.files.abandon()
            leader.files.__exit__()
        shutil.rmtree(self.directory)


Terms.TestCase.settings = settings(max_examples=examples(20), stateful_step_count=25, deadline=None)
TestTerms = Terms.TestCase
