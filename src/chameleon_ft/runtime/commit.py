"""The commit of a step: reduce the gradients, vote, apply.

Reductions begin while the program still runs (`chameleon_ft.runtime.reductions`); the commit waits for what is left.
The vote is one all-reduce over all workers of the generation. It completes anywhere only if every worker has put in its
share, and a worker does so only once it holds all its reduced gradients. So when any worker has applied a step, every
other one is able to.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from chameleon_ft.control.wire.messages import Vote
from chameleon_ft.errors import ChameleonError
from chameleon_ft.runtime.activity import Activity
from chameleon_ft.runtime.communicators import CommunicationError, Communicators
from chameleon_ft.runtime.executor import StepSums
from chameleon_ft.runtime.fault_injection import FaultInjector
from chameleon_ft.runtime.layers import GradientBuffers, HeldLayers
from chameleon_ft.runtime.reductions import Reductions, TimedReduction

__all__ = ["AppliedStep", "CommitTimes", "Committer", "NotFiniteError"]

_CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class NotFiniteError(ChameleonError):
    """The loss or the gradient is not a finite number: on every worker alike, so that no other worker can go on."""


@dataclass(frozen=True, slots=True)
class AppliedStep:
    """What one update came to."""

    vote: Vote
    grad_norm: float
    """Global L2 norm of the mean gradient, before clipping."""
    lr: float


@dataclass(frozen=True, slots=True)
class CommitTimes:
    """When the parts of a commit were, by `time.perf_counter`."""

    reductions: tuple[TimedReduction, ...]
    vote_s: tuple[float, float]
    """(start, end)"""
    end_s: float


class Committer:
    """Counts the steps this rank has applied, and takes it from one to the next.

    Attributes:
        committed: steps applied; the next one is step `committed`.
        reduced: whether the gradient buffers hold the fully reduced gradient of step `committed`.
        last_vote: the vote of step ``committed - 1``, if this process has applied it.
        times: of the last commit.
    """

    def __init__(
        self,
        *,
        worker: int,
        held: HeldLayers,
        buffers: GradientBuffers,
        clip_norm: float | None,
        committed: int,
        activity: Activity,
        faults: FaultInjector,
    ) -> None:
        self._worker = worker
        self._held = held
        self.buffers = buffers
        self._clip_norm = clip_norm
        self._activity = activity
        self._faults = faults
        self.committed = committed
        self.reduced = False
        self.last_vote: Vote | None = None
        self.times: CommitTimes | None = None

    def commit(
        self,
        sums: StepSums,
        reductions: Reductions,
        communicators: Communicators,
        members: tuple[int, ...],
        *,
        finish: bool,
        pause: bool = False,
    ) -> AppliedStep:
        """Take the step that was just executed to its end. Raises CommunicationError, NotFiniteError."""
        reduced = self._reduce(reductions)
        reduced_s = time.perf_counter()
        vote = self._vote(sums, communicators, members, finish=finish, pause=pause)
        voted_s = time.perf_counter()
        applied = self.apply(vote)
        self.times = CommitTimes(reduced, (reduced_s, voted_s), time.perf_counter())
        return applied

    def apply(self, vote: Vote) -> AppliedStep:
        """Apply step `committed` from the reduced gradients and its vote. Communicates with nobody.

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
        self._activity.begin("optimizer")
        self._faults.at("optimizer", self.committed)
        clip = 1.0 if self._clip_norm is None else min(1.0, self._clip_norm / (grad_norm + _CLIP_EPSILON))
        self.buffers.scale(clip / vote.terms)
        lr = self._held.update(self.committed)
        self.committed += 1
        self.reduced = False
        self.last_vote = vote
        return AppliedStep(vote, grad_norm, lr)

    def _reduce(self, reductions: Reductions) -> tuple[TimedReduction, ...]:
        """Wait for the reductions, all of which have been issued by the end of the program."""
        self._activity.begin("sync")
        self._faults.at("sync", self.committed)
        with self._activity.waiting("sync"):
            reduced = reductions.finish()
        self.reduced = True
        return reduced

    def _vote(
        self, sums: StepSums, communicators: Communicators, members: tuple[int, ...], *, finish: bool, pause: bool
    ) -> Vote:
        square_sum = self.buffers.square_sum(self._worker)
        ballot = torch.tensor(
            [square_sum, sums.loss, sums.terms, sums.samples, float(finish), float(pause), 1.0], dtype=torch.float64
        )
        if len(members) > 1:
            result = communicators.vote(ballot, members)
            self._faults.at("vote", self.committed)
            with self._activity.waiting("vote"):
                result.wait()
        grad_square_sum, loss_sum, terms, samples, finishing, pausing, well = ballot.tolist()
        if round(well) != len(members):
            raise CommunicationError(None, f"the vote counted {well:g} of {len(members)} workers")
        return Vote(
            grad_square_sum=grad_square_sum,
            loss_sum=loss_sum,
            terms=round(terms),
            samples=round(samples),
            finish=finishing > 0,
            pause=pausing > 0,
        )
