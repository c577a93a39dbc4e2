"""A rank's part in a migration: layers move while it trains; see docs/transition.md."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Final

import torch

from chameleon_ft.control.wire.parts import Migration
from chameleon_ft.runtime.communicators import Channel, CommunicationError, Communicators
from chameleon_ft.runtime.execution.layers import HeldLayers, LayerState
from chameleon_ft.runtime.fault_injection import FaultInjector
from chameleon_ft.runtime.state_transfer.layer_messages import (
    IncomingLayers,
    OutgoingLayer,
    OutgoingLayers,
    layer_checksums,
    tensor_bytes,
)
from chameleon_ft.runtime.state_transfer.preallocation import Memory

__all__ = ["LayerMigration", "channels_of_migration"]

_REQUEST_TAG: Final = 1 << 30  # far from those of micro-batches
_LAYER_TAG: Final = _REQUEST_TAG + 2
_POLL_S: Final = 0.01
_DONE: Final = -1  # instead of a layer: there is no further request


class LayerMigration:
    """Pulls layers from their sources while the rank trains, and serves those that other ranks pull.

    Between two updates the state of a layer is constant. A destination requests one layer after another, each in its
    state after a number of updates, and does not vote while one is on its way. Without its vote no rank can apply the
    next update, so a source sends exactly the state that was requested, and the destination takes part in the next
    update of the layer. A layer is requested only if it will probably arrive before the rank would have to vote.

    Call `settle` before each vote and `resume` after each update. Threads of its own send and receive, until all layers
    have arrived or the communicators are interrupted; then call `close`.

    Args:
        held: expects the layers that are to arrive.
        memory: layer -> memory for its optimizer's state.
        committed: updates applied so far.
        step_s: seconds of a step, measured or predicted; None: the first one only measures it.
        stand_ins: whether the layers stand for those of a profile, whose bytes are counted then.
        migrated: is given a result once all layers of this rank have arrived.
    """

    def __init__(
        self,
        migration: Migration,
        worker: int,
        *,
        held: HeldLayers,
        memory: Mapping[int, Memory | None],
        communicators: Communicators,
        device: torch.device,
        faults: FaultInjector,
        committed: int,
        step_s: float | None,
        stand_ins: bool,
        migrated: Future[None],
    ) -> None:
        self._held = held
        self._memory = memory
        self._communicators = communicators
        self._device = device
        self._faults = faults
        self._stand_ins = stand_ins
        self._condition = threading.Condition()
        self._committed = committed
        self._settling = False  # between `settle` and `resume`
        self._pulling = False
        self._arrived: deque[tuple[int, LayerState]] = deque()
        self._error: BaseException | None = None
        self._migrated = migrated
        self._begun_at_s = time.monotonic()  # of the step
        self._open_s = step_s  # from the beginning of the last step until it settled
        self._moves = [move for move in migration.moves if move[1] == worker]
        self._bytes = {layer: num_bytes for _, _, layer, num_bytes in migration.moves}
        destinations = sorted({destination for source, destination, _, _ in migration.moves if source == worker})
        self._threads = [
            threading.Thread(target=self._guarded, args=(self._serve, each), name=f"serve {each}", daemon=True)
            for each in destinations
        ]
        self._threads.append(threading.Thread(target=self._guarded, args=(self._pull_all,), name="pull", daemon=True))
        for thread in self._threads:
            thread.start()

    def settle(self) -> None:
        """Wait for the layer on its way, and hold all that have arrived from the next update on.

        Raises:
            CommunicationError: a source is gone, or a layer has arrived damaged.
        """
        with self._condition:
            self._settling = True
            self._open_s = time.monotonic() - self._begun_at_s
            self._condition.wait_for(lambda: not self._pulling)
            if self._error is not None:
                raise self._error
            while self._arrived:
                self._held.take_in(*self._arrived.popleft())

    def resume(self) -> None:
        """Note that the update has been applied."""
        with self._condition:
            self._committed += 1
            self._settling = False
            self._begun_at_s = time.monotonic()
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

    def _guarded(self, work: Callable[..., None], *arguments: int) -> None:
        try:
            work(*arguments)
        except BaseException as error:  # noqa: BLE001 - the training thread raises it
            with self._condition:
                self._error = self._error or error.with_traceback(None)
                self._pulling = False
                self._condition.notify_all()

    # --- the destination ---------------------------------------------------------------------------------------------

    def _pull_all(self) -> None:
        s_per_byte = 0.0
        if not self._moves:
            self._faults.at("transfer", self._committed)
        for number, (source, _, layer, num_bytes) in enumerate(self._moves):
            version = self._begin_pull(s_per_byte * num_bytes)
            if number == len(self._moves) // 2:
                self._faults.at("transfer", version)
            start = time.monotonic()
            state = self._pull(source, layer, version)
            moved = num_bytes if self._stand_ins else tensor_bytes(state)
            s_per_byte = (time.monotonic() - start) / max(1, moved)
            with self._condition:
                self._pulling = False
                self._arrived.append((layer, state))
                self._condition.notify_all()
        for source in sorted({move[0] for move in self._moves}):
            self._request(source, _DONE, 0)
        self._migrated.set_result(None)

    def _begin_pull(self, expected_s: float) -> int:
        """Wait until a layer may be requested that takes about so long; return the updates applied until then."""
        with self._condition:
            refused_in: float | None = None  # the step in which there was no time for it
            while self._error is None:
                if not self._settling and self._open_s is not None:
                    ends_s = self._begun_at_s + self._open_s
                    if refused_in not in (None, self._begun_at_s) or time.monotonic() + expected_s <= ends_s:
                        break
                    refused_in = self._begun_at_s
                self._condition.wait()
            if self._error is not None:
                raise self._error
            self._pulling = True
            return self._committed

    def _pull(self, source: int, layer: int, version: int) -> LayerState:
        self._request(source, layer, version)
        incoming = IncomingLayers(self._communicators, peer=source, tag=_LAYER_TAG, device=self._device)
        incoming.describe()
        incoming.start_next(self._held.targets_of(layer), self._memory.get(layer))
        return incoming.finish_next()

    def _request(self, source: int, layer: int, version: int) -> None:
        request = torch.tensor([layer, version], dtype=torch.int64, device=self._device)
        self._communicators.send(request, peer=source, tag=_REQUEST_TAG).wait()

    # --- the source --------------------------------------------------------------------------------------------------

    def _serve(self, destination: int) -> None:
        """Send a destination the layers that it requests, until it has all."""
        while True:
            request = torch.empty(2, dtype=torch.int64, device=self._device)
            self._communicators.receive(request, peer=destination, tag=_REQUEST_TAG).wait()
            layer, version = request.tolist()
            if layer == _DONE:
                return
            with self._condition:
                while self._committed < version and self._error is None:
                    self._condition.wait()
                if self._error is not None:
                    raise self._error
            state = self._held.constant_state_of(layer)
            checksums: Future[list[int]] = Future()
            checksums.set_result(layer_checksums(state, self._device))
            outgoing = OutgoingLayers(
                [OutgoingLayer(state, self._bytes[layer], checksums)],
                self._communicators,
                peer=destination,
                tag=_LAYER_TAG,
                device=self._device,
                gives_way=True,
            )
            outgoing.start_next()
            outgoing.finish_next()


def channels_of_migration(worker: int, migration: Migration) -> tuple[Channel, ...]:
    """Return the channels of a worker's part in a migration, each once, in order."""
    pairs = {(source, destination) for source, destination, _, _ in migration.moves}
    both_ways = pairs | {(destination, source) for source, destination in pairs}
    return tuple(
        Channel(sender, receiver, True) for sender, receiver in sorted(both_ways) if worker in (sender, receiver)
    )
