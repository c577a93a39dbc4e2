"""The plan of a generation, as stored in the state of the run.

Switches to later generations: the one that is prepared, the plans that follow it, and the layers that move.

Each worker's part in a change of placement; docs/transition.md says why it is safe.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Self

from pydantic import TypeAdapter
from pydantic_core import to_json

from chameleon_ft.cost.transition import state_bytes
from chameleon_ft.errors import ControlError
from chameleon_ft.plan import LayerRange, Placement, Plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.plan.rest import RestOfStep
from chameleon_ft.plan.shards import Sharding, SliceMove
from chameleon_ft.plan.snapshots import SnapshotLayout
from chameleon_ft.protocol.parts import Transition, pack_shards
from chameleon_ft.schedule import InFlightLimit
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivePlan:
    """A plan in force. `policy` and `action` describe it in records and output."""

    plan: Plan
    in_flight_limits: Mapping[int, InFlightLimit] = FrozenMap({})  # worker -> its limit
    first_step: int  # first step trained under the plan
    policy: str
    action: str
    transition: PlannedTransition | None = None  # change of placement; None if the placement stays
    lost_layers: tuple[int, ...] = ()  # layers that no live worker held after the loss
    rest: RestOfStep | None = None  # of step `first_step`, if it was interrupted and is completed
    migration: Transfer | None = None  # layers that move while the plan trains; their receivers are in its placement
    hold_s: float = 0.0  # with `migration`: seconds that a vote may wait for the layers and the switch that follows
    migration_s: float = 0.0  # with `migration`: predicted seconds until all layers have arrived
    predicted_step_s: float | None = None  # seconds of a step; None if the decision is recorded by itself
    predicted_stall_s: float | None = None  # seconds without progress before the first step; likewise
    sharding: Sharding | None = None  # the owners of slices of the optimizer's state; None: each holder has all
    next_sharding: Sharding | None = None  # with `migration`: the owners once all has arrived, if they differ
    snapshots: SnapshotLayout | None = None  # where snapshots are kept; None: none are taken
    no_snapshots: str = ""  # why none are taken, if the run would take some by itself

    def __post_init__(self) -> None:
        object.__setattr__(self, "in_flight_limits", FrozenMap(self.in_flight_limits))

    def pack(self) -> str:
        """Write the plan as one line of JSON; `unpack` reads it back to an equal plan."""
        return to_json(self, fallback=dict, inf_nan_mode="constants").decode()

    @staticmethod
    def unpack(text: str) -> ActivePlan:
        """Read the output of `pack`. Raises ValidationError for any other text."""
        return TypeAdapter(ActivePlan).validate_json(text)

    @property
    def witnesses(self) -> Placement | None:
        """The placement, if holders update their layers independently; None if owners of slices send them updates."""
        return self.plan.placement if self.sharding is None else None

    @property
    def owners(self) -> int | None:
        """The owners of a slice of the optimizer's state, before any loss; None if every holder keeps all of it."""
        if self.sharding is None:
            return None
        return max(len(each.owners) for own in self.sharding.layers for each in own.slices)

    @property
    def migrating_slices(self) -> tuple[SliceMove, ...]:
        """The slices of the optimizer's state that move while the plan trains."""
        if self.sharding is None or self.next_sharding is None:
            return ()
        return self.next_sharding.moves_from(self.sharding)

    @property
    def participants(self) -> tuple[int, ...]:
        """Workers with orders, in ascending order: the workers of the plan, and any that only send layers."""
        return self.plan.workers if self.transition is None else self.transition.participants

    @property
    def transfer(self) -> Transfer | None:
        """The layers that move before the plan trains; None if there are none."""
        return None if self.transition is None else self.transition.transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class NextGeneration:
    """The generation that the run is to switch to, until it is in force or given up."""

    number: int
    plan: ActivePlan
    unprepared: frozenset[int]  # participants that have not answered yet
    deadline_s: float  # end of the wait for the answers, in monotonic seconds
    probe_at_s: float = 0.0  # when the participants are asked whether they reach each other
    prepared_at: float = 0.0  # when the last one did, in Unix seconds; 0 before
    is_switching: bool = False  # whether `Switch` was sent to the workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Migrated:
    """Layers that have moved during training on the way to a plan, in waves."""

    waves: int = 0
    seconds: float = 0.0
    num_bytes: int = 0

    def after(self, wave: Transfer | None, seconds: float) -> Self:
        """Return the sum with one more wave; None if no layer moved before this switch."""
        if wave is None:
            return self
        return replace(
            self,
            waves=self.waves + 1,
            seconds=self.seconds + seconds,
            num_bytes=self.num_bytes + wave.total_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """The plans that the run is to switch to while it trains.

    Attributes:
        next: the generation that is being prepared, if there is one.
        following: the plans to switch to, one after the other; the first is that of `next`.
        migrated: the layers that have moved on the way to the last of these plans.
        migrating_at: when layers began to move in the active generation, if they do, in Unix seconds.
    """

    next: NextGeneration | None = None
    following: tuple[ActivePlan, ...] = ()
    migrated: Migrated = field(default_factory=Migrated)
    migrating_at: float = 0.0

    @property
    def underway(self) -> NextGeneration | None:
        """The next generation, if workers may have switched to it already."""
        return self.next if self.next is not None and self.next.is_switching else None

    def extended(self, seconds: float) -> Self:
        """Extend the wait for those that prepare by a time in which the coordinator did not run."""
        if self.next is None:
            return self
        return replace(self, next=replace(self.next, deadline_s=self.next.deadline_s + seconds))

    def stopped(self) -> Self:
        """Note that all workers stop: only a switch that is underway may still have happened."""
        return replace(self, next=self.underway, following=(), migrated=Migrated())
