"""The facts that the next generation depends on.

`ClusterState` has those of the time at which all survivors have reported. A `SpeculativeDecision` is made before, and
used if the reports fit. `workers_to_give_up` is for links on which nothing passes, though the coordinator reaches all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final, Literal, Self

from chameleon_ft.coordinator.state.checkpoints import Disagreement, Snapshot
from chameleon_ft.coordinator.state.state import State
from chameleon_ft.plan import Plan
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.plan.rest import RestOfStep, StepProgress
from chameleon_ft.plan.shards import Sharding
from chameleon_ft.plan.vote import Vote
from chameleon_ft.protocol.messages import Quiesced
from chameleon_ft.recovery import Decision, DecisionContext, FailureModel, decide, rescore
from chameleon_ft.recovery.generation import GenerationSpec
from chameleon_ft.schedule import InFlightLimit, check_program


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """The part of a run's state that determines the recovery plan, once all survivors have quiesced."""

    plan: Plan  # the plan whose placement is in force
    in_flight_limits: Mapping[int, InFlightLimit] = FrozenMap({})  # of its workers
    live: Collection[int]  # available workers, spares included
    quiesced: Mapping[int, Quiesced]  # the report of each live worker
    committed: int  # steps that some worker, live or lost, has applied
    last_vote: Vote | None  # the vote of step ``committed - 1``, if a worker has reported it
    checkpoints: Sequence[int] = ()  # steps at which complete checkpoints resume, ascending
    snapshot: Snapshot | None = None  # the newest complete one, if it can be restored
    is_fresh: bool = False  # whether fresh weights serve as a snapshot until there is one
    newcomers: Collection[int] = ()  # live workers that have joined since the last decision
    shadows: Collection[int] = ()  # workers outside the plan to which layers moved in the interrupted generation
    rest: RestOfStep | None = None  # if the interrupted step was being completed after an earlier loss
    is_unloaded: bool = False  # whether workers wait for a checkpoint: one could not be read, or their state is wrong
    disagreement: Disagreement | None = None  # why their state is wrong
    sharding: Sharding | None = None  # the owners of slices under `plan`
    hosts: Mapping[int, str] = FrozenMap({})  # worker -> host, of all that have ever joined
    host_memory: Mapping[str, int] = FrozenMap({})  # host -> bytes available for its workers, as far as known

    @classmethod
    def of(cls, state: State, checkpoints: Sequence[int]) -> Self:
        """Extract it from a run's state; `checkpoints` are the complete ones on disk."""
        assert state.in_force is not None
        rest = state.in_force.rest
        return cls(
            plan=state.in_force.plan,
            in_flight_limits=state.in_force.in_flight_limits,
            live=state.members.live(),
            quiesced=state.quiesced,
            committed=state.committed,
            last_vote=state.last_vote,
            checkpoints=checkpoints,
            snapshot=state.snapshots.restorable,
            is_fresh=state.settings.snapshots.every != 0 and state.snapshots.is_fresh,
            newcomers=state.scale_up.newcomers,
            shadows=() if state.active is None or state.active.migration is None else state.active.plan.workers,
            rest=None if rest is None or state.committed != state.in_force.first_step else rest.remaining,
            is_unloaded=state.checkpoints.is_reread,
            disagreement=state.health.disagreement,
            sharding=state.in_force.sharding,
            hosts=state.members.hosts(),
            host_memory=state.members.host_memory(),
        )

    @property
    def source(self) -> Literal["initial", "snapshot"] | int | None:
        """The newest state before the present one, as `GenerationSpec.load`; None if there is none.

        A snapshot comes before a checkpoint of the same step, because no disk has to be read.
        """
        step = self.checkpoints[-1] if self.checkpoints else None
        if self.snapshot is not None and (step is None or self.snapshot.step >= step):
            return "snapshot"
        return "initial" if step is None and self.is_fresh else step

    @property
    def source_step(self) -> int:
        """The step of that state; 0 if there is none."""
        match self.source:
            case "snapshot":
                assert self.snapshot is not None
                return self.snapshot.step
            case int(step):
                return step
        return 0

    @property
    def owners_left(self) -> Sharding | None:
        """The live owners of slices; None if each holder has all of the optimizer's state."""
        return None if self.sharding is None else self.sharding.left_to(self.held)

    @property
    def ownerless_layers(self) -> tuple[int, ...]:
        """The layers that have a slice without a live owner, even if their parameters are held."""
        left = self.owners_left
        return () if left is None else left.lost_layers

    @property
    def held(self) -> dict[int, tuple[int, ...]]:
        """Live worker -> layers it holds; none for a worker outside the plan, unless it holds some as a shadow holder.

        The state of any other may be outdated.
        """
        reached = max((self.quiesced[worker].committed for worker in self.survivors), default=0)

        def is_holder(worker: int, report: Quiesced) -> bool:
            is_current = report.committed == reached or (report.committed == reached - 1 and report.reduced)
            return worker in self.plan.placement.ranges or (worker in self.shadows and is_current)

        reports = ((worker, self.quiesced[worker]) for worker in sorted(self.live))
        return {worker: report.layers if is_holder(worker, report) else () for worker, report in reports}

    @property
    def survivors(self) -> list[int]:
        """Workers of the plan that have reported, ascending."""
        return [worker for worker in self.plan.workers if worker in self.quiesced]

    @property
    def progress(self) -> dict[int, StepProgress] | None:
        """Survivor of the plan -> what it holds of the interrupted step; None if none has begun one.

        None too if some worker has applied it, since then all can.
        """
        states = {worker: self.quiesced[worker] for worker in self.survivors}
        if {state.committed for state in states.values()} != {self.committed}:
            return None
        if all(state.progress is None for state in states.values()):
            return None
        return {
            worker: StepProgress() if state.progress is None else state.progress for worker, state in states.items()
        }


