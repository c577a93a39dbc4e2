"""The commit of a step: reduce the gradients, vote, apply the update.

Reductions start while the program still runs, and the commit waits for the rest. The vote is one all-reduce over all
workers of the generation. It completes on any worker only if every worker has contributed to it, and a worker
contributes only once it holds all its reduced gradients. So once any worker has applied a step, all others can.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final, Self

import torch

from chameleon_ft.control.wire.messages import Vote
from chameleon_ft.errors import ChameleonError
from chameleon_ft.runtime.activity import Activity
from chameleon_ft.runtime.communicators import CommunicationError, Communicators, InFlight
from chameleon_ft.runtime.execution.layers import GradientBuffers, HeldLayers
from chameleon_ft.runtime.execution.step_stats import StepStats, TimedReduction
from chameleon_ft.runtime.fault_injection import FaultInjector
from chameleon_ft.schedule import Operation
from chameleon_ft.sync import Segment, issue_points

__all__ = ["AppliedStep", "Committer", "NotFiniteError", "Reductions"]

_CLIP_EPSILON: Final = 1e-6  # as in torch.nn.utils.clip_grad_norm_
_POLL_S: Final = 0.01


class NotFiniteError(ChameleonError):
    """The loss or the gradient is not finite. It is so on every worker, so no worker can continue."""


class Reductions:
    """The gradient reductions of one worker, step after step, through a generation; use as a context manager.

    In each step call `after` before the first operation and after each, then `finish`. A separate thread waits for the
    reductions, so that the recorded end is the real one, and so that on emulated links the next reduction starts then.
    If a reduction is in flight when the context ends, the generation is over, and its communicators are interrupted.

    Args:
        buffers: the worker's gradients; all workers share the order of the segments.
        operations: the worker's program.
    """

    def __init__(self, buffers: GradientBuffers, operations: Sequence[Operation], communicators: Communicators) -> None:
        self._buffers = buffers
        self._communicators = communicators
        reduced = [s for s in buffers.segments if len(s.holders) > 1 and buffers.of(s)]
        self._due: dict[int, list[Segment]] = defaultdict(list)
        for segment, point in zip(reduced, issue_points(operations, reduced), strict=True):
            self._due[point].append(segment)
        self._issued: SimpleQueue[tuple[Segment, float, tuple[InFlight, ...]] | None] = SimpleQueue()
        self._ended: SimpleQueue[TimedReduction | BaseException] = SimpleQueue()
        self._in_flight = 0
        self._thread = threading.Thread(target=self._wait_for_all, name="reductions", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._issued.put(None)
        while self._in_flight and self._thread.is_alive():
            self._communicators.interrupt()
            self._thread.join(_POLL_S)
        self._thread.join()

    def after(self, count: int) -> None:
        """Issue the segments that are complete after `count` operations of the step. Raises CommunicationError.

        Before the first operation, those are the segments to which this worker adds nothing: its gradients are zero.
        """
        for segment in self._due.get(count, ()):
            start_s = time.perf_counter()
            parts = tuple(
                self._communicators.all_reduce(buffer, segment.holders) for buffer in self._buffers.of(segment)
            )
            self._in_flight += 1
            self._issued.put((segment, start_s, parts))

    def finish(self) -> tuple[TimedReduction, ...]:
        """Block until all segments are reduced. Raises CommunicationError."""
        found: list[TimedReduction] = []
        while self._in_flight:
            ended = self._ended.get()
            if isinstance(ended, BaseException):
                raise ended
            found.append(ended)
            self._in_flight -= 1
        return tuple(found)

    def _wait_for_all(self) -> None:
        while (issued := self._issued.get()) is not None:
            try:
                self._ended.put(_waited_for(*issued))
            except BaseException as error:  # noqa: BLE001 - the training thread raises it
                self._ended.put(error.with_traceback(None))  # a traceback would keep the operation alive
                return
            del issued


def _waited_for(segment: Segment, start_s: float, parts: Sequence[InFlight]) -> TimedReduction:
    for part in parts:
        part.wait()
    return TimedReduction(segment, start_s, time.perf_counter())


@dataclass(frozen=True, slots=True)
class AppliedStep:
    """An applied update. `grad_norm` is the global L2 norm of the mean gradient, before clipping."""

    vote: Vote
    grad_norm: float
    lr: float


@dataclass(slots=True, kw_only=True)
class Committer:
    """Counts the steps that this rank has applied, and applies the next.

    Attributes:
        committed: steps applied; the next one is step `committed`.
        reduced: whether the gradient buffers hold the fully reduced gradient of step `committed`.
        last_vote: the vote of step ``committed - 1``, if this process has applied it.
    """

    worker: int
    held: HeldLayers
    buffers: GradientBuffers
    clip_norm: float | None
    committed: int
    activity: Activity
    faults: FaultInjector
    reduced: bool = False
    last_vote: Vote | None = None

    def commit(
        self,
        stats: StepStats,
        reductions: Reductions,
        communicators: Communicators,
        members: tuple[int, ...],
        *,
        finish: bool,
        pause: bool = False,
    ) -> AppliedStep:
        """Reduce, vote and apply the step that was just executed, and complete its `stats`.

        Raises:
            CommunicationError: a reduction or the vote failed.
            NotFiniteError: as `apply` does.
        """
        self.activity.begin("sync")
        self.faults.at("sync", self.committed)
        with self.activity.waiting("sync"):
            stats.reductions = reductions.finish()
        self.reduced = True
        reduced_s = time.perf_counter()
        vote = self._vote(stats, communicators, members, finish=finish, pause=pause)
        stats.vote_s = (reduced_s, time.perf_counter())
        applied = self.apply(vote)
        stats.end_s = time.perf_counter()
        return applied

    def apply(self, vote: Vote) -> AppliedStep:
        """Apply step `committed` from the reduced gradients and its vote, without any message.

        Raises:
            NotFiniteError: the gradient's norm or the loss is not finite; nothing is changed.
        """
        assert self.reduced, "a step is applied only from a fully reduced gradient"
        if vote.terms < 1:
            raise NotFiniteError(
                f"step {self.committed}: the batch has {vote.terms} loss terms; see that `loss_terms` counts them"
            )
        grad_norm = math.sqrt(vote.grad_square_sum) / vote.terms
        if not (math.isfinite(grad_norm) and math.isfinite(vote.loss_sum)):
            raise NotFiniteError(
                f"step {self.committed}: the loss is {vote.loss_sum / vote.terms} and the gradient norm {grad_norm}; "
                "lower the learning rate, or clip the gradient"
            )
        self.activity.begin("optimizer")
        self.faults.at("optimizer", self.committed)
        clip = 1.0 if self.clip_norm is None else min(1.0, self.clip_norm / (grad_norm + _CLIP_EPSILON))
        self.buffers.scale(clip / vote.terms)
        lr = self.held.update(self.committed)
        self.committed += 1
        self.reduced = False
        self.last_vote = vote
        return AppliedStep(vote, grad_norm, lr)

    def _vote(
        self, stats: StepStats, communicators: Communicators, members: tuple[int, ...], *, finish: bool, pause: bool
    ) -> Vote:
        square_sum = self.buffers.square_sum(self.worker)
        ballot = torch.tensor(
            [square_sum, stats.loss, stats.terms, stats.samples, float(finish), float(pause), 1.0], dtype=torch.float64
        )
        if len(members) > 1:
            result = communicators.vote(ballot, members)
            self.faults.at("vote", self.committed)
            with self.activity.waiting("vote"):
                result.wait()
        grad_square_sum, loss_sum, terms, samples, finishing, pausing, voters = ballot.tolist()
        if round(voters) != len(members):
            raise CommunicationError(None, f"the vote counted {voters:g} of {len(members)} workers")
        return Vote(
            grad_square_sum=grad_square_sum,
            loss_sum=loss_sum,
            terms=round(terms),
            samples=round(samples),
            finish=finishing > 0,
            pause=pausing > 0,
        )
