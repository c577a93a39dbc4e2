"""A rank's part in a change of placement: layers come and go, and all confirm it; see docs/transition.md."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, zip_longest

import torch

from chameleon_ft.control.messages import Transition
from chameleon_ft.runtime.activity import Activity
from chameleon_ft.runtime.communicators import Channel, CommunicationError, Communicators
from chameleon_ft.runtime.faults import FaultInjector
from chameleon_ft.runtime.layer_messages import LayerInFlight, receive_layer, send_layer, tensor_bytes
from chameleon_ft.runtime.layers import HeldLayers

__all__ = ["Mover", "channels_of_transition"]

_Move = tuple[int, int, int, int, int]  # (round, source, destination, layer, bytes)


class Mover:
    """Carries out transitions.

    Args:
        worker: this rank's worker.
        device: where its layers are.
        stand_ins: whether they stand for those of a profile, whose bytes are counted then.
    """

    def __init__(
        self,
        worker: int,
        device: torch.device,
        *,
        activity: Activity,
        faults: FaultInjector,
        stand_ins: bool = False,
    ) -> None:
        self._worker = worker
        self._device = device
        self._stand_ins = stand_ins
        self._activity = activity
        self._faults = faults

    def carry_out(self, transition: Transition, held: HeldLayers, communicators: Communicators, *, step: int) -> int:
        """Send and receive layers, and return once everyone has confirmed that it holds its part.

        What arrives is taken into `held`; nothing is dropped.

        Args:
            step: the step that comes next.

        Returns:
            Bytes that all workers together have received.

        Raises:
            CommunicationError: the generation has ended, or a layer has arrived damaged. Nobody has switched because
                of this worker; whether anybody has, the coordinator finds out.
        """
        received = self._move(transition.moves, held, communicators, step)
        return self._confirm(received, transition.everyone, communicators, step)

    def _move(self, moves: Sequence[_Move], held: HeldLayers, communicators: Communicators, step: int) -> int:
        """Go through the rounds. In each, layers go out and come in one by one and side by side.

        Everybody takes part in the n-th layer of a round only when it is through with the ones before, and what it has
        to send then is on its way before it waits for anything: so there is always somebody who can go on.
        """
        received = 0
        slots = [slot for _, own in groupby(moves, key=lambda move: move[0]) for slot in self._slots(list(own))]
        for number, (outgoing, incoming) in enumerate(slots):
            self._activity.begin("transfer")
            if number == len(slots) // 2:
                self._faults.at("transfer", step)
            sending = None if outgoing is None else self._send(outgoing, held, communicators)
            if incoming is not None:
                received += self._receive(incoming, held, communicators)
            if sending is not None:
                with self._activity.waiting("transfer"):
                    sending.wait()
        if not slots:
            self._faults.at("transfer", step)
        return received

    def _slots(self, moves: Sequence[_Move]) -> list[tuple[_Move | None, _Move | None]]:
        """What goes out and what comes in at the same time, of one round."""
        outgoing = [move for move in moves if move[1] == self._worker]
        incoming = [move for move in moves if move[2] == self._worker]
        return list(zip_longest(outgoing, incoming))

    def _send(self, move: _Move, held: HeldLayers, communicators: Communicators) -> LayerInFlight:
        _, _, destination, layer, num_bytes = move
        return send_layer(
            held.state_of(layer),
            communicators,
            peer=destination,
            tag=_tag(layer),
            num_bytes=num_bytes,
            device=self._device,
        )

    def _receive(self, move: _Move, held: HeldLayers, communicators: Communicators) -> int:
        _, source, _, layer, num_bytes = move
        with self._activity.waiting(f"layer {layer} of worker {source}"):
            state = receive_layer(communicators, peer=source, tag=_tag(layer), device=self._device)
        held.take_in(layer, state)
        return num_bytes if self._stand_ins else tensor_bytes(state)

    def _confirm(self, received: int, everyone: tuple[int, ...], communicators: Communicators, step: int) -> int:
        ballot = torch.tensor([float(received), 1.0], dtype=torch.float64)
        if len(everyone) > 1:
            result = communicators.vote(ballot, everyone)
            self._faults.at("confirm", step)
            with self._activity.waiting("confirmation"):
                result.wait()
        moved, confirmed = map(float, ballot)
        if round(confirmed) != len(everyone):
            raise CommunicationError(None, f"the confirmation counted {confirmed:g} of {len(everyone)} workers")
        return round(moved)


def channels_of_transition(transition: Transition) -> tuple[Channel, ...]:
    """The channels that a worker's part in a transition needs, each once, in order."""
    return tuple(sorted({Channel(source, destination, True) for _, source, destination, _, _ in transition.moves}))


def _tag(layer: int) -> int:
    return 2 * layer
