"""The coordinator: the state machine of a run among sockets, clocks, executors and files."""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

import chameleon_ft
from chameleon_ft.clock import unix_s
from chameleon_ft.coordinator import commands, events
from chameleon_ft.coordinator.command_runner import CommandRunner, RunSetup
from chameleon_ft.coordinator.handlers import endings, takeover
from chameleon_ft.coordinator.handlers import slowness as injection
from chameleon_ft.coordinator.handlers.endings import SIGNAL_WINDOW_S
from chameleon_ft.coordinator.journal import Journal, LastEntry
from chameleon_ft.coordinator.leadership import Leadership
from chameleon_ft.coordinator.peers import Peers, read_part
from chameleon_ft.coordinator.state.settings import Settings
from chameleon_ft.coordinator.state.state import Phase, State
from chameleon_ft.coordinator.state_machine import TICK_S, step
from chameleon_ft.errors import ControlError, DeposedError
from chameleon_ft.events.kinds import Refused
from chameleon_ft.events.records import RunStatus
from chameleon_ft.protocol import messages
from chameleon_ft.protocol.background_tasks import BackgroundTasks, in_thread
from chameleon_ft.protocol.messages import Message
from chameleon_ft.protocol.server import Peer

# A peer keeps so many messages until they are acknowledged.
_ACKNOWLEDGE_EVERY: Final = 64
# So many requests of an object store may be slow, one after the other, before the end of the run.
_REQUESTS: Final = 4
# So many rejected connections are all recorded; after that those at every power of two.
_ALL_REJECTED: Final = 100


