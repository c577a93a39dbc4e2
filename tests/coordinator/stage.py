"""A coordinator on a stage: workers and hosts are puppets, and the clock goes on only while all wait for it."""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from chameleon_ft.config import Batch, Checkpoint, Parallel, Recovery, RunConfig, Snapshots
from chameleon_ft.coordinator.command_runner import RunSetup
from chameleon_ft.coordinator.coordinator import Coordinator
from chameleon_ft.coordinator.journal import Journal
from chameleon_ft.coordinator.state.state import State
from chameleon_ft.cost.profile import Profile
from chameleon_ft.events.records import FailureRecord
from chameleon_ft.plan.vote import Vote
from chameleon_ft.protocol.job_info import JobInfo
from chameleon_ft.protocol.messages import (
    CheckpointSaved,
    Committed,
    Exit,
    Finished,
    Hello,
    HostHello,
    Message,
    Migrate,
    Prepare,
    Prepared,
    Quiesced,
    Spawn,
    Started,
    StartGeneration,
    WorkerExited,
)
from chameleon_ft.protocol.parts import BoundaryMessage, InspectedLayers, LeafMessage, Member, OperationTimes
from chameleon_ft.protocol.server import Peer
from chameleon_ft.recovery.generation import WorkerOrders
from chameleon_ft.storage.checkpoints import seal_layer
from chameleon_ft.storage.file_queue import FileQueue
from chameleon_ft.storage.files import RunDirectory
from chameleon_ft.storage.recorder import Recorder, View
from tests.coordinator.journaled import Lines, but_clock
from tests.stored import event_lines, layer_directory
from tests.undivided import undivided

LAYERS = 4
JOB = JobInfo(
    model="a model",
    data="some data",
    relative_costs=(1.0,) * LAYERS,
    layers=InspectedLayers(
        boundaries=(BoundaryMessage(leaves=(LeafMessage(shape=(2, 8), dtype="float32"),)),) * LAYERS
    ),
    boundary_bytes=(64,) * LAYERS,
    param_bytes=(256,) * LAYERS,
    gradient_bytes=(256,) * LAYERS,
    state_bytes=(772,) * LAYERS,
)

THREE_PIPELINES: dict[str, Any] = {"workers": 6, "parallel": Parallel(dp=3, pp=2)}
"""Changes to the configuration of a stage."""

Sent = TypeVar("Sent")


class Puppet:
    """Stands in for the connection to a rank, an agent or a command."""

    _numbers = itertools.count(1)

    def __init__(self, name: str) -> None:
        self.number = next(self._numbers)
        self.address = name
        self.sent: list[Message] = []
        self.dropped = False
        self.will_return = False
        self.is_local = False

    def send(self, message: Message, text: str = "") -> None:
        self.sent.append(message)

    def drop(self) -> None:
        self.dropped = True

    def last(self, kind: type[Sent]) -> Sent:
        """The newest message of this kind that it was sent."""
        return next(message for message in reversed(self.sent) if isinstance(message, kind))

    @property
    def begun(self) -> WorkerOrders:
        """The orders of the newest generation that it was to begin at once."""
        return self.last(StartGeneration).orders

    def count(self, kind: type[Any]) -> int:
        return sum(isinstance(message, kind) for message in self.sent)

    def __repr__(self) -> str:
        return f"Puppet({self.address})"


class _StandingClock(selectors.DefaultSelector):
    """Waits for nothing: where it would have to, its time goes on at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is not None:
            self.now += timeout
        return ready


class StandingLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock that stands still but for waits."""

    def __init__(self) -> None:
        self._standing = _StandingClock()
        super().__init__(self._standing)

    def time(self) -> float:
        return self._standing.now

    def hold_up(self, seconds: float) -> None:
        """Do nothing else for a while."""
        self._standing.now += seconds


def vote(step: int) -> Vote:
    return Vote(grad_square_sum=4.0, loss_sum=12.0 * (step + 1), terms=12, samples=12, finish=False)


