"""How decisions come about: from what was prepared or by a search, and with what they take themselves.

Here is what the state of a run does without: what was measured of its operations, and decisions that are prepared.
A coordinator that starts anew has lost nothing but some accuracy and some milliseconds.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

from chameleon_ft import recovery
from chameleon_ft.control.decisions.decision_cache import DecisionCache, decide_and_check
from chameleon_ft.control.decisions.planner import Planner
from chameleon_ft.control.decisions.recovery_plan import ClusterState, RecoveryPlan
from chameleon_ft.control.decisions.request import DecisionRequest, LossRequest
from chameleon_ft.control.state.scale_up import LayerBytes
from chameleon_ft.estimate import state_bytes
from chameleon_ft.recovery import STAY, FailureModel, rescore

__all__ = ["DecisionTiming", "Decisions", "ScaleUpDecision"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleUpDecision:
    """A decision on newcomers that was made while training went on.

    Attributes:
        context: what it was made from, and
        rate: likewise.
        decision: its program has been checked.
        search_s: seconds that it took.
    """

    context: recovery.DecisionContext
    rate: FailureModel
    decision: recovery.Decision
    search_s: float

    def is_for(self, context: recovery.DecisionContext) -> bool:
        """Whether the same plan runs, and the same workers are there."""
        return (self.context.plan, self.context.live) == (context.plan, context.live)

    @property
    def is_change(self) -> bool:
        """Whether it is better to stop for it than to continue as before."""
        return self.decision.chosen is not None and self.decision.chosen.policy != STAY

    @property
    def incoming(self) -> dict[int, LayerBytes]:
        """Worker -> the layers that it receives, in the order in which it does."""
        course = self.decision.course
        if course is None or course.transfer is None:
            return {}
        costs = self.context.costs.workload.layers
        incoming: dict[int, LayerBytes] = {}
        for message in course.transfer.messages:
            layers = tuple((layer, state_bytes(costs[layer])) for layer in message.layers)
            incoming[message.destination] = (*incoming.get(message.destination, ()), *layers)
        return incoming


@dataclass(slots=True)
class DecisionTiming:
    """When it was known what is chosen, in Unix seconds, and whether that had been prepared."""

    request: LossRequest
    weighed_at: float = 0.0
    looked_up: bool = False

    def decide_s(self, *, looked_up: bool) -> float:
        """Return the seconds of the whole decision, now that the choice is known."""
        self.weighed_at, self.looked_up = time.time(), looked_up
        hand_out_s = self.request.looked_up_hand_out_s if looked_up else self.request.hand_out_s
        return max(0.0, self.weighed_at - self.request.stopped_at) + hand_out_s


class Decisions:
    """Makes the decisions of a run.

    Args:
        cache: prepares decisions on losses; None: each is made when the loss is there.
        executor: where it is decided on newcomers; None: in a thread.
    """

    def __init__(self, *, planner: Planner, cache: DecisionCache | None, executor: Executor | None) -> None:
        self._planner = planner
        self._cache = cache
        self._executor = executor
        self._scale_ups: dict[int, ScaleUpDecision] = {}

    # --- beside training ---------------------------------------------------------------------------------------------

    def prepare(self, request: DecisionRequest) -> None:
        """Have decisions prepared for the next loss."""
        if self._cache is not None:
            self._cache.expect(lambda: (self._context(request), request.rate))

    def forget(self) -> None:
        """Discard the prepared decisions."""
        if self._cache is not None:
            self._cache.drop()

    async def consider(self, question: int, request: DecisionRequest) -> ScaleUpDecision:
        """Decide what to do with newcomers, at the end of a step."""
        context = self._context(request)
        start, loop = time.perf_counter(), asyncio.get_running_loop()
        decision = await loop.run_in_executor(
            self._executor, decide_and_check, context, self._planner.policy, request.rate
        )
        search_s = time.perf_counter() - start
        found = ScaleUpDecision(context=context, rate=request.rate, decision=decision, search_s=search_s)
        self._scale_ups = {question: found}  # the one before is settled
        return found

    def describe_scale_up(self, question: int, *, step: int) -> dict[str, Any]:
        """Return the fields of the event `decision` for newcomers that change nothing."""
        found = self._scale_ups[question]
        known = self._planner.known(step, found.context, found.rate)
        return {"search_s": found.search_s, "prepared": True, **known, **found.decision.to_json()}

    # --- when all have quiesced --------------------------------------------------------------------------------------

    def decide(self, cluster: ClusterState, request: LossRequest) -> tuple[RecoveryPlan, DecisionTiming]:
        """Decide how to continue; see `recovery_plan.decide`, also for what it raises.

        What of deciding is over when the stall is predicted is known, a search above all, and predicted as it was.
        """
        timing = DecisionTiming(request)
        context = self._context(request, cluster)
        now = replace(context, phases=replace(request.phases, decide_s=timing.decide_s(looked_up=True)))
        found = self._look_up(now, request)
        plan = self._planner.go_on(
            cluster,
            context if found is None else now,
            request.rate,
            prepared=found,
            decide_s=lambda: timing.decide_s(looked_up=False),
        )
        return plan, timing

    def _look_up(self, context: recovery.DecisionContext, request: LossRequest) -> recovery.Decision | None:
        """Return what was decided on just this while training went on, with the figures of now."""
        found = None if request.scale_up is None else self._scale_ups.get(request.scale_up)
        if found is not None and found.is_for(context):
            # All workers have stopped for it: even if another one is a little better by now, it is carried out.
            newest = rescore(found.decision, before=found.context, now=context, failures=request.rate)
            return newest or found.decision
        return None if self._cache is None else self._cache.look_up(context, request.rate)

    def _context(self, request: DecisionRequest, cluster: ClusterState | None = None) -> recovery.DecisionContext:
        return self._planner.context(
            request.in_force,
            request.live,
            request.hosts,
            phases=request.phases,
            repeat_s=request.repeat_s,
            unsaved=0 if cluster is None else cluster.committed - max(cluster.checkpoints, default=0),
            held=None if cluster is None else cluster.held,
        )
