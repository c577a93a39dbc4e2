"""A rank's part in a migration: layers move while it trains; see docs/transition.md.

When a rank may request a layer that migrates to it.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
from torch import Tensor

from chameleon_ft.plan.shards import UNITS
from chameleon_ft.protocol.messages import Migrate
from chameleon_ft.worker.communicators import CommunicationError, Communicators, InFlight
from chameleon_ft.worker.communicators.base import Tag
from chameleon_ft.worker.execution.gather import ParameterExchange
from chameleon_ft.worker.execution.gradients import GradientBuffers
from chameleon_ft.worker.execution.layers import HeldLayers, LayerState
from chameleon_ft.worker.execution.optimizer import Range
from chameleon_ft.worker.fault_injection import FaultInjector
from chameleon_ft.worker.state_transfer.layer_messages import (
    IncomingLayers,
    Memory,
    OutgoingLayer,
    OutgoingLayers,
    layer_checksums,
    tensor_bytes,
)


@dataclass(slots=True)
class RequestWindow:
    """The part of each step in which layers are requested, in seconds by `time.monotonic`.

    It lasts until the sources will probably have the sums of the step, as long after its beginning as they had them in
    the step before, and beyond that for as long as votes may be delayed.

    Attributes:
        step_s: of a step, as measured; None if none has been.
        rest_s: predicted time of the first step, if it is the rest of one that was interrupted.
        hold_s: for which votes may still be delayed.
        is_closed: whether no further layer is requested in this step.
        begun_at_s: when the step began.
    """

    step_s: float | None
    rest_s: float | None
    hold_s: float = 0.0
    is_closed: bool = False
    begun_at_s: float = field(default_factory=time.monotonic)
    _open_s: float | None = field(init=False)
    _held_until_s: float | None = None  # while the vote of this step is delayed

    def __post_init__(self) -> None:
        self._open_s = self.rest_s or self.step_s

    def begin(self, *, step_s: float | None, hold_s: float) -> None:
        """Begin to request layers; `step_s` counts if no step has been measured."""
        self.step_s = self.step_s or step_s
        self._open_s = self._open_s or self.step_s
        self.hold_s = hold_s

    @property
    def ends_s(self) -> float | None:
        """When a layer that is requested now has to be there; None if none may be requested."""
        if self.is_closed:
            return None
        if self._held_until_s is not None or self._open_s is None:
            return self._held_until_s
        return self.begun_at_s + self._open_s + self.hold_s

    def hold(self, hold_s: float) -> float:
        """Note that the sources have their sums, and delay the vote for so long; return until when."""
        now_s = time.monotonic()
        self._open_s = now_s - self.begun_at_s
        self.hold_s -= hold_s
        self._held_until_s = now_s + hold_s
        return self._held_until_s

    def next_step(self) -> None:
        """Note that the next step begins."""
        self.is_closed, self._held_until_s = False, None
        if self.rest_s is not None:
            self._open_s, self.rest_s = self.step_s, None
        self.begun_at_s = time.monotonic()


_WHOLE: Final = (0, 0)  # instead of units of a slice: the layer
_POLL_S: Final = 0.01
_DONE: Final = -1  # instead of a layer: there is no further request


@dataclass(frozen=True, slots=True)
class _Item:
    """A layer, or a slice of its optimizer's state, that is pulled."""

    source: int
    layer: int
    units: Range
    num_bytes: int


