"""A rank's part in a migration: layers move while it trains; see docs/transition.md."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
from torch import Tensor

from chameleon_ft.models.build import tensor_bytes
from chameleon_ft.plan.shards import UNITS
from chameleon_ft.protocol.messages import Migrate
from chameleon_ft.worker.communicators.base import InFlight, Tag
from chameleon_ft.worker.context import RankContext
from chameleon_ft.worker.execution.gather import ParameterExchange
from chameleon_ft.worker.execution.gradients import GradientBuffers
from chameleon_ft.worker.execution.layers import HeldLayers, LayerState
from chameleon_ft.worker.execution.optimizer import Range
from chameleon_ft.worker.mover import Mover
from chameleon_ft.worker.state_transfer.layer_messages import (
    Allocation,
    Memory,
    receive_state,
    send_state,
)


@dataclass(slots=True)
class RequestWindow:
    """The part of each step in which layers are requested, in seconds by `time.monotonic`.

    It lasts until the sources will probably have the sums of the step, as long after its beginning as they had them in
    the step before, and beyond that for as long as votes may be delayed.

    Attributes:
        step_s: The measured time of a step; None if none has been measured.
        rest_s: The predicted time of the first step, if it is the rest of one that was interrupted.
        hold_s: The time for which votes may still be delayed.
        is_closed: No further layer is requested in this step.
    """

    step_s: float | None
    rest_s: float | None
    hold_s: float = 0.0
    is_closed: bool = False
    begun_at_s: float = field(default_factory=time.monotonic)
    _open_s: float | None = field(init=False)
    _held_until_s: float | None = None

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


# Instead of the units of a slice, this means the layer.
_WHOLE: Final = (0, 0)
_POLL_S: Final = 0.01
# Instead of a layer, this means that no further request follows.
_DONE: Final = -1


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
    then on tasks of the mover send and receive.

    Args:
        held, buffers: The rank's layers and their gradients.
        committed: The number of updates applied so far.
        window: The part of each step in which layers are requested.
        is_ending: Returns whether the present step is known to be the last of the generation.
        await_parameters: Waits until the layers have the parameters of the last update.
    """

    def __init__(
        self,
        rank: RankContext,
        *,
        held: HeldLayers,
        buffers: GradientBuffers,
        mover: Mover,
        committed: int,
        window: RequestWindow,
        is_ending: Callable[[], bool],
        await_parameters: Callable[[], object] = lambda: None,
    ) -> None:
        self._rank = rank
        self._held = held
        self._buffers = buffers
        self._mover = mover
        self._communicators = mover.communicators
        self._is_ending = is_ending
        self._await_parameters = await_parameters
        # Of the training thread:
        self._sources: list[int] = []
        self._arrived: list[tuple[_Item, LayerState]] = []
        # (source, layer) of those that have been taken in.
        self._current: list[tuple[int, int]] = []
        self._migrated: Future[None] = Future()
        # Shared with tasks, under `Mover.changed`:
        self._window = window
        self._committed = committed
        # Votes of the generation so far; those on steps that are computed again count, too.
        self._votes = 0
        self._sums_are_complete = False
        self._sums_are_announced = False
        self._pulling = False
        # (destination, layer), and how many of them have got their sums in this step.
        self._served: list[tuple[int, int]] = []
        self._given = 0

    def begin(self, order: Migrate, *, allocations: Mapping[int, Allocation], migrated: Future[None] | None) -> None:
        """Begin to serve, and to pull once the training thread has added the layers. Called from any thread, once.

        Args:
            order: The layers that move between all ranks.
            allocations: Memory for the layers that are to arrive at this rank.
            migrated: It is given a result once all of them have arrived; None if this rank cannot receive any.
        """
        every = [(move.destination, _Item(move.source, move.layer, _WHOLE, move.num_bytes)) for move in order.moves]
        every += [(move[1], _Item(move[0], *move[2:3], move[3:5], move[5])) for move in order.slices]
        items = [item for worker, item in every if worker == self._rank.worker and migrated is not None]
        num_bytes = {(item.layer, item.units): item.num_bytes for _, item in every}
        destinations = sorted({worker for worker, item in every if item.source == self._rank.worker})
        if self._mover.is_over:
            return
        for destination in destinations:
            self._mover.start(self._serve, destination, num_bytes)
        self._mover.start(self._give_sums, destinations)
        if migrated is not None and items:
            self._mover.deliver(partial(self._begin_to_pull, order, items, allocations, migrated))
            return
        self._rank.faults.at("transfer", self._committed)
        if migrated is not None:
            migrated.set_result(None)

    def _begin_to_pull(
        self, order: Migrate, items: Sequence[_Item], allocations: Mapping[int, Allocation], migrated: Future[None]
    ) -> None:
        """Add the layers that are to arrive, blank and with gradients, and request them from now on."""
        try:
            self._held.expect({layer: allocation.layer for layer, allocation in allocations.items()})
            self._buffers.expect(self._held)
        except Exception as error:  # noqa: BLE001 - training does not depend on it
            migrated.set_exception(error)
            return
        self._migrated = migrated
        self._sources = sorted({item.source for item in items})
        with self._mover.changed:
            self._window.begin(step_s=order.step_s, hold_s=order.hold_s)
        memory = {layer: allocation.memory for layer, allocation in allocations.items()}
        self._mover.start(self._pull_all, items, memory, self._sources, migrated)

    def settle(self) -> None:
        """Wait for the layer on its way, and hold all that have arrived from the next update on, with their gradients.

        If the order allows it, wait for all layers, and for the order to switch.

        Raises:
            CommunicationError: a source is gone, or a layer has arrived damaged.
        """
        mover = self._mover
        mover.carry_out_deliveries()
        with mover.changed:
            self._sums_are_complete = True
            # If layers begin to move later in this step, no source is waited for, and none is requested.
            self._window.is_closed = not self._sources
            mover.changed.notify_all()
        for source in self._sources:
            # It may have begun to announce the sums for this vote before an earlier one.
            announced = torch.full((1,), -1, dtype=torch.int64, device=self._rank.device)
            while int(announced) < self._votes:
                self._receive(announced, source).wait()
        with mover.changed:
            until_s = self._window.hold(self._window.hold_s if self._sources else 0.0)
            mover.changed.notify_all()
            while time.monotonic() < until_s and not (self._migrated.done() or self._is_ending()):
                mover.wait_for(self._migrated.done, _POLL_S)
            self._window.is_closed = True
            mover.wait_for(lambda: not self._pulling)
        mover.carry_out_deliveries()
        slices: dict[int, dict[Range, LayerState]] = {}
        for item, state in self._arrived:
            if item.units == _WHOLE:
                self._held.take_in(item.layer, state)
                self._current.append((item.source, item.layer))
            else:
                slices.setdefault(item.layer, {})[item.units] = state
        self._arrived.clear()
        if slices:
            self._held.own_more(slices)
        current = [(source, buffer) for source, layer in self._current for buffer in self._buffers.of_layer(layer)]
        for receive in [self._receive(buffer, source) for source, buffer in current]:
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
        with self._mover.changed:
            return bool(self._current or self._given)

    def exchange_parameters(self) -> None:
        """Send the parameters of layers to shadow holders that have received these, and receive those of own ones.

        Raises CommunicationError.
        """
        with self._mover.changed:
            served = self._served[: self._given]
        to: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)
        origin: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)
        for pairs, found in ((served, to), (self._current, origin)):
            for peer, layer in pairs:
                found[peer] += [(layer, view) for view in self._held.views_of_slice(layer, (0, UNITS))]
        layers = [layer for _, layer in self._current]
        ParameterExchange(to, origin, self._mover, layers=layers, tag=Tag.PULLED_PARAMETERS).run()

    def resume(self, *, applied: bool = True) -> None:
        """Note that the update has been applied; or that the step is computed again, and has other sums."""
        with self._mover.changed:
            self._committed += applied
            self._votes += 1
            self._sums_are_complete = self._sums_are_announced = False
            self._given = 0
            self._window.next_step()
            self._mover.changed.notify_all()

    # --- the destination ---------------------------------------------------------------------------------------------

    def _pull_all(
        self,
        items: Sequence[_Item],
        memory: Mapping[int, Memory | None],
        sources: Sequence[int],
        migrated: Future[None],
    ) -> None:
        # The least so far: most of the time of a small slice is the round trip to its source.
        s_per_byte: float | None = None
        for number, item in enumerate(items):
            votes = self._begin_pull((s_per_byte or 0.0) * item.num_bytes)
            if number == len(items) // 2:
                self._rank.faults.at("transfer", self._committed)
            start = time.monotonic()
            self._request(item.source, item.layer, item.units, votes)
            state = receive_state(
                self._communicators,
                peer=item.source,
                tag=Tag.PULLED_LAYER,
                device=self._rank.device,
                targets=self._held.targets_of(item.layer) if item.units == _WHOLE else {},
                memory=memory.get(item.layer) if item.units == _WHOLE else None,
            )
            moved = tensor_bytes(state) if self._rank.stand_in_scale is None else item.num_bytes
            taken_s_per_byte = (time.monotonic() - start) / max(1, moved)
            s_per_byte = taken_s_per_byte if s_per_byte is None else min(taken_s_per_byte, s_per_byte)
            self._mover.deliver(partial(self._arrived.append, (item, state)))
            with self._mover.changed:
                self._pulling = False
                self._mover.changed.notify_all()
        for source in sources:
            self._request(source, _DONE, _WHOLE, 0)
        migrated.set_result(None)

    def _begin_pull(self, expected_s: float) -> int:
        """Wait until a layer may be requested that takes about so long; return the number of votes until then."""
        # The step in which there was no time for it.
        refused_in: float | None = None

        def may_begin() -> bool:
            nonlocal refused_in
            # A layer that comes with the last step is of no use.
            if (ends_s := self._window.ends_s) is None or self._is_ending():
                return False
            is_late = refused_in not in (None, self._window.begun_at_s)
            if is_late or time.monotonic() + expected_s <= ends_s:
                return True
            refused_in = self._window.begun_at_s
            return False

        with self._mover.changed:
            self._mover.wait_for(may_begin)
            self._pulling = True
            return self._votes

    def _request(self, source: int, layer: int, units: Range, votes: int) -> None:
        request = torch.tensor([layer, *units, votes], dtype=torch.int64, device=self._rank.device)
        self._communicators.send(request, peer=source, tag=Tag.PULL_REQUEST).wait()

    def _receive(self, tensor: Tensor, source: int) -> InFlight:
        return self._communicators.receive(tensor, peer=source, tag=Tag.PULLED_SUM)

    # --- the source --------------------------------------------------------------------------------------------------

    def _serve(self, destination: int, num_bytes: Mapping[tuple[int, Range], int]) -> None:
        """Send a destination the layers that it requests, until it has all."""
        while True:
            request = torch.empty(4, dtype=torch.int64, device=self._rank.device)
            self._communicators.receive(request, peer=destination, tag=Tag.PULL_REQUEST).wait()
            layer, start, stop, votes = request.tolist()
            units = start, stop
            if layer == _DONE:
                return
            self._await_state(votes)
            is_whole = units == _WHOLE
            state = self._held.constant_state_of(layer) if is_whole else self._held.state_of_slice(layer, units)
            send_state(
                state,
                self._communicators,
                peer=destination,
                tag=Tag.PULLED_LAYER,
                device=self._rank.device,
                num_bytes=num_bytes[layer, units],
                gives_way=True,
            ).finish_next()
            if is_whole:
                with self._mover.changed:
                    self._served.append((destination, layer))
                    self._mover.changed.notify_all()

    def _await_state(self, votes: int) -> None:
        """Wait until this rank's layers are in their state after so many votes."""
        with self._mover.changed:
            self._mover.wait_for(lambda: self._votes >= votes)
        self._await_parameters()

    def _give_sums(self, destinations: Sequence[int]) -> None:
        """Announce before each vote that the sums are complete, and send those of the layers that have been served."""
        # A destination that has not begun receives none.
        announcing: list[InFlight] = []
        sending: list[InFlight] = []
        while True:
            with self._mover.changed:
                self._mover.wait_for(
                    lambda: (
                        self._sums_are_complete and (not self._sums_are_announced or self._given < len(self._served))
                    )
                )
                told = () if self._sums_are_announced else destinations
                self._sums_are_announced = True
                due, self._given = self._served[self._given :], len(self._served)
                vote = torch.tensor([self._votes], dtype=torch.int64, device=self._rank.device)
            if told:
                # After the vote of the step before, all have arrived.
                sending.clear()
            announcing += [self._communicators.send(vote, peer=peer, tag=Tag.PULLED_SUM) for peer in told]
            for peer, layer in due:
                for buffer in self._buffers.of_layer(layer):
                    stands_for = buffer.nbytes * (self._rank.stand_in_scale or 1)
                    sending.append(
                        self._communicators.send(buffer, peer=peer, tag=Tag.PULLED_SUM, stands_for_bytes=stands_for)
                    )
