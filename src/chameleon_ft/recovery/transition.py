"""Each worker's part in a change of placement; docs/transition.md says why it is safe."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from chameleon_ft.cost.transition import state_bytes
from chameleon_ft.errors import ControlError
from chameleon_ft.plan import LayerRange, Placement
from chameleon_ft.plan.frames import Shared
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.plan.shards import Sharding
from chameleon_ft.transfer import Transfer, transfer_to
from chameleon_ft.workload import LayerCost


class LayerMove(NamedTuple):
    """A layer that one worker sends to another; the bytes are those of the plan."""

    source: int
    destination: int
    layer: int
    num_bytes: int
    round: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionOrders:
    """A worker's part in the change to another placement, before a generation trains; see docs/transition.md.

    Attributes:
        participants: workers of the placement in force and of the new one, ascending.
        keep: the layers that this worker does not give up before the switch; if there are none, it begins anew.
        moves: all that it sends and receives, by rounds.
        sharding: the owners of slices before the transition; see `WorkerOrders.sharding`.
    """

    participants: Shared[tuple[int, ...]]
    keep: tuple[int, ...]
    moves: tuple[LayerMove, ...]
    sharding: Shared[Sharding | None] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTransition:
    """A change from the placement in force to another one."""

    transfer: Transfer
    participants: tuple[int, ...]  # workers that take part, ascending
    keep: Mapping[int, tuple[int, ...]]  # worker -> the layers that it must not give up before the switch, ascending
    sharding: Sharding | None = None  # the owners of slices of the optimizer's state before it

    def orders(self, layers: Sequence[LayerCost]) -> dict[int, TransitionOrders]:
        """Return each participant's part."""
        moves: dict[int, list[LayerMove]] = defaultdict(list)
        for move in moves_of(self.transfer, layers):
            moves[move.source].append(move)
            moves[move.destination].append(move)
        return {
            worker: TransitionOrders(
                participants=self.participants,
                keep=self.keep[worker],
                moves=tuple(moves[worker]),
                sharding=self.sharding,
            )
            for worker in self.participants
        }


def moves_of(transfer: Transfer, layers: Sequence[LayerCost]) -> tuple[LayerMove, ...]:
    """Return all that moves, by rounds."""
    return tuple(
        LayerMove(message.source, message.destination, layer, state_bytes(layers[layer]), number)
        for number, messages in enumerate(transfer.rounds)
        for message in messages
        for layer in message.layers
    )


def plan_transition(
    in_force: Placement,
    new: Placement,
    *,
    held: Mapping[int, Collection[int]],
    layers: Sequence[LayerCost],
    transfer: Transfer | None = None,
    moves_slices: bool = False,
) -> PlannedTransition | None:
    """Return the transition to `new`; None if it equals the placement in force, without lost workers.

    Args:
        in_force: the placement of which every worker holds its part; lost workers may be in it.
        held: every live worker -> the layers whose state it holds, at the step to resume from.
        layers: costs of all layers.
        transfer: from `held` to `new`, if it is known.
        moves_slices: whether one is needed in any case, because owners of slices change.

    Raises:
        NoHolderError: layers are held by no live worker.
        ControlError: a worker does not hold its part of the placement in force, which the protocol rules out.
    """
    in_force = in_force.without([worker for worker in in_force.workers if worker not in held])
    own = {worker: set(in_force.layers_of(worker)) for worker in held}
    if lacking := [worker for worker in held if not own[worker] <= set(held[worker])]:
        raise ControlError(f"workers {lacking} do not hold their layers of the placement in force: {held}")
    if new == in_force and not moves_slices:
        return None
    if transfer is None:
        transfer = transfer_to(placement_of(held, new.num_layers), new, live=held, layers=layers)
    # A newcomer may have received layers before the generation in which they moved was interrupted.
    senders = {message.source for message in transfer.messages}
    participants = sorted({*new.workers, *in_force.workers, *senders})
    wanted = {worker: set(new.layers_of(worker)) for worker in participants}
    for message in transfer.messages:
        wanted[message.source].update(message.layers)
    return PlannedTransition(
        transfer=transfer,
        participants=tuple(participants),
        keep=FrozenMap(
            {worker: tuple(sorted(own[worker] | (wanted[worker] & set(held[worker])))) for worker in participants}
        ),
    )


def placement_of(held: Mapping[int, Collection[int]], num_layers: int) -> Placement:
    """Return the placement in which each worker holds these layers, without workers that hold none."""
    return Placement(num_layers, {worker: _ranges(layers) for worker, layers in held.items() if layers})


def _ranges(layers: Collection[int]) -> tuple[LayerRange, ...]:
    runs = groupby(enumerate(sorted(layers)), key=lambda pair: pair[1] - pair[0])
    return tuple(LayerRange(run[0], run[-1] + 1) for run in ([layer for _, layer in group] for _, group in runs))
