"""A rank's end of the control connection: a thread of its own, so that orders arrive while training blocks.

The activity of the training thread can be read by others, and reads and writes that take long are reported.
"""

from __future__ import annotations

import asyncio
import faulthandler
import hmac
import itertools
import math
import mmap
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from chameleon_ft.clock import unix_s
from chameleon_ft.config import Failure
from chameleon_ft.errors import ControlError
from chameleon_ft.events.evidence import ACTIVITY, ENTRIES, ENTRY_BYTES, STACKS_SIGNAL, activity_entry
from chameleon_ft.host.processes import HostProcess, examine
from chameleon_ft.protocol.address import CoordinatorAccess
from chameleon_ft.protocol.background_tasks import BackgroundTasks
from chameleon_ft.protocol.connection import ControlConnection
from chameleon_ft.protocol.messages import (
    Begin,
    BeginCheckpoint,
    BeginEvaluation,
    BeginSnapshot,
    Discard,
    Drain,
    Exit,
    Finish,
    HangEvidence,
    Hello,
    Inject,
    Kill,
    Message,
    Migrate,
    Position,
    Prepare,
    Probe,
    Published,
    Refused,
    SlowIO,
    SnapshotResolved,
    StartGeneration,
    Stop,
    Switch,
    Welcome,
)
from chameleon_ft.protocol.parts import Member, RankProcess
from chameleon_ft.worker.communicators.base import Communicators, Rendezvous
from chameleon_ft.worker.communicators.store import GenerationStore
from chameleon_ft.worker.fault_injection import FaultInjector


class Activity:
    """Activity of the training thread, which writes it; the control thread reads it.

    It is also in a file in memory from which another process can read it while this one does not answer.
    """

    def __init__(self) -> None:
        self._file: mmap.mmap | None = None
        self._slots = itertools.cycle(range(0, ENTRIES * ENTRY_BYTES, ENTRY_BYTES))
        self.idle("starting")

    def publish(self) -> None:
        """Write the activity to a file in memory from now on, and the stacks of all threads after it at STACKS_SIGNAL.

        Neither needs the interpreter's lock to be read or written, nor a disk. An OSError is only printed.
        """
        try:
            # Not closed: faulthandler writes to it in a signal handler, and other processes find it by its name.
            descriptor = os.memfd_create(ACTIVITY)
            os.write(descriptor, b"".join([activity_entry()] * ENTRIES))
            self._file = mmap.mmap(descriptor, ENTRIES * ENTRY_BYTES)
            faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=True)
        except OSError as error:
            print(f"if this worker hangs, its operation will not be known: {error}", flush=True)

    def begin(self, doing: str) -> None:
        """Note that the thread computes, by itself."""
        self._note({"doing": doing, "waiting": False})

    def idle(self, doing: str) -> None:
        """Note that the thread waits for an order."""
        self._note({"doing": doing, "waiting": True})

    @contextmanager
    def waiting(
        self, doing: str, *, for_message: bool = False, peer: int | None = None, is_reading: bool = False
    ) -> Iterator[None]:
        """Note that inside the block the thread waits, for a message of another rank, for memory or disk, or reads.

        After it the thread does what it did before: it computes, or waits in an outer block. Of a message, `peer` is
        the other rank; None if a collective does not tell.
        """
        before, _ = self._state
        self._note(
            {"doing": doing, "waiting": True, "for_message": for_message, "peer": peer, "is_reading": is_reading}
        )
        try:
            yield
        finally:
            self._note(before)

    def position(self, probe: int) -> Position:
        """Return the answer to a probe."""
        fields, since = self._state
        return Position(probe=probe, since_s=time.monotonic() - since, **fields)

    def _note(self, fields: dict[str, Any]) -> None:
        """Note some fields of a `Position`."""
        self._state = (fields, time.monotonic())
        if self._file is not None:
            begin = next(self._slots)
            self._file[begin : begin + ENTRY_BYTES] = activity_entry(
                unix_s(), fields["doing"], waiting=fields["waiting"], is_reading=fields.get("is_reading", False)
            )


class SlowIOReporter:
    """Tells the coordinator that a read or write of this rank takes long, so that it does not count as a hang.

    The first report comes after `first_s`; the next follow whenever the time has doubled.
    """

    def __init__(self, activity: Activity, send: Callable[[SlowIO], None], *, first_s: float = 10.0) -> None:
        self._activity = activity
        self._send = send
        self._first_s = first_s

    @contextmanager
    def waiting(self, doing: str, generation: int) -> Iterator[None]:
        """Report while the training thread waits for the disk inside the block."""
        over = threading.Event()
        # A separate thread, because the training thread may be stuck in the file system.
        threading.Thread(target=self._report, args=(doing, generation, over), name="slow io", daemon=True).start()
        try:
            with self._activity.waiting(doing):
                yield
        finally:
            over.set()

    def _report(self, doing: str, generation: int, over: threading.Event) -> None:
        pause_s = since_s = self._first_s
        while not over.wait(pause_s):
            self._send(SlowIO(generation=generation, doing=doing, since_s=since_s))
            pause_s, since_s = since_s, 2 * since_s


