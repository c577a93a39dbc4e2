"""Each worker's part in a change of placement; docs/transition.md says why it is safe."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from chameleon_ft.control.wire.parts import Transition, pack_shards
from chameleon_ft.errors import ControlError
from chameleon_ft.estimate import state_bytes
from chameleon_ft.plan import LayerRange, Placement
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.plan.shards import Sharding
from chameleon_ft.transfer import Transfer, transfer_to
from chameleon_ft.workload import LayerCost

Move = tuple[int, int, int, int, int]
"""(round, source, destination, layer, bytes)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTransition:
    """A change from the placement in force to another one."""

    transfer: Transfer
    participants: tuple[int, ...]  # workers that take part, ascending
    keep: Mapping[int, tuple[int, ...]]  # worker -> the layers that it must not give up before the switch, ascending
    sharding: Sharding | None = None  # the owners of slices of the optimizer's state before it

    def parts(self, layers: Sequence[LayerCost]) -> dict[int, Transition]:
        """Return each participant's part; they share what all have to know, which grows with their number."""
        moves: dict[int, list[Move]] = defaultdict(list)
        for move in moves_of(self.transfer, layers):
            for worker in set(move[1:3]):
                moves[worker].append(move)
        common = Transition(
            participants=self.participants,
            keep=(),
            moves=(),
            shards=None if self.sharding is None else pack_shards(self.sharding),
        )
        return {
            worker: common.model_copy(update={"keep": self.keep[worker], "moves": tuple(moves[worker])})
            for worker in self.participants
        }


def moves_of(transfer: Transfer, layers: Sequence[LayerCost]) -> tuple[Move, ...]:
    """Return all that moves, by rounds."""
    return tuple(
        (number, message.source, message.destination, layer, state_bytes(layers[layer]))
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
