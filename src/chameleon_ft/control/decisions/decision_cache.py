"""Decisions prepared beside training, before anything is lost, so that a loss only needs one to be looked up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeVar

from chameleon_ft.recovery import (
    Decision,
    DecisionContext,
    FailureModel,
    decide,
    decide_on_class,
    remap_decision,
    rescore,
)
from chameleon_ft.recovery.symmetry import HostLossClass, LossClass, classes_to_prepare
from chameleon_ft.schedule import CostModel, check_program

__all__ = ["DecisionCache", "decide_and_check"]

_Answer = TypeVar("_Answer")

# Between two looks at whether what is prepared still holds, and while one decision after the other is turned into
# those for the other workers of its class: the event loop has more urgent things to do.
_LOOK_EVERY_S: Final = 1.0
_PAUSE_S: Final = 0.005
# Prepared anew when what a step computes, or how long it goes well, has become another by so much...
_RENEWED: Final = 1.1
# ...and not used any more, if it has not been prepared anew by then, when by so much.
_USED: Final = 1.5


@dataclass(frozen=True, slots=True)
class _Question:
    """The context of prepared decisions: no worker is lost yet, and one failure is to come."""

    situation: DecisionContext
    rate: FailureModel

    def is_like(self, other: _Question, *, tolerance: float) -> bool:
        """Whether the same workers run the same plan, and what it costs and is worth differs by less."""
        return (
            self.situation.plan == other.situation.plan
            and self.situation.in_flight_limits == other.situation.in_flight_limits
            and self.situation.live == other.situation.live
            and all(map(partial(_near, tolerance=tolerance), self.speeds, other.speeds))
            and _near(self.work_s, other.work_s, tolerance)
            and _near(self.horizon_s, other.horizon_s, tolerance)
        )

    def after(self, lost: Collection[int]) -> _Question:
        """Return the question once these workers are lost, which is one failure."""
        costs = self.situation.costs
        left = CostModel(costs.workload, costs.cluster.without(lost))
        return _Question(replace(self.situation, costs=left), self.rate.observed(failures=1))

    @property
    def work_s(self) -> float:
        return sum(layer.forward_s + layer.backward_s for layer in self.situation.costs.workload.layers)

    @property
    def speeds(self) -> tuple[float, ...]:
        return tuple(worker.speed for worker in self.situation.costs.cluster.workers)

    @property
    def horizon_s(self) -> float:
        return self.rate.horizon_s(len(self.situation.live))


@dataclass(slots=True)
class DecisionCache:
    """Prepares decisions for the loss of each single worker, and of each host, and looks up the one that is needed.

    All methods are called from the thread of the event loop, which is kept busy for some milliseconds at a time only.

    Attributes:
        policy: name of the policy that decides.
        executor: where decisions are made; a process of its own, for they take seconds of a processor's time.
        prepared: told (single losses that have a decision, seconds that it took, error) when all are there, or, with
            what the error was, that there will be none any more. Those for hosts come after that.
    """

    policy: str
    executor: Executor
    prepared: Callable[[int, float, str | None], None]
    _asked: _Question | None = None
    # Lost workers -> the decision, and the question that it answers; an older one stays until it is made anew.
    _decisions: dict[frozenset[int], tuple[_Question, Decision]] = field(default_factory=dict)
    _work: asyncio.Task[None] | None = None
    _looked_at: float = float("-inf")
    _broken: bool = False

    def expect(self, ask: Callable[[], tuple[DecisionContext, FailureModel]]) -> None:
        """See to it that decisions are there for what `ask` tells: the situation with everyone there, and the rate.

        To be called often; it asks at most once a second, and does something where what was asked last is not near it.
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
                return  # what is on its way will do, and only comes if it is let alone
            self._work.cancel()
        self._asked = question
        self._work = asyncio.create_task(self._prepare(question))

    def look_up(self, situation: DecisionContext, rate: FailureModel) -> Decision | None:
        """What was decided for just this loss, with the figures of now; None if nothing was, or for something else.

        Args:
            situation: now, the loss included.
            rate: likewise.
        """
        if self._asked is None:
            return None
        lost = frozenset(self._asked.situation.live).difference(situation.live)
        if lost not in self._decisions:
            return None
        asked, decision = self._decisions[lost]
        now = _Question(situation, rate)
        if not now.is_like(asked.after(lost), tolerance=_USED):
            return None
        return rescore(decision, before=asked.situation, now=situation, failures=rate)

    def drop(self) -> None:
        """What is prepared, or being prepared, is of no use any more: something has changed."""
        if self._work is not None:
            self._work.cancel()
        self._work = self._asked = None
        self._decisions = {}
        self._looked_at = float("-inf")

    async def _prepare(self, question: _Question) -> None:
        began = time.monotonic()
        try:
            of_workers, of_hosts = await self._run(classes_to_prepare, question.situation)
            for losses in of_workers:
                await self._prepare_class(losses, question)
            single = sum(len(lost) == 1 for lost in self._decisions)
            self.prepared(single, time.monotonic() - began, None)
            for host_losses in of_hosts:
                await self._prepare_class(host_losses, question)
        except Exception as error:  # noqa: BLE001
            # It is a help and no more: decisions are made when they are needed, then.
            self._broken = True
            self._decisions = {}
            self.prepared(0, time.monotonic() - began, f"{type(error).__name__}: {error}")

    async def _prepare_class(self, losses: LossClass | HostLossClass, question: _Question) -> None:
        decision = await self._run(_decide, losses, question.situation, self.policy, question.rate)
        if decision is not None:
            for lost, symmetry in losses.symmetries.items():
                key = frozenset([lost]) if isinstance(lost, int) else lost
                self._decisions[key] = question, remap_decision(decision, symmetry)
                await asyncio.sleep(_PAUSE_S)

    async def _run(self, function: Callable[..., _Answer], /, *arguments: object) -> _Answer:
        return await asyncio.get_running_loop().run_in_executor(self.executor, function, *arguments)


def decide_and_check(situation: DecisionContext, policy: str, rate: FailureModel) -> Decision:
    """Decide, and check the program, so that it can be handed out as it is; see `recovery.decide`."""
    return _checked(decide(situation, policy, rate))


def _decide(
    losses: LossClass | HostLossClass, situation: DecisionContext, policy: str, rate: FailureModel
) -> Decision | None:
    decision = decide_on_class(losses, situation, policy, rate)
    return None if decision is None else _checked(decision)


def _checked(decision: Decision) -> Decision:
    if decision.course is not None:
        check_program(decision.course.program, decision.course.plan)
    return decision


def _near(a: float, b: float, tolerance: float) -> bool:
    return max(a, b) <= tolerance * min(a, b)
