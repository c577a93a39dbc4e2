"""The decisions of a run: prepared during training, looked up, or searched for while all workers wait.

Observed times and prepared decisions are kept here and not in the state of the run. A coordinator that restarts without
them loses only some accuracy and a few milliseconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from chameleon_ft import recovery
from chameleon_ft.control.decisions.decision_cache import DecisionCache, decide_and_check
from chameleon_ft.control.decisions.planner import Planner
from chameleon_ft.control.decisions.recovery_plan import ClusterState, RecoveryPlan
from chameleon_ft.control.state.scale_up import LayerBytes
from chameleon_ft.control.state.state import State
from chameleon_ft.estimate import StallModel, state_bytes
from chameleon_ft.recovery import STAY, FailureModel, rescore

__all__ = ["Decisions", "ScaleUpDecision"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleUpDecision:
    """A decision on newcomers, or on a plan that was chosen in haste, made while training continued."""

    context: recovery.DecisionContext
    rate: FailureModel
    decision: recovery.Decision  # with a program that has been checked
    search_s: float  # seconds that the decision took
    trigger: Literal["join", "review"]

    def is_for(self, context: recovery.DecisionContext) -> bool:
        """Return whether `context` has the plan and the live workers that the decision was made for."""
        return (self.context.plan, self.context.live) == (context.plan, context.live)

    @property
    def is_change(self) -> bool:
        """Whether the decision is worth a stop, instead of continuing unchanged."""
        return self.decision.chosen is not None and self.decision.chosen.policy != STAY

    @property
    def incoming(self) -> dict[int, LayerBytes]:
        """Worker -> the layers that it receives, in order of arrival."""
        course = self.decision.course
        costs = self.context.costs.workload.layers
        incoming: dict[int, LayerBytes] = {}
        for message in () if course is None or course.transfer is None else course.transfer.messages:
            layers = tuple((layer, state_bytes(costs[layer])) for layer in message.layers)
            incoming[message.destination] = (*incoming.get(message.destination, ()), *layers)
        return incoming


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
        self._scale_ups: dict[int, ScaleUpDecision] = {}

    def prepare(self, state: State) -> None:
        """Have decisions prepared for the next loss, assuming that it wastes half a step, the average.

        Without salvage only: with it, no search delays the workers.
        """
        if self._cache is not None and not self._planner.salvages:
            self._cache.expect(partial(self._next_loss, state))

    def _next_loss(self, state: State) -> tuple[recovery.DecisionContext, FailureModel]:
        phases, repeat_s = state.history.phases(looked_up=True), state.detectors.watchdog.step_s / 2
        return self._context(state, phases=phases, repeat_s=repeat_s), state.history.rate

    def forget(self) -> None:
        """Discard the prepared decisions."""
        if self._cache is not None:
            self._cache.drop()

    async def consider(self, state: State) -> ScaleUpDecision:
        """Decide on all live workers. The stop is at the end of a step: nothing to detect, nothing to repeat."""
        phases = replace(state.history.phases(looked_up=True), detect_s=0.0)
        context, rate = self._context(state, phases=phases, repeat_s=0.0), state.history.rate
        start, loop = time.perf_counter(), asyncio.get_running_loop()
        decision = await loop.run_in_executor(self._executor, decide_and_check, context, self._planner.policy, rate)
        search_s = time.perf_counter() - start
        trigger: Literal["join", "review"] = "join" if state.scale_up.newcomers else "review"
        found = ScaleUpDecision(context=context, rate=rate, decision=decision, search_s=search_s, trigger=trigger)
        self._scale_ups = {state.scale_up.question: found}  # the previous one is settled
        return found

    def describe_scale_up(self, state: State) -> dict[str, Any]:
        """Return the fields of the event `decision` that changes nothing."""
        found = self._scale_ups[state.scale_up.question]
        inputs = self._planner.inputs(state.committed, found.context, found.rate)
        fields = {"trigger": found.trigger, "search_s": found.search_s, "prepared": True}
        return {**fields, **inputs, **found.decision.to_json()}

    def decide(self, state: State, checkpoints: Sequence[int]) -> tuple[RecoveryPlan, float]:
        """Return the next plan and the Unix time of the choice, 0 if there was none; see `recovery_plan.decide`.

        The predicted stall includes the actual search time, because the search is over by then.

        Args:
            checkpoints: steps at which complete checkpoints resume, in ascending order.
        """
        chosen_at, incident, history = 0.0, state.incident, state.history

        def decide_s(*, looked_up: bool = False) -> float:
            nonlocal chosen_at
            chosen_at = time.time()
            return max(0.0, chosen_at - incident.stopped_at) + history.hand_out_s(looked_up=looked_up)

        cluster = ClusterState.of(state, checkpoints)
        phases, repeat_s = incident.stall_so_far(state.outcomes.since, history.phases(looked_up=False))
        if self._planner.salvages and (incident.losses or not incident.paused):
            plan = self._decide_in_place(state, cluster, decide_s)
            if plan is not None:
                return plan, chosen_at
        context = self._context(state, phases=phases, repeat_s=repeat_s, cluster=cluster)
        now = replace(context, phases=replace(phases, decide_s=decide_s(looked_up=True)))
        found = self._look_up(now, state)
        plan = self._planner.recover(
            cluster, context if found is None else now, history.rate, prepared=found, decide_s=decide_s
        )
        return replace(plan, repeated_s=repeat_s), chosen_at

    def _decide_in_place(
        self, state: State, cluster: ClusterState, decide_s: Callable[[], float]
    ) -> RecoveryPlan | None:
        """Return a plan that completes the interrupted step and moves nothing; None if that is not possible.

        The step counts as repeated work by the time that it takes longer than usual.
        """
        salvaged = self._planner.salvage(cluster, state.members.hosts())
        history, outcomes, usual_s = state.history, state.outcomes, state.detectors.watchdog.step_s
        since = outcomes.since if salvaged is None else outcomes.committed_at
        phases, repeat_s = state.incident.stall_so_far(since, history.phases(looked_up=False))
        repeated_s = repeat_s
        if salvaged is not None:
            repeat_s = max(0.0, repeat_s + salvaged.rest_s - usual_s)
            repeated_s = salvaged.repeated_share * usual_s
        context = self._context(state, phases=phases, repeat_s=repeat_s, cluster=cluster)
        plan = self._planner.recover_in_place(cluster, context, history.rate, salvaged, decide_s=decide_s)
        return None if plan is None else replace(plan, repeated_s=repeated_s)

    def _look_up(self, context: recovery.DecisionContext, state: State) -> recovery.Decision | None:
        """Return the decision prepared for this loss or join, rescored with current figures; None if there is none."""
        rate, question = state.history.rate, state.scale_up.prepared
        found = None if question is None else self._scale_ups.get(question)
        if found is not None and found.is_for(context):
            # All workers have stopped for this decision, so keep it even if another is slightly better by now.
            return rescore(found.decision, before=found.context, now=context, failures=rate) or found.decision
        return None if self._cache is None else self._cache.look_up(context, rate)

    def _context(
        self, state: State, *, phases: StallModel, repeat_s: float, cluster: ClusterState | None = None
    ) -> recovery.DecisionContext:
        """Return the context of a decision; `cluster` is given only once all workers have quiesced."""
        in_force = state.active if cluster is None else state.in_force
        assert in_force is not None
        return self._planner.context(
            in_force,
            state.members.live(),
            state.members.hosts(),
            phases=phases,
            repeat_s=repeat_s,
            unsaved=0 if cluster is None else cluster.committed - max(cluster.checkpoints, default=0),
            held=None if cluster is None else cluster.held,
        )
