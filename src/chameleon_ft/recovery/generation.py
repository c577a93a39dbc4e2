"""A generation as data: `GenerationSpec` is all of it, `WorkerOrders` the part of one worker.

A decision leads to a spec. The state of the run holds it, its journal and records keep it, and each worker is sent its
orders.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, TypeAlias

from chameleon_ft.plan import Placement, Plan
from chameleon_ft.plan.frames import Shared, plain
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.plan.layouts import with_micro_batches
from chameleon_ft.plan.rest import GradientKey, RestOfStep
from chameleon_ft.plan.shards import Sharding, SliceMove
from chameleon_ft.plan.snapshots import Rebuilding, Restoration, SnapshotLayout, SnapshotShare
from chameleon_ft.plan.vote import Vote
from chameleon_ft.recovery.context import CourseDraft
from chameleon_ft.recovery.migration import without_shadow_holders
from chameleon_ft.recovery.transition import LayerMove, PlannedTransition, TransitionOrders, moves_of
from chameleon_ft.schedule import (
    CostModel,
    InFlightLimit,
    Operation,
    Program,
    Resend,
    best_program,
    check_program,
    default_limits,
)
from chameleon_ft.schedule.channels import Channel, channels_of, channels_of_exchange
from chameleon_ft.sync import Segment, gradient_rounds, gradient_segments, tied_segments
from chameleon_ft.transfer import Transfer

CostsFrom: TypeAlias = Literal["profile", "corrected", "measured", "assumed"]
"""Source of the costs of a generation: the profile of the run, the profile corrected by measured operations of the run,
these operations alone, or neither."""

Load: TypeAlias = Literal["initial", "keep", "snapshot"] | int
"""The state that workers begin a generation with: fresh weights, the one that they hold, the snapshot of its first
step, or the checkpoint of this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestOrders:
    """A worker's part in the rest of an interrupted step; see `plan.rest`.

    Attributes:
        program: its operations for the rest.
        rest_s: predicted seconds of the rest.
        resends: what it sends again before its first operation, in this order. The receiver may be the worker itself.
        resent_gradients: (micro-batch, layer) of the gradients of inputs that this worker is sent again. Such a
            gradient may come before the output of the layer below, which this worker sends, has been used.
        counted: micro-batches whose loss some surviving worker has counted.
        sources: gradients whose sum is known, each with the worker that gives it to the others.
    """

    program: Program
    rest_s: float
    resends: tuple[Resend, ...]
    resent_gradients: tuple[tuple[int, int], ...] = ()
    counted: Shared[tuple[int, ...]]
    sources: Shared[tuple[tuple[GradientKey, int], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRest:
    """How the rest of an interrupted step is run.

    Attributes:
        remaining: what remains of the step.
        program: the operations of each worker, in their order.
        resends: worker -> what it sends again before its first operation.
        rest_s: predicted seconds until all gradients are reduced.
    """

    remaining: RestOfStep
    program: Program
    resends: Mapping[int, tuple[Resend, ...]]
    rest_s: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "resends", FrozenMap(self.resends))

    def orders(self, workers: Iterable[int]) -> dict[int, RestOrders]:
        """Return the parts of workers."""
        resent: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for each in chain.from_iterable(self.resends.values()):
            if not each.forward:
                resent[each.receiver].append((each.micro_batch, each.layer))
        counted = tuple(route.micro_batch for route in self.remaining.routes if route.is_counted)
        return {
            worker: RestOrders(
                program=self.program.only(worker),
                rest_s=self.rest_s,
                resends=self.resends.get(worker, ()),
                resent_gradients=tuple(resent[worker]),
                counted=counted,
                sources=self.remaining.sources,
            )
            for worker in workers
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterPlan:
    """The plan of a generation from a later step on, whose batch is larger: each worker holds what it held before.

    Attributes:
        first_step: the first step of this plan.
        plan: its placement is that of the generation, whatever has moved since.
        program: what each worker runs in a step.
        in_flight_limits: worker -> its limit.
    """

    first_step: int
    plan: Plan
    program: Program
    in_flight_limits: Mapping[int, InFlightLimit]

    def __post_init__(self) -> None:
        object.__setattr__(self, "in_flight_limits", FrozenMap(self.in_flight_limits))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOrders:
    """The part of one worker in a generation: what it runs, holds and moves.

    Attributes:
        generation: its number.
        worker: the worker that these orders are for.
        members: workers that train, ascending; any other only takes part in the transition.
        first_step: the first step of the generation. While it is being prepared, a lower bound.
        program: this worker's operations.
        later: (first step, this worker's operations from that step on), ascending, for batches that grow.
        segments: the gradient segments of the model, in the order in which all workers reduce them. Those with one
            holder, which need no message, come last.
        roll_forward: the vote of step ``first_step - 1``, for a rank that has to apply that step first.
        load: fresh weights, the state that it holds, the snapshot of step `first_step`, or this step's checkpoint.
        transition: its part in it, if the placement changes before the generation trains.
        finish: No step is trained, and the state is written as the last checkpoint.
        evaluate: The state that it begins with is evaluated before the first step.
        skipped: steps that are known to be bad: nothing is computed of them.
        left_out: (step, epoch, sample) of samples that some worker could not read: they do not count.
        rest: with "keep", if step `first_step` was interrupted, what remains of it.
        sharding: the owners of slices of the optimizer's state; None if each holder of a layer has all.
        gather: with "keep", owners first send the parameters that they have updated once more.
        snapshots: this worker's share in those of this generation; None if none are taken.
        snapshot: the step of the complete snapshot, beside which no other is to be kept.
        rebuilt: with "snapshot", the parts that are made first.
        spec: the whole generation, as the journal writes it, while the journal may lack it; see `Quiesced.spec`.
    """

    generation: int
    worker: int
    members: Shared[tuple[int, ...]]
    first_step: int
    program: Program
    segments: Shared[tuple[Segment, ...]]
    roll_forward: Vote | None = None
    load: Load = "keep"
    transition: TransitionOrders | None = None
    finish: bool = False
    evaluate: bool = False
    skipped: tuple[int, ...] = ()
    left_out: Shared[tuple[tuple[int, int, int], ...]] = ()
    rest: RestOrders | None = None
    sharding: Shared[Sharding | None] = None
    gather: bool = False
    snapshots: SnapshotShare | None = None
    snapshot: int | None = None
    rebuilt: Shared[tuple[Rebuilding, ...]] = ()
    spec: Shared[str] = ""
    later: tuple[tuple[int, Program], ...] = ()

    def at(self, step: int) -> WorkerOrders:
        """Return the orders as they are in a step: with the program for its micro-batches, and their first step."""
        if not (begun := [each for each in self.later if each[0] <= step]):
            return self
        first_step, program = begun[-1]
        return replace(self, first_step=first_step, program=program, rest=None, later=self.later[len(begun) :])

    @property
    def operations(self) -> tuple[Operation, ...]:
        """The operations of the program."""
        return self.program.of(self.worker)

    @property
    def continues_step(self) -> bool:
        """Whether the rest of the first step is computed, and not all of it.

        A lost worker may have left out a sample that another one has counted.
        """
        return self.rest is not None and not any(step == self.first_step for step, *_ in self.left_out)

    @property
    def participants(self) -> tuple[int, ...]:
        """Workers of the generation, ascending; a worker's rank in the world communicator is its index."""
        return self.members if self.transition is None else self.transition.participants

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups of workers that reduce together, each ascending, in one order on all workers."""
        return tuple(dict.fromkeys(each.holders for each in self.segments if len(each.holders) > 1))

    @property
    def channels(self) -> set[Channel]:
        """The channels on which this worker sends and receives from device to device."""
        programs = (self.program, *(program for _, program in self.later))
        own = set().union(*(channels_of(self.worker, program.of(self.worker)) for program in programs))
        return own if self.sharding is None else own | channels_of_exchange(self.worker, self.sharding.layers)

    @property
    def former_sharding(self) -> Sharding | None:
        """The owners of slices when the generation begins, if it does with the state of its workers."""
        return self.sharding if self.transition is None else self.transition.sharding

    @property
    def arriving(self) -> dict[int, int]:
        """The layers that move to this worker before the generation trains: layer -> bytes, by arrival."""
        moves = () if self.transition is None else self.transition.moves
        return {move.layer: move.num_bytes for move in moves if move.destination == self.worker}

    @property
    def layers(self) -> set[int]:
        """The layers of which this worker is a holder, those that are arriving included."""
        own = (segment for segment in self.segments if self.worker in segment.holders and not segment.tied)
        return {layer for segment in own for layer in segment.layers}

    @property
    def slice_moves(self) -> tuple[SliceMove, ...]:
        """The slices of optimizer state that move before the generation trains."""
        if self.sharding is None or self.former_sharding is None:
            return ()
        return self.sharding.moves_from(self.former_sharding)

    def written_slices(self) -> list[tuple[int, int, int]]:
        """Return (layer, first unit, unit after the last) of the slices that this worker writes into a checkpoint."""
        return [
            (layer, each.start, each.stop)
            for layer, own in enumerate(() if self.sharding is None else self.sharding.layers)
            for each, writer in zip(own.slices, own.writers(), strict=True)
            if writer == self.worker
        ]

    def written_layers(self) -> list[int]:
        """Return the layers that this worker writes into a checkpoint: each layer is written by one of its holders."""
        return [
            layer
            for segment in self.segments
            for layer in (() if segment.tied else segment.layers)
            if segment.holders[layer % len(segment.holders)] == self.worker
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """All that a generation is.

    Attributes:
        generation: its number; 0 until it has one.
        first_step: the first step of the generation. While it is being prepared, a lower bound.
        plan: layers that are still on their way to a worker are in its placement.
        program: what each worker runs in a step.
        costs: the costs that plan and program were computed with.
        costs_from: their source.
        in_flight_limits: worker -> its limit.
        policy: the policy that has proposed the plan, or why there is this generation.
        action: describes what is done, for records and output.
        load: the state that workers begin with.
        roll_forward: the vote with which workers that lag behind apply step ``first_step - 1``.
        gather: Owners of slices send updated parameters once more, because some have not arrived.
        evaluate: The state that it begins with is evaluated before the first step.
        transition: the change of placement before the generation trains; None if the placement stays.
        restoration: how workers come to hold the snapshot again, if they begin with one.
        lost_layers: layers that no live worker held after the loss.
        rest: what is left of step `first_step`, if it was interrupted and is completed.
        migration: layers that move while the generation trains.
        hold_s: with `migration`, seconds that a vote may wait for the layers and the switch that follows.
        migration_s: with `migration`, predicted seconds until all layers have arrived.
        predicted_step_s: seconds of a step; None if the decision is recorded by itself.
        predicted_stall_s: seconds without progress before the first step; likewise.
        sharding: the owners of slices of the optimizer's state; None if each holder has all.
        next_sharding: with `migration`, the owners once all has arrived, if they differ.
        snapshots: where snapshots are kept; None if none are taken.
        no_snapshots: why none are taken, if the run would take some by itself.
        later: the plans that follow as the batch grows, ascending.
    """

    generation: int = 0
    first_step: int
    plan: Plan
    program: Program
    costs: CostModel
    costs_from: CostsFrom = "assumed"
    in_flight_limits: Mapping[int, InFlightLimit] = FrozenMap({})
    policy: str
    action: str
    load: Load = "keep"
    roll_forward: Vote | None = None
    gather: bool = False
    evaluate: bool = False
    transition: PlannedTransition | None = None
    restoration: Restoration | None = None
    lost_layers: tuple[int, ...] = ()
    rest: PlannedRest | None = None
    migration: Transfer | None = None
    hold_s: float = 0.0
    migration_s: float = 0.0
    predicted_step_s: float | None = None
    predicted_stall_s: float | None = None
    sharding: Sharding | None = None
    next_sharding: Sharding | None = None
    snapshots: SnapshotLayout | None = None
    no_snapshots: str = ""
    later: tuple[LaterPlan, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "in_flight_limits", FrozenMap(self.in_flight_limits))

    def at(self, step: int) -> GenerationSpec:
        """Return the generation as it is in a step: with the plan for its micro-batches, and their first step."""
        if not (begun := [each for each in self.later if each.first_step <= step]):
            return self
        return replace(
            self._with(begun[-1]), first_step=begun[-1].first_step, rest=None, later=self.later[len(begun) :]
        )

    def along(self, stages: Sequence[tuple[int, int]]) -> GenerationSpec:
        """Return the generation with a plan for each stage of the batch, from that of its first step on.

        Micro-batches go the ways of this plan, in the same proportion.

        Args:
            stages: the first step of each stage and its micro-batches, ascending.

        Raises:
            ProgramError: a program breaks a rule.
        """
        (_, count), *later = stages
        first = self if count == self.plan.micro_batches else self._with(self._later_plan(self.first_step, count))
        return replace(first, later=tuple(self._later_plan(*stage) for stage in later))

    def _with(self, later: LaterPlan) -> GenerationSpec:
        return replace(
            self,
            plan=replace(later.plan, placement=self.plan.placement),
            program=later.program,
            costs=self.costs.with_micro_batches(later.plan.micro_batches),
            in_flight_limits=later.in_flight_limits,
        )

    def _later_plan(self, first_step: int, micro_batches: int) -> LaterPlan:
        plan, costs = with_micro_batches(self.plan, micro_batches), self.costs.with_micro_batches(micro_batches)
        limits = dict(self.in_flight_limits)
        # Limits that were found for few micro-batches may leave more of them waiting for each other.
        for worker, usual in default_limits(plan).items():
            own = limits.get(worker, usual)
            if own.in_flight < usual.in_flight or own.kept < usual.kept:
                limits[worker] = InFlightLimit(max(own.in_flight, usual.in_flight), max(own.kept, usual.kept))
        draft = CourseDraft.of(plan, limits, costs)
        if draft.estimate.over_capacity(costs):
            draft = CourseDraft.lean(plan, costs)
        course = draft.course()
        check_program(course.program, course.plan)
        return LaterPlan(
            first_step=first_step, plan=course.plan, program=course.program, in_flight_limits=course.in_flight_limits
        )

    def followed_by(self, **changes: Any) -> GenerationSpec:
        """Return a generation of the same plan that begins with the state of its workers, with these fields."""
        fields = ("plan", "program", "costs", "costs_from", "in_flight_limits", "first_step")
        kept = ("sharding", "snapshots", "no_snapshots", "policy", "action", "later")
        return GenerationSpec(**{**{name: getattr(self, name) for name in (*fields, *kept)}, **changes})

    def to_json(self) -> str:
        """Write the spec as one line of JSON; `from_json` reads it back to an equal one."""
        from pydantic_core import to_json

        return to_json(self, fallback=plain, inf_nan_mode="constants").decode()

    @staticmethod
    def from_json(text: str) -> GenerationSpec:
        """Read the output of `to_json`. Raises ValidationError for any other text."""
        from pydantic import TypeAdapter

        return TypeAdapter(GenerationSpec).validate_json(text)

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
    def participants(self) -> tuple[int, ...]:
        """Workers with orders, in ascending order: the workers of the plan, and any that only send layers."""
        return self.plan.workers if self.transition is None else self.transition.participants

    @property
    def transfer(self) -> Transfer | None:
        """The layers that move before the plan trains; None if there are none."""
        return None if self.transition is None else self.transition.transfer

    @property
    def trained_plan(self) -> Plan:
        """The plan without the layers that are still on their way to a worker."""
        if self.migration is None:
            return self.plan
        return replace(self.plan, placement=without_shadow_holders(self.plan.placement, self.migration))

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The gradient segments in the order of their reduction, followed by those with a single holder."""
        reduced, tied = self.trained_plan.placement, self.costs.workload.tied_layers
        every = (*gradient_segments(reduced), *tied_segments(reduced, tied))
        return (*gradient_rounds(reduced, tied).order, *(each for each in every if len(each.holders) == 1))

    @property
    def migrating_slices(self) -> tuple[SliceMove, ...]:
        """The slices of the optimizer's state that move while the plan trains."""
        if self.sharding is None or self.next_sharding is None:
            return ()
        return self.next_sharding.moves_from(self.sharding)

    @property
    def migrating_layers(self) -> tuple[LayerMove, ...]:
        """The layers that move while the plan trains."""
        return () if self.migration is None else moves_of(self.migration, self.costs.workload.moving_layers)

    def orders(
        self,
        *,
        finish: bool = False,
        skipped: tuple[int, ...] = (),
        left_out: tuple[tuple[int, int, int], ...] = (),
        snapshot: int | None = None,
        spec: str = "",
    ) -> dict[int, WorkerOrders]:
        """Return the orders of all participants; for the arguments see `WorkerOrders`."""
        # Values that grow with the number of workers are one object in all orders: they are encoded once.
        members, segments = self.plan.workers, self.segments
        rebuilt = () if self.restoration is None else self.restoration.rebuilt
        rests = {} if self.rest is None else self.rest.orders(self.participants)
        transitions = {} if self.transition is None else self.transition.orders(self.costs.workload.moving_layers)
        shares = None if self.snapshots is None else self.snapshots.shares()
        return {
            worker: WorkerOrders(
                generation=self.generation,
                worker=worker,
                members=members,
                first_step=self.first_step,
                program=self.program.only(worker),
                later=tuple((each.first_step, each.program.only(worker)) for each in self.later),
                segments=segments,
                roll_forward=self.roll_forward,
                load=self.load,
                transition=transitions.get(worker),
                finish=finish,
                evaluate=self.evaluate,
                skipped=skipped,
                left_out=left_out,
                rest=rests.get(worker),
                sharding=self.sharding,
                gather=self.gather,
                # A worker whose layers are still arriving has no share, but it votes for snapshots, too.
                snapshots=None if shares is None else shares.get(worker, SnapshotShare()),
                snapshot=snapshot,
                rebuilt=rebuilt,
                spec=spec,
            )
            for worker in self.participants
        }


def checked_program(plan: Plan, costs: CostModel, in_flight_limits: Mapping[int, InFlightLimit]) -> Program:
    """Return the best program that was found for a plan. Raises ProgramError if it breaks a rule."""
    program = best_program(plan, costs, in_flight_limits=in_flight_limits).program
    check_program(program, plan)
    return program