@dataclass
class Stage:
    """A coordinator and the puppets around it. Unless a test says otherwise: two pipelines of two stages, one host."""

    coordinator: Coordinator
    run: RunDirectory
    ranks: dict[int, Puppet] = field(default_factory=dict)
    host: Puppet = field(default_factory=lambda: Puppet("host"))

    def become(self, state: State) -> None:
        """Continue from another state, which no event has led to."""
        self.coordinator.state = state
        assert self.coordinator._journal is not None
        self.coordinator._journal.begin(state, self.coordinator._now())

    def say(self, puppet: Puppet, message: Message) -> None:
        """Have a puppet say something to the coordinator."""
        self.coordinator.message(cast(Peer, puppet), message)

    def join(self, worker: int) -> Puppet:
        puppet = Puppet(f"worker {worker}")
        spawned = [each for m in self.host.sent if isinstance(m, Spawn) for each in m.members if each.worker == worker]
        self.say(puppet, Hello(member=spawned[-1] if spawned else Member(worker, 0), host="10.0.0.1"))
        self.ranks[worker] = puppet
        return puppet

    def gather(self, workers: int, *, with_agent: bool = True) -> None:
        """Have all workers join."""
        if with_agent:
            self.say(self.host, HostHello(host="a host", slots=workers))
        for worker in range(workers):
            self.join(worker)

    def live(self) -> list[int]:
        return [worker for worker, puppet in self.ranks.items() if not puppet.dropped]

    def order_of(self, worker: int) -> WorkerOrders | None:
        """The newest order that a worker got and that came into force."""
        newest = self.coordinator.state.active_generation
        sent = [m.orders for m in self.ranks[worker].sent if isinstance(m, StartGeneration | Prepare)]
        orders = [each for each in sent if each.generation <= newest]
        return max(orders, key=lambda order: order.generation, default=None)

    def order(self) -> WorkerOrders:
        """The newest order of any live worker that came into force."""
        orders = [order for worker in self.live() if (order := self.order_of(worker)) is not None]
        return max(orders, key=lambda order: order.generation)

    def ahead(self) -> WorkerOrders | None:
        """The order of the generation that is being prepared, for any worker."""
        upcoming = self.coordinator.state.switches.next
        sent = [m.orders for worker in self.live() for m in self.ranks[worker].sent if isinstance(m, Prepare)]
        return next((m for m in sent if upcoming is not None and m.generation == upcoming.number), None)

    def prepare(self, *workers: int, error: str | None = None) -> None:
        """Have workers, or all that have not yet, prepare the next generation."""
        upcoming = self.coordinator.state.switches.next
        assert upcoming is not None
        for worker in workers or sorted(upcoming.unprepared):
            self.say(self.ranks[worker], Prepared(generation=upcoming.number, error=error))

    def switch(self, step: int) -> None:
        """Have all prepare the next generation, take this step, and switch."""
        self.prepare()
        self.commit(step, switch=True)
        self.start()

    def switch_to_the_end(self, step: int) -> int:
        """Switch, twice if layers move; return the next step."""
        while self.coordinator.state.switches.next is not None:
            self.switch(step)
            step += 1
        return step

    def start(self, workers: Collection[int] | None = None) -> None:
        """Have the members of the newest generation begin to train."""
        order = self.order()
        for worker in order.members if workers is None else workers:
            self.say(self.ranks[worker], Started(generation=order.generation))

    def commit(
        self,
        step: int,
        worker: int | None = None,
        *,
        step_s: float = 0.1,
        longest_s: float = 0.01,
        switch: bool = False,
    ) -> None:
        """Have one worker report a step; without `worker`, all members do."""
        order = self.order()
        for member in order.members if worker is None else [worker]:
            self.say(
                self.ranks[member],
                Committed(
                    generation=order.generation,
                    step=step,
                    vote=replace(vote(step), switch=switch),
                    grad_norm=0.5,
                    lr=0.1,
                    step_s=step_s,
                    times=OperationTimes(forward_s=longest_s, backward_s=longest_s, longest_s=longest_s),
                ),
            )

    def layers_of(self, worker: int) -> tuple[int, ...]:
        """Return the layers that a worker holds in the end, by its newest order."""
        order = self.order_of(worker)
        segments = () if order is None else order.segments
        held = {layer for segment in segments if worker in segment.holders for layer in segment.layers}
        for message in self.ranks[worker].sent:
            if isinstance(message, Migrate) and order is not None and message.generation == order.generation:
                held |= {move.layer for move in message.moves if move.destination == worker}
        return tuple(sorted(held))

    def quiesce(
        self,
        generation: int,
        committed: int,
        *workers: int,
        reduced: bool = False,
        placed: int | None = None,
        layers: tuple[int, ...] | None = None,
    ) -> None:
        """Have workers, or all live ones, come to rest; by default they have switched and hold what they shall."""
        for worker in workers or self.live():
            self.say(
                self.ranks[worker],
                Quiesced(
                    generation=generation,
                    committed=committed,
                    reduced=reduced,
                    last_vote=vote(committed - 1) if committed else None,
                    placed=self.coordinator.state.active_generation if placed is None else placed,
                    layers=self.layers_of(worker) if layers is None else layers,
                ),
            )

    def reap(self, worker: int, exit_code: int = -9) -> None:
        """Have the host reap a worker."""
        spawned = [m for m in self.host.sent if isinstance(m, Spawn) and worker in m.workers]
        incarnation = len(spawned) or 1
        self.say(self.host, WorkerExited(member=Member(worker, incarnation), exit_code=exit_code))

    def recover(self, generation: int, committed: int = 3) -> FailureRecord:
        """Have the survivors of a loss quiesce and begin again; return the newest record."""
        self.quiesce(generation, committed)
        self.start()
        return self.failures[-1]

    def depart(self, puppet: Puppet) -> None:
        """Have a puppet's connection end."""
        puppet.dropped = True
        self.coordinator.departed(cast(Peer, puppet))

    def silence(self, puppet: Puppet) -> None:
        """Have a puppet's heartbeats stop."""
        self.coordinator.silent(cast(Peer, puppet), 2.5)

    def save(self, step: int, worker: int, *layers: int, copy_s: float = 0.0, write_s: float = 0.0) -> None:
        """Have a worker report layers of a checkpoint, which are then on disk."""
        for layer in layers:
            directory = layer_directory(self.run.checkpoints, step, layer)
            if not directory.exists():
                directory.mkdir(parents=True)
                (directory / "tensors").write_text(f"layer {layer}")
                seal_layer(directory, {})
        generation = self.order().generation
        saved = CheckpointSaved(generation=generation, step=step, layers=layers, copy_s=copy_s, write_s=write_s)
        self.say(self.ranks[worker], saved)

    def finish(self, committed: int) -> None:
        order = self.order()
        for worker in order.members:
            self.say(self.ranks[worker], Finished(generation=order.generation))

    def train(self, *, workers: int = 4, steps: int = 3) -> None:
        """Gather and take `steps` steps."""
        self.gather(workers)
        self.start()
        for step in range(steps):
            self.commit(step)

    @property
    def failures(self) -> list[FailureRecord]:
        return self.run.failures()

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in event_lines(self.run) if event["event"] == name]

    @property
    def ended(self) -> tuple[str, str] | None:
        """Status and reason, once the run has come to its end."""
        return self.coordinator.state.ended

    def told_to_exit(self) -> list[int]:
        return [worker for worker, puppet in self.ranks.items() if puppet.count(Exit)]