Order = StartGeneration | Begin | Stop | Exit | Welcome | Refused
"""An order for the training thread."""

_INTERRUPT_EVERY_S = 0.005
# The training thread ends this process after `Exit` within this time; agents wait for less.
_END_S = 10.0
_SEND_S = 1.0


@dataclass(slots=True)
class _Entered:
    """A generation whose communicators some thread of this rank uses, and how to break them."""

    communicators: Communicators
    interrupt: Callable[[], None]
    store: GenerationStore | None = None


class ControlClient:
    """Connects to the coordinator, and reconnects to one that replaces it, for the life of the process.

    Orders go into `orders`, for the training thread to take. The control thread itself does what cannot wait for it: it
    interrupts the communicators of generations that are over until they have been left, and answers probes.

    Attributes:
        activity: The activity of the training thread.
        orders: Orders in the sequence they arrived.
        preparations: Orders to prepare a generation during training, to discard it, or to move layers; likewise.
        finishing: The run shall end after the current step.
        checkpoint_request, snapshot_request, evaluation_request: The number of the newest request; 0 before the first.
        snapshot_resolved: The control thread calls it with a snapshot's step and whether it is complete, once known.
        switch_to: The newest generation that all ranks have prepared, to begin once the current step is applied.
    """

    def __init__(
        self,
        access: CoordinatorAccess,
        *,
        member: Member,
        host: str,
        process: RankProcess | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        self._access = access
        self._hello = Hello(member=member, host=host, process=process, memory_bytes=memory_bytes)
        self._newest_ordered = 0
        self._was_welcomed = False
        self._is_drained = False
        self._loop = asyncio.new_event_loop()
        self._connection = ControlConnection(
            access,
            lambda resumes, term: self._hello.model_copy(
                update={"resumes": resumes, "known": self._newest_ordered, "switch_to": self.switch_to, "term": term}
            ),
        )
        # Held to enter a generation, and to note that one is over.
        self._entering = threading.Lock()
        self._entered: dict[int, _Entered] = {}
        # The newest generation that is known to be over; all before it are, too.
        self._ended = 0
        self._discarded: set[int] = set()
        self._tasks = BackgroundTasks()
        self._faults: FaultInjector | None = None
        self._early: list[Inject] = []
        self.activity = Activity()
        self.orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self.preparations: queue.SimpleQueue[Prepare | Migrate | Discard] = queue.SimpleQueue()
        self.finishing = False
        self.checkpoint_request = self.snapshot_request = self.evaluation_request = 0
        self.snapshot_resolved: Callable[..., None] = lambda step, *, is_complete: None
        self.switch_to = 0

    def start(self) -> None:
        """Connect. Raises ControlError where the coordinator does not answer or does not accept the token."""
        try:
            self._loop.run_until_complete(self._connection.connect())
        except Exception as error:  # noqa: BLE001
            raise ControlError(
                f"cannot connect to the coordinator at {self._access.address}: {error}; "
                "check the address, the token and --tls"
            ) from None
        threading.Thread(target=self._main, name="control", daemon=True).start()

    def send(self, message: Message) -> None:
        """Send from any thread; messages go out in the order they were given."""
        self._loop.call_soon_threadsafe(self._connection.send, message)

    def flush(self) -> None:
        """Wait until everything sent so far has been handed to the network, for a second at most."""
        asyncio.run_coroutine_threadsafe(self._connection.flush(), self._loop).result(_SEND_S)

    def drain(self, number: signal.Signals) -> None:
        """Ask the coordinator to take this rank out of the run because of a signal; it trains until `Exit`."""
        self.send(Drain.model_validate({"signal": number.name}))

    def disconnect(self) -> None:
        """Abort the connection without a closing handshake, as a network failure would."""
        self._loop.call_soon_threadsafe(self._connection.abort)

    def enable_faults(self, faults: FaultInjector) -> None:
        """Let this rank fail by `Inject` from now on; failures that were ordered before happen now."""
        self._loop.call_soon_threadsafe(self._enable_faults, faults)

    def is_over(self, generation: int) -> bool:
        """Return whether a generation is over, or was discarded before it began."""
        return generation <= self._ended or generation in self._discarded

    def enter(self, generation: int, communicators: Communicators, interrupt: Callable[[], None]) -> bool:
        """Use communicators of a generation from now on, which `interrupt` breaks; False if it is over."""
        with self._entering:
            if self.is_over(generation):
                self.leave(generation)
                return False
            prepared = self._entered.get(generation)
            store = None if prepared is None else prepared.store
            self._entered[generation] = _Entered(communicators, interrupt, store)
        return True

    def leave(self, generation: int) -> None:
        """Note that no thread uses the communicators of a generation any more."""
        self._entered.pop(generation, None)

    def rendezvous(self, generation: int) -> Rendezvous:
        """Return how this rank meets the others of a generation that it has entered, until it leaves it."""
        store = self._entered[generation].store = GenerationStore(generation, self.send)
        # The token is new with every start of a run, and no number of a generation is used twice.
        key = hmac.digest(self._access.token.encode(), f"generation {generation}".encode(), "sha256")
        return Rendezvous(store.opened, key)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            # Without a coordinator this rank belongs to no run.
            with self._entering:
                self._ended = sys.maxsize
            self.orders.put(Refused(reason="the connection to the coordinator is lost"))
            self._loop.run_until_complete(self._end())

    async def _serve(self) -> None:
        async for message in self._connection.messages():
            if isinstance(message, Exit | Refused):
                self._is_drained = isinstance(message, Exit) and message.is_drained
                self._connection.end()
                self._tasks.start(self._end())
            self._receive(message)

    def _receive(self, message: Message) -> None:
        match message:
            case Stop(generation=generation) | Switch(generation=generation):
                self._newest_ordered = max(self._newest_ordered, generation)
            case StartGeneration(orders=orders) | Prepare(orders=orders):
                self._newest_ordered = max(self._newest_ordered, orders.generation)
        match message:
            case Welcome() if self._was_welcomed:
                pass
            case Stop() | Exit():
                # An Exit ends this generation, and any whose order has not arrived.
                with self._entering:
                    self._ended = message.generation - 1 if isinstance(message, Stop) else sys.maxsize
                self.orders.put(message)
                self._interrupt_over()
            case Drain():
                print("this worker is to leave; another SIGTERM ends it at once", file=sys.stderr)
            case StartGeneration() | Begin() | Welcome() | Refused():
                self._was_welcomed = True
                self.orders.put(message)
            case Published(generation=generation, values=values):
                entered = self._entered.get(generation)
                if entered is not None and entered.store is not None:
                    entered.store.take_in(values)
            case Prepare() | Migrate():
                self.preparations.put(message)
            case Discard(generation=generation):
                with self._entering:
                    self._discarded.add(generation)
                self.preparations.put(message)
                self._interrupt_over()
            case Finish():
                self.finishing = True
            case BeginCheckpoint(request=request):
                self.checkpoint_request = request
            case BeginEvaluation(request=request):
                self.evaluation_request = request
            case BeginSnapshot(request=request):
                self.snapshot_request = request
            case SnapshotResolved(step=step, is_complete=is_complete):
                self.snapshot_resolved(step, is_complete=is_complete)
            case Switch(generation=generation):
                self.switch_to = generation
            case Kill():
                self._tasks.start(self._end_hung())
            case Probe(probe=probe):
                unreached = tuple(
                    (generation, *peer)
                    for generation, each in self._entered.copy().items()
                    for peer in each.communicators.unreached().items()
                )
                position = self.activity.position(probe)
                self._connection.send(position.model_copy(update={"unreached": unreached}))
            case Inject():
                self._inject(message)
            case _:
                raise ControlError(f"a rank does not expect {message.type!r}")

    def _inject(self, message: Inject) -> None:
        if self._faults is None:
            self._early.append(message)
        elif message.phase is not None:
            self._faults.plan(
                Failure(
                    step=message.step or 0,
                    worker=message.worker,
                    phase=message.phase,
                    kind=message.kind,
                    factor=message.factor,
                )
            )
        elif message.factor is not None:
            self._faults.slow(message.kind, message.factor)
        else:
            self._faults.fail(message.kind, phase=None, step=None)

    def _enable_faults(self, faults: FaultInjector) -> None:
        self._faults = faults
        early, self._early = self._early, []
        for message in early:
            self._inject(message)

    def _interrupt_over(self) -> None:
        self._tasks.start(self._interrupt_until_left())

    async def _end(self) -> None:
        """Have the training thread end this process; if it does not in time, end it here, as no agent may do so."""
        self._interrupt_over()
        await asyncio.sleep(math.inf if self._is_drained else _END_S)
        _kill_this_process()

    async def _end_hung(self) -> None:
        """Send evidence of where the training thread hangs, as an agent would, and end this process."""
        try:
            process, activity = await examine(HostProcess(os.getpid()))
            self._connection.send(HangEvidence(member=self._hello.member, process=process, activity=activity))
            await asyncio.wait_for(self._connection.flush(), _SEND_S)
        finally:
            _kill_this_process()

    async def _interrupt_until_left(self) -> None:
        # Again and again: a thread may be connecting, with sockets that do not exist yet.
        while over := [each for generation, each in self._entered.copy().items() if self.is_over(generation)]:
            for each in over:
                if each.store is not None:
                    each.store.end()
                each.interrupt()
            await asyncio.sleep(_INTERRUPT_EVERY_S)


def _kill_this_process() -> None:
    # No lock of the process holds up this signal.
    os.kill(os.getpid(), signal.SIGKILL)
