"""Decisions prepared during training, so that a loss only needs a look-up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

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
