"""The decisions of a run: prepared during training, looked up, or searched for while all workers wait.

`DecisionCache` prepares them, so that a loss only needs a look-up. What it holds is no part of the state of the run: a
coordinator that restarts without prepared decisions loses only a few milliseconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeVar

from chameleon_ft import recovery
from chameleon_ft.clock import unix_s
from chameleon_ft.coordinator.decisions.cluster_state import ClusterState, SpeculativeDecision
from chameleon_ft.coordinator.decisions.planner import ChosenGeneration, Planner, decide_on_switch
from chameleon_ft.coordinator.decisions.redundancy import expected_snapshots
from chameleon_ft.coordinator.events import Considered, Moment
from chameleon_ft.coordinator.state.state import State
from chameleon_ft.cost.transition import StallModel
from chameleon_ft.errors import ChameleonError
from chameleon_ft.recovery import (
    Decision,
    DecisionContext,
    FailureModel,
    LossClass,
    classes_to_prepare,
    decide_for_class,
    remap_decision,
    rescore,
)
from chameleon_ft.schedule import CostModel, check_program

_Answer = TypeVar("_Answer")

_LOOK_EVERY_S: Final = 1.0  # between two checks of the prepared decisions
_PAUSE_S: Final = 0.005  # for the event loop, between the decisions of a class
# Factors by which the time of a step's work, or the time until the next failure, may change:
_RENEWED: Final = 1.1  # beyond this, decisions are prepared anew
_USED: Final = 1.5  # beyond this, they are no longer used


@dataclass(frozen=True, slots=True)
class _Question:
    """The context of prepared decisions: no worker is lost yet, and one failure is to come."""

    context: DecisionContext
    rate: FailureModel

    def is_like(self, other: _Question, *, tolerance: float) -> bool:
        """Return whether the same workers run the same plan, with all times equal up to this factor."""
        own, others = self.context, other.context
        return (own.plan, own.in_flight_limits, own.live) == (
            others.plan,
            others.in_flight_limits,
            others.live,
        ) and all(max(a, b) <= tolerance * min(a, b) for a, b in zip(self._times, other._times, strict=True))

    def after(self, lost: Collection[int]) -> _Question:
        """Return the question after the loss of these workers, counted as one failure."""
        costs = self.context.costs
        left = CostModel(costs.workload, costs.cluster.without(lost))
        return _Question(replace(self.context, costs=left), self.rate.observed(failures=1))

    @property
    def _times(self) -> tuple[float, ...]:
        """Speeds of the workers, seconds of a step's work, and seconds until the next failure."""
        costs = self.context.costs
        work_s = sum(costs.workload.layer_times_s)
        speeds = (worker.speed for worker in costs.cluster.workers)
        return (*speeds, work_s, self.rate.horizon_s(len(self.context.live)))


@dataclass(slots=True)
class DecisionCache:
    """Decisions for the loss of each single worker and of each host, prepared before they are needed.

    Call all methods from the thread of the event loop; each keeps it busy for a few milliseconds only.

    Attributes:
        prepared: called with (number of single losses that have a decision, seconds taken, error) when all are ready,
            or when an error ends the preparation for good. Decisions for hosts follow.
    """

    policy: str  # name of the policy that decides
    executor: Executor  # runs the searches in a process of its own, because they take seconds of processor time
    prepared: Callable[[int, float, str | None], None]
    _asked: _Question | None = None
    # Lost workers -> the question and its decision; an old entry stays until it is replaced.
    _decisions: dict[frozenset[int], tuple[_Question, Decision]] = field(default_factory=dict)
    _work: asyncio.Task[None] | None = None
    _looked_at: float = float("-inf")
    _broken: bool = False

    def expect(self, ask: Callable[[], tuple[DecisionContext, FailureModel]]) -> None:
        """Prepare decisions for the context and rate that `ask` returns while no worker is lost.

        Call this often: it calls `ask` at most once a second, and work begins only if the answer has changed.
        """
        now = asyncio.get_running_loop().time()
        if self._broken or now < self._looked_at + _LOOK_EVERY_S:
            return
        self._looked_at = now
        question = _Question(*ask())
        if self._asked is not None and question.is_like(self._asked, tolerance=_RENEWED):
            return
        if self._work is not None and not self._work.done():
            if self._asked is not None and question.is_like(self._asked, tolerance=_USED):
                return  # the decisions in progress will do; cancelling them would only delay them
            self._work.cancel()
        self._asked = question
        self._work = asyncio.create_task(self._prepare(question))

    def look_up(self, context: DecisionContext, rate: FailureModel) -> Decision | None:
        """Return the decision prepared for exactly this loss, rescored with current figures; None if there is none.

        Args:
            context: the context after the loss.
            rate: the failure model after the loss.
        """
        if self._asked is None:
            return None
        lost = frozenset(self._asked.context.live).difference(context.live)
        if lost not in self._decisions:
            return None
        asked, decision = self._decisions[lost]
        if not _Question(context, rate).is_like(asked.after(lost), tolerance=_USED):
            return None
        return rescore(decision, before=asked.context, now=context, failures=rate)

    def drop(self) -> None:
        """Discard all decisions, prepared or in progress."""
        if self._work is not None:
            self._work.cancel()
        self._work = self._asked = None
        self._decisions = {}
        self._looked_at = float("-inf")

    async def _prepare(self, question: _Question) -> None:
        began = time.monotonic()
        try:
            of_workers, of_hosts = await self._run(classes_to_prepare, question.context)
            for losses in of_workers:
                await self._prepare_class(losses, question)
            single = sum(len(lost) == 1 for lost in self._decisions)
            self.prepared(single, time.monotonic() - began, None)
            for host_losses in of_hosts:
                await self._prepare_class(host_losses, question)
        except Exception as error:  # noqa: BLE001 - from now on, decisions are made on demand
            self._broken = True
            self._decisions = {}
            self.prepared(0, time.monotonic() - began, f"{type(error).__name__}: {error}")

    async def _prepare_class(self, losses: LossClass, question: _Question) -> None:
        decision = await self._run(_decide, losses, question.context, self.policy, question.rate)
        if decision is not None:
            for lost, symmetry in losses.symmetries.items():
                self._decisions[lost] = question, remap_decision(decision, symmetry)
                await asyncio.sleep(_PAUSE_S)

    async def _run(self, function: Callable[..., _Answer], /, *arguments: object) -> _Answer:
        return await asyncio.get_running_loop().run_in_executor(self.executor, function, *arguments)