IN_PLACE: Final = "reroute"
"""Name of the policy that chooses a plan under which no layer moves."""


@dataclass(frozen=True, slots=True)
class SpeculativeDecision:
    """The plan of the steps after a loss, chosen while the survivors stop, with a program that is checked.

    The survivors need some tens of milliseconds for their reports, which contain what remains of the interrupted step
    and what each of them holds. That rarely differs from its part of the plan.

    Attributes:
        context: what was known; the layers that survivors hold were taken for those of the plan.
        decision: by the policy `IN_PLACE`.
    """

    context: DecisionContext
    decision: Decision

    @classmethod
    def of(cls, context: DecisionContext, rate: FailureModel, *, is_reviewed: bool) -> Self | None:
        """Choose a plan; None if no worker of the present one is lost. `is_reviewed` as in `decide_in_place`."""
        if not context.lost or not context.live or context.held.unheld_layers:
            return None
        context = without_search(context) if is_reviewed else context
        decision = decide(context, IN_PLACE, rate)
        if decision.course is not None:
            check_program(decision.course.program, decision.course.plan)
        return cls(context, decision)

    def rescored(
        self,
        now: DecisionContext,
        rate: FailureModel,
        *,
        is_reviewed: bool,
        decide_s: Callable[[], float] | None,
    ) -> Decision | None:
        """Return the decision with what is known once the survivors have reported; None if it does not fit."""
        now = without_search(now) if is_reviewed else now
        if self._asked != _asked(now) or now.held != now.placement:
            return None
        if decide_s is not None:
            now = replace(now, phases=replace(now.phases, decide_s=decide_s()))
        return rescore(self.decision, before=self.context, now=now, failures=rate)

    @property
    def _asked(self) -> object:
        return _asked(self.context)


def _asked(context: DecisionContext) -> object:
    """Return all that the plans of a policy depend on."""
    return context.plan, context.in_flight_limits, context.costs, context.effort, context.leaving


def without_search(context: DecisionContext) -> DecisionContext:
    """Return the context of a decision that a search for a better plan follows, so that it does not search itself."""
    return replace(context, effort=0)


_MAX_SETS: Final = 1000  # that are compared; a cut between two hosts has as many as a host has workers, and one more


def workers_to_give_up(
    pairs: Sequence[tuple[int, int]], active: GenerationSpec, speeds: Mapping[int, float]
) -> frozenset[int]:
    """Return the set of workers with one of each pair whose loss costs least.

    First counts how many layers, or slices of their optimizer's state, no other worker holds; then how many workers
    become the only holders of a layer; then what the others lack in speed. `speeds` are those of slow workers.
    """
    placement, sharding = active.plan.placement, active.sharding

    def cost(leaving: frozenset[int]) -> tuple[int, int, float, int, list[int]]:
        left = placement.without(leaving)
        lost = set(left.unheld_layers)
        if sharding is not None:
            lost.update(sharding.left_to({worker: left.layers_of(worker) for worker in left.workers}).lost_layers)
        sole_holders = left.single_points_of_failure({worker: worker for worker in left.workers})
        share = sum(speeds.get(worker, 1.0) for worker in leaving.intersection(placement.workers))
        return len(lost), len(sole_holders), share, len(leaving), [-worker for worker in sorted(leaving)]

    return min(islice(_covers(pairs), _MAX_SETS), key=cost)


def _covers(pairs: Collection[tuple[int, int]]) -> Iterator[frozenset[int]]:
    """Yield sets with a worker of each pair; among them are all from which no worker can be left out."""
    if not pairs:
        yield frozenset()
        return
    peers: dict[int, set[int]] = {}
    for one, other in pairs:
        peers.setdefault(one, set()).add(other)
        peers.setdefault(other, set()).add(one)
    worst = max(peers, key=lambda worker: len(peers[worker]))
    for side in (frozenset({worst}), frozenset(peers[worst])):
        for others in _covers([pair for pair in pairs if side.isdisjoint(pair)]):
            yield side | others