class Coordinator:
    """Runs the state machine of a run, from its first worker to its end.

    All methods are called from the thread of the event loop. The commands of an event are carried out before the next
    event is handled. Before that, the event is written to `journal`, if the disk answers; see there. All file
    operations go through the queue of the recorder, so that no disk can stop the event loop. With `last`, the newest
    entry of a journal, it continues the run of a coordinator that is lost.

    While `leadership` does not hold, the coordinator does nothing: events are handled once it holds again, as if the
    process had been stopped meanwhile. Without `leadership`, as in tests, there is no other coordinator.
    """

    def __init__(
        self,
        setup: RunSetup,
        *,
        journal: Journal | None = None,
        last: LastEntry | None = None,
        leadership: Leadership | None = None,
    ) -> None:
        config, run = setup.config, setup.run
        self._config = config
        self._recorder = setup.recorder
        self._peers = Peers()
        self._tasks = BackgroundTasks(failed=self._task_failed)
        self._commands = CommandRunner(
            setup, peers=self._peers, now=self._now, handle=self._handle_answer, tasks=self._tasks
        )
        self._rejected = 0
        self._leadership = leadership
        # Whether it will leave, or leaves, the run to another coordinator.
        self._is_to_hand_over = self._is_leaving = False
        # These calls wait until this coordinator leads again.
        self._deferred: deque[Callable[[], None]] = deque()
        # Likewise, of an event that is in the journal, and the events that wait behind it.
        self._late_orders: tuple[tuple[commands.Command, ...], deque[events.Event]] | None = None
        self._end: asyncio.Future[tuple[RunStatus, str]] = asyncio.get_running_loop().create_future()
        self._clock_ahead_s = 0.0
        versions = {**setup.job.versions, "chameleon": chameleon_ft.__version__}
        job = setup.job
        settings = Settings.of(
            config, run, num_layers=job.num_layers, versions=versions, has_evaluation=job.has_evaluation
        )
        self.state = State.before(
            settings,
            last_generation=run.last_generation(),
            skipped=run.skipped_steps() if setup.resume else (),
            left_out=run.left_out() if setup.resume else (),
            term=self._term,
        )
        self._journal = journal
        if last is not None:
            self._take_over(last)

    # --- the run -----------------------------------------------------------------------------------------------------

    def _take_over(self, last: LastEntry) -> None:
        """Continue from the last state of another coordinator, and by its clock."""
        self.state = last.state
        self._peers.continue_from(last.received)
        self._recorder.complete(last.records)
        # A peer waits no longer for a coordinator. So any more is the difference between the clocks of two hosts.
        passed_s = min(max(0.0, unix_s() - last.at.unix_s), last.state.settings.timeouts.reconnect_s)
        self._clock_ahead_s = last.at.monotonic_s + passed_s - asyncio.get_running_loop().time()
        if last.state.ended is not None:
            self._finish(*last.state.ended)
        self._commands.orders.continue_from(last.state)
        # The new journal has to know these, too, until the peers have come back.
        address = "" if self._leadership is None else self._leadership.claim.address
        self._handle(events.TookOver(at=self._now(), term=self._term, address=address), received=self._peers.received)

    @property
    def first_connection(self) -> int:
        """The number of the first connection: no other coordinator of the run has used it for a peer in the journal."""
        return 1 + max((*self.state.connections, *self.state.members.fenced, *self._peers.received), default=0)

    @property
    def _term(self) -> int:
        return 0 if self._leadership is None else self._leadership.term

    def leads(self) -> bool:
        """Return whether this coordinator leads the run now."""
        return self._leadership is None or (self._leadership.holds() and not self._is_leaving)

    async def wait(self) -> RunStatus:
        """Return how the run ended, once it has; all records are written by then.

        Raises DeposedError once another coordinator leads: then nothing more is written or sent.
        """
        self._tasks.start(self._watch())
        if self._leadership is not None:
            self._tasks.start(self._leadership.keep(lapsed=self._lapsed, regained=self._regained))
        try:
            status, reason = await self._saved(*await asyncio.shield(self._end))
            await self._recorder.catch_up()
            self._recorder.finish(status, reason=reason)
            await self._commands.checkpoints.copy_records(self._config.store.timeout_s)
        except DeposedError:
            self._recorder.files.abandon()
            self._commands.checkpoints.abandon()
            raise
        finally:
            self._tasks.cancel()
        return status

    async def _saved(self, status: RunStatus, reason: str) -> tuple[RunStatus, str]:
        """Return how the run ended, once the last checkpoint is marked or could not be."""
        timeout_s = _REQUESTS * self._config.store.timeout_s
        error = await self._commands.checkpoints.why_unmarked(self.state.committed, timeout_s)
        if error is None or endings.UNSAVED in reason:
            return status, reason
        return "failed" if status == "finished" else status, f"{reason}, but {endings.UNSAVED}: {error}"

    def interrupt(self) -> None:
        """End the run after the current step with a checkpoint; called again, or before training, at once."""
        if self._may_act(self.interrupt):
            self._handle(events.Interrupted(at=self._now()))

    def terminate(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End the run like `interrupt`, because the cluster has sent a signal; the user may resume it."""
        if self._may_act(partial(self.terminate, number)):
            self._handle(events.Interrupted(at=self._now(), signal=number.name))

    def hand_over(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Leave the run to a coordinator that stands by; without one, `terminate`."""
        if not self._may_act(partial(self.hand_over, number)):
            return
        if not self.state.standbys or self._is_ending or self._leadership is None:
            self.terminate(number)
        elif not self._is_to_hand_over:
            self._is_to_hand_over = True
            self._tasks.start(self._hand_over(number, self._leadership))

    async def _hand_over(self, number: signal.Signals, leadership: Leadership) -> None:
        """Wait until it is known whether the signal has reached others, too; then release the term, or `terminate`."""
        await asyncio.sleep(SIGNAL_WINDOW_S)
        self._is_to_hand_over = False
        if self._is_ending:
            return
        if not (standbys := self.state.standbys):
            self.terminate(number)
            return
        self._is_leaving = True
        await self._recorder.catch_up()
        await leadership.release()
        self._depose(DeposedError(self._term, " or ".join(standbys.values())))

    @property
    def _is_ending(self) -> bool:
        return self.state.ending is not None or self.state.phase is Phase.OVER

    def end(self, status: RunStatus, reason: str) -> None:
        """End the run."""
        if self._may_act(partial(self.end, status, reason)):
            self._handle(events.EndRequested(at=self._now(), status=status, reason=reason))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if self.leads() and not self._deferred:
                self._handle(events.Ticked(at=self._now()))
                self._recorder.watch_files(self.state.checkpoints.describe_newest())
                self._commands.checkpoints.watch()

    def _task_failed(self, error: Exception) -> None:
        if isinstance(error, DeposedError):
            self._depose(error)
        else:
            self.broken(error)

    # --- leadership --------------------------------------------------------------------------------------------------

    def _may_act(self, call: Callable[[], None]) -> bool:
        """Return whether this coordinator leads; if not, `call` is made once it leads again."""
        if self.leads() and not self._deferred and self._late_orders is None:
            return True
        self._deferred.append(call)
        return False

    def _is_cut_off(self, since_s: float) -> bool:
        """Return whether all peers on other hosts are silent, and this coordinator is the suspect."""
        workers = {each.connection: each.host for each in self.state.members if each.is_live and each.connection}
        if self._leadership is None or not (self.state.standbys or self._peers.are_elsewhere(workers)):
            return False
        # Peers have given up by then, too.
        return self._leadership.suspend_if_cut_off(since_s, patience_s=self._config.timeouts.reconnect_s)

    def _lapsed(self) -> None:
        """Let peers find the coordinator that may lead instead; without one, they train on, and wait for this one.

        Those that are silent are to connect again: it is not known which of them still have a connection.
        """
        if self.state.standbys:
            self._peers.drop_all()
        elif self._leadership is not None and self._leadership.is_suspended:
            self._peers.drop_all(local=False)

    def _regained(self) -> None:
        if self._is_leaving:
            return
        self._carry_out_late_orders()
        if self._late_orders is not None:
            # It does not lead any more.
            return
        deferred, self._deferred = self._deferred, deque()
        reason = "" if self._leadership is None else self._leadership.lapse
        self._handle(events.TermClaimed(at=self._now(), term=self._term, reason=reason))
        for call in deferred:
            call()

    def _carry_out_late_orders(self) -> None:
        """Carry out the orders held back, before any event: the journal has only its last records."""
        late, self._late_orders = self._late_orders, None
        if late is not None:
            orders, waiting = late
            self._carry_out(orders, waiting)
            self._handle_all(waiting)

    def _depose(self, error: DeposedError) -> None:
        if self._leadership is not None:
            self._leadership.end()
        if not self._end.done():
            self._end.set_exception(error)

    # --- what the server calls ---------------------------------------------------------------------------------------

    def message(self, peer: Peer, message: Message) -> None:
        """Handle a message. Raises ControlError if the peer may not send it."""
        # This one and the next change nothing.
        if isinstance(message, messages.ReadRunFile):
            self._tasks.start(self._send_part(peer, message))
            return
        if isinstance(message, messages.CheckpointState):
            failed = [each for each in sorted(self.state.checkpoints.failed.items()) if each[0] >= message.committed]
            late = self._recorder.files.late()
            why = "" if late is None else f"{late.reason}, at {late.path}"
            peer.send(message.model_copy(update={"failed": failed[0] if failed else None, "late": why}))
            return
        self._peers.add(peer)
        if not self._may_act(partial(self._message_deferred, peer, message)):
            return
        # The number of a connection that is not in the journal may be that of another peer by now.
        replaces = None
        if isinstance(message, messages.Hello | messages.HostHello):
            replaces = takeover.replaced(self.state, message)
        number, received = peer.number, self._peers.count(peer.number, message, replaces=replaces)
        match message:
            case messages.Publish():
                self._peers.send_all(self._commands.rendezvous.publish(number, message))
            case messages.LookUp():
                self._peers.send_all(self._commands.rendezvous.look_up(number, message))
            case _:
                event = events.Received(at=self._now(), connection=number, message=message)
                self._handle(event, received={number: received})
        if received and received % _ACKNOWLEDGE_EVERY == 0:
            # It may lack events that were not due.
            if self._journal is not None:
                self._journal.flush(received={number: received})
            if self._recorder.files.wait() and self.leads():
                self._commands.acknowledge(self.state, number)

    async def _send_part(self, peer: Peer, request: messages.ReadRunFile) -> None:
        # A disk may not answer.
        peer.send(await in_thread(partial(read_part, self._recorder.run, request)))

    def _message_deferred(self, peer: Peer, message: Message) -> None:
        try:
            self.message(peer, message)
        except ControlError as error:
            self.refused(peer.address, str(error))
            peer.send(messages.Refused(reason=str(error)))
            peer.drop()

    def departed(self, peer: Peer) -> None:
        """Handle the end of a connection."""
        if not self._may_act(partial(self.departed, peer)):
            return
        if self._peers.remove(peer):
            will_return = peer.will_return
            self._handle(events.Disconnected(at=self._now(), connection=peer.number, will_return=will_return))

    def silent(self, peer: Peer, since_s: float) -> None:
        """Handle missing heartbeats: the peer is lost, or this coordinator is cut off and another one may lead."""
        if not self.leads() or (not peer.is_local and self._is_cut_off(since_s)):
            return
        if peer.number in self._peers:
            self._handle(events.Silent(at=self._now(), connection=peer.number, since_s=since_s))
        else:
            peer.drop()

    def answered(self) -> None:
        """Handle a sign of life of a peer on another host."""
        if self._leadership is not None:
            self._leadership.heard()

    def refused(self, address: str, reason: str) -> None:
        """Record that a connection was turned away; the more there are, the fewer are recorded."""
        self._rejected += 1
        is_recorded = self._rejected <= _ALL_REJECTED or self._rejected.bit_count() == 1
        if is_recorded and self.leads() and self.state.phase is not Phase.OVER:
            self._recorder.record(Refused(address=address, reason=reason, count=self._rejected))

    def broken(self, error: Exception) -> None:
        """End the run because of an error of the coordinator itself, and log it."""
        log = self._commands.files.log_error(error)
        reason = f"the coordinator failed: {type(error).__name__}: {error}; see {log}"
        try:
            self.end("failed", reason)
        except Exception:  # noqa: BLE001 - the end must not depend on the part that failed
            self._finish("failed", reason)

    # --- events and commands -----------------------------------------------------------------------------------------

    def _handle(self, event: events.Event, *, received: Mapping[int, int] | None = None) -> None:
        """Change the state by an event and by the answers to its commands. Raises ControlError like `step`.

        Args:
            received: what `Journal.write` is to note of it.
        """
        if (injected := self._new_faults(event)) is not None:
            self._handle_all(deque([injected]))
        self._handle_all(deque([event]), received)

    def _handle_all(self, waiting: deque[events.Event], received: Mapping[int, int] | None = None) -> None:
        while waiting:
            event = waiting.popleft()
            state, orders = step(self.state, event)
            self._commands.require_costs(self.state, event, state)
            if self._journal is not None:
                self._journal.write(event, self.state, state, orders, received=received)
            self.state, received = state, None
            self._commands.planner.calibration.learn(state.detectors)
            # The process may have been stopped since the event, for so long that another coordinator leads.
            if orders and not self.leads():
                self._late_orders = orders, waiting
                return
            self._carry_out(orders, waiting)

    def _carry_out(self, orders: Iterable[commands.Command], waiting: deque[events.Event]) -> None:
        """Carry out commands, and append the events that they cause to `waiting`."""
        waiting.extend(answer for command in orders if (answer := self._execute(command)) is not None)

    def _new_faults(self, event: events.Event) -> events.FaultsInjected | None:
        """Read the injected failures if they may matter to an event; None if there are no new ones."""
        if not injection.may_reveal_faults(self.state, event):
            return None
        faults = self._commands.files.faults()
        if faults is None or faults == self.state.faults:
            return None
        return events.FaultsInjected(at=event.at, faults=faults)

    def _execute(self, command: commands.Command) -> events.Event | None:
        """Carry out a command; return the event that it leads to at once, if any."""
        match command:
            case commands.Resign():
                self._depose(DeposedError(self.state.term))
            case commands.Finish(status=status, reason=reason):
                self._finish(status, reason)
            case _:
                return self._commands.execute(self.state, command)
        return None

    def _finish(self, status: RunStatus, reason: str) -> None:
        if not self._end.done():
            self._end.set_result((status, reason))

    def _handle_answer(self, event: events.Event) -> None:
        """Handle an event that answers a command later."""
        if self._may_act(partial(self._handle_answer, event)):
            self._handle(replace(event, at=self._now()))

    def _now(self) -> events.Moment:
        monotonic_s = asyncio.get_running_loop().time() + self._clock_ahead_s
        return events.Moment(unix_s=unix_s(), monotonic_s=monotonic_s)