@contextmanager
def _staged(
    directory: Path, *, resume: bool = False, measured: Profile | None = None, **changes: Any
) -> Iterator[Stage]:
    fields: dict[str, Any] = {
        "job": "a.job:job",
        "workers": 4,
        "steps": 10,
        "parallel": Parallel(dp=2, pp=2),
        "batch": Batch(micro_batches=6, micro_batch_size=2),
        "checkpoint": Checkpoint(every=2),
        "snapshots": Snapshots(every=0),
        "recovery": Recovery(policy="reroute"),
    }
    fields |= changes
    config = RunConfig(**{**fields, "parallel": undivided(fields["parallel"])})
    path = directory / "run"
    run = RunDirectory.open(path) if path.exists() else RunDirectory.create(path, config)
    with Recorder(run, View()) as recorder:
        setup = RunSetup(config=config, run=run, recorder=recorder, job=JOB, profile=measured, resume=resume)
        lines = Lines()
        journal = Journal(Path("journal.jsonl"), cast(FileQueue, lines))
        coordinator = Coordinator(setup, journal=journal)
        yield Stage(coordinator, run)
        if lines.text and coordinator._journal is journal:
            journal.flush()
            assert but_clock(lines.replayed().state) == but_clock(coordinator.state)


def play(directory: Path, scene: Callable[[Stage], Coroutine[Any, Any, None]], **changes: Any) -> None:
    """Run a scene on a stage of its own; `changes` are those of the configuration, or its profile as `measured`."""

    async def whole() -> None:
        with _staged(directory, **changes) as stage:
            await scene(stage)

    with asyncio.Runner(loop_factory=StandingLoop) as runner:
        runner.run(whole())


def scene(
    **changes: Any,
) -> Callable[[Callable[[Stage], Coroutine[Any, Any, None]]], Callable[[Path], None]]:
    """Make a test of a scene."""

    def decorate(body: Callable[[Stage], Coroutine[Any, Any, None]]) -> Callable[[Path], None]:
        def test(tmp_path: Path) -> None:
            play(tmp_path, body, **changes)

        test.__name__ = body.__name__
        test.__doc__ = body.__doc__
        return test

    return decorate