def _decide(losses: LossClass, context: DecisionContext, policy: str, rate: FailureModel) -> Decision | None:
    decision = decide_for_class(losses, context, policy, rate)
    if decision is not None and decision.course is not None:
        check_program(decision.course.program, decision.course.plan)
    return decision


class Decisions:
    """Makes the decisions of a run.

    Args:
        cache: prepares decisions on losses; None: each decision is made after its loss.
        executor: runs decisions on newcomers; None: a thread of the event loop's pool.
    """

    def __init__(self, *, planner: Planner, cache: DecisionCache | None, executor: Executor | None) -> None:
        self._planner = planner
        self._cache = cache
        self._executor = executor
        self._speculative: SpeculativeDecision | None = None

    def prepare(self, state: State) -> None:
        """Have decisions prepared for the next loss, assuming that it wastes half a step, the average.

        Without salvage only: with it, no search delays the workers.
        """
        if self._cache is not None and not self._planner.salvages:
            self._cache.expect(partial(self._next_loss, state))

    def _next_loss(self, state: State) -> tuple[recovery.DecisionContext, FailureModel]:
        phases, repeat_s = state.history.phases(looked_up=True), state.usual_step_s / 2
        return self._context(state, phases=phases, repeat_s=repeat_s), state.history.rate

    def speculate(self, state: State) -> None:
        """Choose the plan of the steps after a loss before the survivors have reported, as `SpeculativeDecision`."""
        self._speculative = None
        if not self._planner.salvages or state.placed is None or state.checkpoints.is_reread:
            return
        with suppress(ChameleonError):  # the decision itself raises it again
            context = self._context(state, phases=state.history.phases(looked_up=False), repeat_s=0.0)
            is_reviewed = self._planner.is_reviewed(context, state.scale_up.newcomers)
            self._speculative = SpeculativeDecision.of(context, state.history.rate, is_reviewed=is_reviewed)

    def forget(self) -> None:
        """Discard the prepared decisions."""
        self._speculative = None
        if self._cache is not None:
            self._cache.drop()

    async def consider(self, state: State, now: Callable[[], Moment]) -> Considered:
        """Decide on the plan of all live workers that stay, while they train: no phase of a stall is expected."""
        phases = StallModel(detect_s=0.0, stop_s=0.0, decide_s=0.0, regroup_s=0.0)
        context = self._context(state, phases=phases, repeat_s=0.0, without=state.members.draining())
        rate, policy, members, scale_up = state.history.rate, self._planner.policy, state.members, state.scale_up
        live = [worker.id for worker in context.senders.workers]
        assert state.placed is not None
        complete = self._planner.completion(state.placed, members.hosts(), live, host_memory=members.host_memory())
        decide = partial(decide_on_switch, migrates=self._planner.migrates, complete=complete)
        start, loop = time.perf_counter(), asyncio.get_running_loop()
        decision, specs = await loop.run_in_executor(self._executor, decide, context, policy, rate)
        record = {"search_s": time.perf_counter() - start, "trigger": "join" if scale_up.newcomers else "review"}
        if context.leaving:
            record["trigger"] = "drain"
        elif scale_up.asked_speeds != scale_up.speeds:
            record["trigger"] = "slow"
        if decision.chosen is not None:
            reason = f"{decision.chosen.policy} needs more memory while layers move"
        else:
            reason = "; ".join(f"{each.policy}: {each.reason}" for each in decision.candidates if not each.feasible)
        inputs = self._planner.inputs(state.committed, context, rate)
        return Considered(
            at=now(),
            question=scale_up.question,
            staying=context.live,
            plans=specs,
            record={**record, "prepared": True, **inputs, **decision.to_json()},
            reason=reason,
        )

    def decide(self, state: State, checkpoints: Sequence[int]) -> tuple[ChosenGeneration, float]:
        """Return the next plan and the Unix time of the choice, 0 if there was none; see `recovery_plan.decide`.

        The predicted stall includes the actual search time, because the search is over by then.

        Args:
            checkpoints: steps at which complete checkpoints resume, in ascending order.
        """
        chosen_at, incident, history = 0.0, state.incident, state.history

        def decide_s(*, looked_up: bool = False) -> float:
            nonlocal chosen_at
            chosen_at = unix_s()
            return max(0.0, chosen_at - incident.stopped_at) + history.hand_out_s(looked_up=looked_up)

        cluster = ClusterState.of(state, checkpoints)
        phases, repeat_s = incident.stall_so_far(state.outcomes.since, history.phases(looked_up=False))
        if self._planner.salvages and not cluster.is_unloaded:
            plan = self._decide_in_place(state, cluster, decide_s)
            if plan is not None:
                return plan, chosen_at
        context = self._context(state, phases=phases, repeat_s=repeat_s, cluster=cluster)
        now = replace(context, phases=replace(phases, decide_s=decide_s(looked_up=True)))
        found = None if self._cache is None else self._cache.look_up(now, history.rate)
        plan = self._planner.recover(
            cluster, context if found is None else now, history.rate, prepared=found, decide_s=decide_s
        )
        return replace(plan, repeated_s=repeat_s), chosen_at

    def _decide_in_place(
        self, state: State, cluster: ClusterState, decide_s: Callable[[], float]
    ) -> ChosenGeneration | None:
        """Return a plan that completes the interrupted step and moves nothing; None if that is not possible.

        The seconds by which the step takes longer than usual count as repeated work. The parts of a step that no
        operation explains, such as its vote and its update, follow the rest of the step, too.
        """
        salvaged = self._planner.salvage(cluster)
        history, outcomes, usual_s = state.history, state.outcomes, state.usual_step_s
        since = outcomes.since if salvaged is None else outcomes.committed_at
        phases, repeat_s = state.incident.stall_so_far(since, history.phases(looked_up=False))
        repeated_s = repeat_s
        context = self._context(state, phases=phases, repeat_s=repeat_s, cluster=cluster)
        if salvaged is not None:
            explained_s = usual_s / context.step_factor
            context = replace(context, repeat_s=max(0.0, repeat_s + salvaged.rest_s - explained_s))
            repeated_s = salvaged.repeated_share * usual_s
        plan = self._planner.recover_in_place(
            cluster, context, history.rate, salvaged, speculative=self._speculative, decide_s=decide_s
        )
        return None if plan is None else replace(plan, repeated_s=repeated_s)

    def _context(
        self,
        state: State,
        *,
        phases: StallModel,
        repeat_s: float,
        cluster: ClusterState | None = None,
        without: Collection[int] = (),
    ) -> recovery.DecisionContext:
        """Return the context of a decision.

        Args:
            cluster: given only once all workers have quiesced.
            without: live workers that are to leave.
        """
        in_force = state.placed if cluster is None else state.in_force
        assert in_force is not None
        context = self._planner.context(
            in_force,
            [worker for worker in state.members.live() if worker not in without],
            state.members.hosts(),
            phases=phases,
            repeat_s=repeat_s,
            unsaved=0 if cluster is None else cluster.committed - cluster.source_step,
            checkpoint_interval_s=state.checkpoints.schedule.interval_s,
            leaving=without,
            held=None if cluster is None else cluster.held,
        )
        if cluster is not None and isinstance(cluster.source, int) and context.held.unheld_layers:
            return context  # the newest state is that of a checkpoint
        return replace(context, snapshots=expected_snapshots(state, context, has_reports=cluster is not None))