class LayerMigration:
    """Pulls layers from their sources while the rank trains a generation, and serves those that other ranks pull.

    Between two updates the state of a layer is constant. A destination requests one layer after another, each in its
    state after a number of votes, and does not vote while one is on its way. Without its vote no rank can apply the
    next update, so a source sends exactly the state that was requested. From then on, it also sends the sum of the
    layer's gradients before each vote, and the destination applies the same update as the source. If slices of the
    optimizer's state have owners, those that move to a destination are requested like layers, after them. It updates
    these slices from then on; the source of a layer sends it the parameters after each update. A layer is requested
    only if it will probably arrive before the sources have their sums, which they announce in each step, or within the
    time for which the order lets one vote wait for all layers and for the switch.

    In each step call `settle` before the vote, with all sums complete, and `resume` after the update; and between the
    two `exchange_parameters`, if owners of slices have updated parameters and sent them to the holders. `begin` may be
    called at any time of a step, and ranks need not do so in the same step: destinations wait for their sources. From
    then on threads of its own send and receive, until the communicators are interrupted or `close` is called.

    Args:
        held, buffers: the rank's layers and their gradients.
        committed: updates applied so far.
        step_s: seconds of a step, as measured; None if none has been.
        rest_s: predicted seconds of the first step, if it is the rest of one that was interrupted.
        stand_in_scale: how many bytes of the model a byte of the gradients stands for, if the layers are stand-ins for
            those of a profile, whose bytes are counted then; otherwise None.
        is_ending: returns whether the present step is known to be the last of the generation.
        await_parameters: waits until the layers have the parameters of the last update.
    """

    def __init__(
        self,
        worker: int,
        *,
        held: HeldLayers,
        buffers: GradientBuffers,
        communicators: Communicators,
        device: torch.device,
        faults: FaultInjector,
        committed: int,
        step_s: float | None,
        rest_s: float | None = None,
        stand_in_scale: int | None,
        is_ending: Callable[[], bool],
        await_parameters: Callable[[], object] = lambda: None,
    ) -> None:
        self._worker = worker
        self._held = held
        self._buffers = buffers
        self._communicators = communicators
        self._device = device
        self._faults = faults
        self._stand_in_scale = stand_in_scale
        self._is_ending = is_ending
        self._await_parameters = await_parameters
        self._condition = threading.Condition()
        self._committed = committed
        self._votes = 0  # of the generation so far; those on steps that are computed again count, too
        self._summed = False  # whether this rank's sums are complete
        self._announced = False  # whether its destinations know
        self._pulling = False
        self._arrived: deque[tuple[_Item, LayerState]] = deque()
        self._current: list[tuple[int, int]] = []  # (source, layer) of those that have been taken in
        self._served: list[tuple[int, int]] = []  # (destination, layer)
        self._given = 0  # of these, those whose sums have been sent in this step
        self._error: BaseException | None = None
        self._window = RequestWindow(step_s, rest_s)
        self._items: tuple[_Item, ...] = ()
        self._bytes: dict[tuple[int, Range], int] = {}
        self._memory: Mapping[int, Memory | None] = {}
        self._migrated: Future[None] = Future()
        self._sources: list[int] = []
        self._destinations: list[int] = []
        self._threads: list[threading.Thread] = []

    def begin(self, order: Migrate, *, memory: Mapping[int, Memory | None], migrated: Future[None] | None) -> None:
        """Begin to pull and to serve. Called from any thread, once; the layers that are to arrive are expected.

        Args:
            order: the layers that move between all ranks.
            memory: layer -> memory for its optimizer's state.
            migrated: is given a result once all layers of this rank have arrived; None if it cannot receive any.
        """
        with self._condition:
            if self._error is not None:
                return  # the generation is over
            every = [(move[1], _Item(move[0], move[2], _WHOLE, move[3])) for move in order.moves]
            every += [(move[1], _Item(move[0], *move[2:3], move[3:5], move[5])) for move in order.slices]
            self._items = tuple(item for worker, item in every if worker == self._worker and migrated is not None)
            self._bytes = {(item.layer, item.units): item.num_bytes for _, item in every}
            self._memory, self._migrated = memory, migrated or Future()
            self._sources = sorted({item.source for item in self._items})
            self._destinations = sorted({worker for worker, item in every if item.source == self._worker})
            self._window.begin(step_s=order.step_s, hold_s=order.hold_s if self._items else 0.0)
            works = [partial(self._serve, each) for each in self._destinations]
            for work in (*works, self._pull_all, self._give_sums):
                thread = threading.Thread(target=self._guarded, args=(work,), name="migration", daemon=True)
                self._threads.append(thread)
                thread.start()

    def settle(self) -> None:
        """Wait for the layer on its way, and hold all that have arrived from the next update on, with their gradients.

        If the order allows it, wait for all layers, and for the order to switch.

        Raises:
            CommunicationError: a source is gone, or a layer has arrived damaged.
        """
        with self._condition:
            self._summed = True
            self._condition.notify_all()
            sources = self._sources
            # If layers begin to move later in this step, no source is waited for, and none is requested.
            self._window.is_closed = not sources
            hold_s = self._window.hold_s if sources else 0.0
        for source in sources:
            # It may have begun to announce the sums for this vote before an earlier one.
            announced = torch.full((1,), -1, dtype=torch.int64, device=self._device)
            while int(announced) < self._votes:
                self._receive(announced, source).wait()
        with self._condition:
            until_s = self._window.hold(hold_s)
            self._condition.notify_all()
            while time.monotonic() < until_s and not (self._migrated.done() or self._error or self._is_ending()):
                self._condition.wait(_POLL_S)
            self._window.is_closed = True
            self._condition.wait_for(lambda: not self._pulling)
            if self._error is not None:
                raise self._error
            slices: dict[int, dict[Range, LayerState]] = {}
            while self._arrived:
                item, state = self._arrived.popleft()
                if item.units == _WHOLE:
                    self._held.take_in(item.layer, state)
                    self._current.append((item.source, item.layer))
                else:
                    slices.setdefault(item.layer, {})[item.units] = state
            if slices:
                self._held.own_more(slices)
        current = [(source, buffer) for source, layer in self._current for buffer in self._buffers.of_layer(layer)]
        sums = [self._receive(buffer, source) for source, buffer in current]
        for receive in sums:
            receive.wait()
        while time.monotonic() < until_s and not self._is_ending():
            time.sleep(_POLL_S)

    @property
    def holds_vote(self) -> bool:
        """Whether the next vote may wait for layers of this rank."""
        return bool(self._sources) and self._window.hold_s > 0

    @property
    def has_shadow_holders(self) -> bool:
        """Whether this rank has received layers, or others have received some from it, as of the last vote."""
        with self._condition:
            return bool(self._current or self._given)

    def exchange_parameters(self) -> None:
        """Send the parameters of layers to shadow holders that have received these, and receive those of own ones.

        Raises CommunicationError.
        """
        with self._condition:
            served = self._served[: self._given]
        to: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)
        origin: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)
        for pairs, found in ((served, to), (self._current, origin)):
            for peer, layer in pairs:
                found[peer] += [(layer, view) for view in self._held.views_of_slice(layer, (0, UNITS))]
        layers = [layer for _, layer in self._current]
        ParameterExchange(to, origin, self._communicators, layers=layers, tag=Tag.PULLED_PARAMETERS).run()

    def resume(self, *, applied: bool = True) -> None:
        """Note that the update has been applied; or that the step is computed again, and has other sums."""
        with self._condition:
            self._committed += applied
            self._votes += 1
            self._summed = self._announced = False
            self._given = 0
            self._window.next_step()
            self._condition.notify_all()

    def close(self, *, interrupt: bool) -> None:
        """Wait for the threads to end; interrupt the communicators, unless all layers have arrived everywhere."""
        with self._condition:
            self._error = self._error or CommunicationError(None, "the generation is over")
            self._condition.notify_all()
        for thread in self._threads:
            while thread.is_alive():
                if interrupt:
                    self._communicators.interrupt()
                thread.join(_POLL_S)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the training thread raises it
            with self._condition:
                self._error = self._error or error.with_traceback(None)
                self._pulling = False
                self._condition.notify_all()
            if not isinstance(error, CommunicationError):
                self._communicators.interrupt()  # others wait for what this thread was to send

    # --- the destination ---------------------------------------------------------------------------------------------

    def _pull_all(self) -> None:
        # The least so far: most of the time of a small slice is the round trip to its source.
        s_per_byte: float | None = None
        if not self._items:
            self._faults.at("transfer", self._committed)
        for number, item in enumerate(self._items):
            votes = self._begin_pull((s_per_byte or 0.0) * item.num_bytes)
            if number == len(self._items) // 2:
                self._faults.at("transfer", self._committed)
            start = time.monotonic()
            state = self._pull(item, votes)
            moved = tensor_bytes(state) if self._stand_in_scale is None else item.num_bytes
            taken_s_per_byte = (time.monotonic() - start) / max(1, moved)
            s_per_byte = taken_s_per_byte if s_per_byte is None else min(taken_s_per_byte, s_per_byte)
            with self._condition:
                self._pulling = False
                self._arrived.append((item, state))
                self._condition.notify_all()
        for source in self._sources:
            self._request(source, _DONE, _WHOLE, 0)
        self._migrated.set_result(None)

    def _begin_pull(self, expected_s: float) -> int:
        """Wait until a layer may be requested that takes about so long; return the number of votes until then."""
        with self._condition:
            refused_in: float | None = None  # the step in which there was no time for it
            while self._error is None:
                if (ends_s := self._window.ends_s) is not None:
                    is_late = refused_in not in (None, self._window.begun_at_s)  # refused in an earlier step
                    if is_late or time.monotonic() + expected_s <= ends_s:
                        break
                    refused_in = self._window.begun_at_s
                self._condition.wait()
            if self._error is not None:
                raise self._error
            self._pulling = True
            return self._votes

    def _pull(self, item: _Item, votes: int) -> LayerState:
        self._request(item.source, item.layer, item.units, votes)
        incoming = IncomingLayers(self._communicators, peer=item.source, tag=Tag.PULLED_LAYER, device=self._device)
        incoming.describe()
        if item.units == _WHOLE:
            incoming.start_next(self._held.targets_of(item.layer), self._memory.get(item.layer))
        else:
            incoming.start_next({})
        return incoming.finish_next()

    def _request(self, source: int, layer: int, units: Range, votes: int) -> None:
        request = torch.tensor([layer, *units, votes], dtype=torch.int64, device=self._device)
        self._communicators.send(request, peer=source, tag=Tag.PULL_REQUEST).wait()

    def _receive(self, tensor: Tensor, source: int) -> InFlight:
        return self._communicators.receive(tensor, peer=source, tag=Tag.PULLED_SUM)

    # --- the source --------------------------------------------------------------------------------------------------

    def _serve(self, destination: int) -> None:
        """Send a destination the layers that it requests, until it has all."""
        while True:
            request = torch.empty(4, dtype=torch.int64, device=self._device)
            self._communicators.receive(request, peer=destination, tag=Tag.PULL_REQUEST).wait()
            layer, start, stop, votes = request.tolist()
            units = start, stop
            if layer == _DONE:
                return
            with self._condition:
                while self._votes < votes and self._error is None:
                    self._condition.wait()
                if self._error is not None:
                    raise self._error
            self._await_parameters()
            is_whole = units == _WHOLE
            state = self._held.constant_state_of(layer) if is_whole else self._held.state_of_slice(layer, units)
            checksums: Future[list[int]] = Future()
            checksums.set_result(layer_checksums(state, self._device))
            outgoing = OutgoingLayers(
                [OutgoingLayer(state, self._bytes[layer, units], checksums)],
                self._communicators,
                peer=destination,
                tag=Tag.PULLED_LAYER,
                device=self._device,
                gives_way=True,
            )
            outgoing.start_next()
            outgoing.finish_next()
            if is_whole:
                with self._condition:
                    self._served.append((destination, layer))
                    self._condition.notify_all()

    def _give_sums(self) -> None:
        """Announce before each vote that the sums are complete, and send those of the layers that have been served."""
        announcing: list[InFlight] = []  # a destination that has not begun receives none
        sending: list[InFlight] = []
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._error is not None or self._has_to_give)
                if self._error is not None:
                    return
                told = () if self._announced else self._destinations
                self._announced = True
                due, self._given = self._served[self._given :], len(self._served)
                vote = torch.tensor([self._votes], dtype=torch.int64, device=self._device)
            if told:
                sending.clear()  # after the vote of the step before, all have arrived
            announcing += [self._communicators.send(vote, peer=peer, tag=Tag.PULLED_SUM) for peer in told]
            for peer, layer in due:
                for buffer in self._buffers.of_layer(layer):
                    num_bytes = buffer.nbytes * (self._stand_in_scale or 1)
                    sending.append(
                        self._communicators.send(buffer, peer=peer, tag=Tag.PULLED_SUM, stands_for_bytes=num_bytes)
                    )

    @property
    def _has_to_give(self) -> bool:
        return self._summed and (not self._announced or self._given < len(self._served))
