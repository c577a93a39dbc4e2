"""The commit of a step: reduce the gradients, compare the states of holders, vote, apply the update.

Reductions start while the program still runs (see `reductions`), and the commit waits for the rest. The vote is one sum
over all workers of the generation. It completes on any worker only if every worker has contributed to it,
and a worker contributes only once it holds all its reduced gradients. So once any worker has applied a step, all others
can.

After the same updates, the states of a layer's holders have to be equal, bit by bit. A checksum of each layer is
computed beside the operations of a step, during which its state does not change, and travels in the step's vote. So the
comparison costs no message of its own, and all workers see the same result.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np
import torch
import xxhash

from chameleon_ft.config import Batch
from chameleon_ft.errors import ChameleonError, ControlError
from chameleon_ft.plan.rest import StepProgress
from chameleon_ft.plan.shards import Sharding
from chameleon_ft.plan.vote import Vote
from chameleon_ft.side_outputs import AUXILIARY
from chameleon_ft.sync import Segment
from chameleon_ft.worker.communicators.base import CommunicationError, Communicators
from chameleon_ft.worker.context import RankContext
from chameleon_ft.worker.device import side_stream
from chameleon_ft.worker.execution.bad_steps import BadStepError, Contributions, JobError, RecentSteps, Repetition
from chameleon_ft.worker.execution.gather import ParameterExchange
from chameleon_ft.worker.execution.gradients import GradientBuffers
from chameleon_ft.worker.execution.layers import HeldLayers
from chameleon_ft.worker.execution.optimizer import Range
from chameleon_ft.worker.execution.reductions import Reductions
from chameleon_ft.worker.execution.steps import StepState, StepStats
from chameleon_ft.worker.mover import Mover
from chameleon_ft.worker.snapshots import SnapshotTaker
from chameleon_ft.worker.state_transfer.layer_messages import layer_checksums
from chameleon_ft.worker.state_transfer.migration import LayerMigration

# A number of the vote is a float64, which has no more bits.
_BITS: Final = 52
_SHIFT: Final = 64 - _BITS


class StateDiffersError(ChameleonError):
    """Holders of a layer have different states after the same updates.

    Attributes:
        checksums: layer -> worker -> checksum, of the layers whose holders differ.
    """

    def __init__(self, checksums: Mapping[int, Mapping[int, int]]) -> None:
        self.checksums = checksums
        super().__init__(f"the holders of layers {sorted(checksums)} have different states")


class LeftOutError(ChameleonError):
    """Workers have left out different samples of a step, which is to be computed again without all of these.

    Attributes:
        rows: (micro-batch, row) of the samples.
    """

    def __init__(self, rows: Collection[tuple[int, int]]) -> None:
        self.rows = rows
        super().__init__(f"samples {sorted(rows)} are left out only by some workers")


class _Slot(NamedTuple):
    """A holder's number in the vote: the checksum of a layer, or of a slice of its optimizer's state."""

    layer: int
    holder: int
    units: Range | None = None


class StateCheck:
    """Compares the layers of a generation between their holders.

    A layer with a single holder is not compared, and neither is one that a worker has not held since the beginning of
    the step. Slices of optimizer state are compared between their owners.
    """

    def __init__(
        self,
        rank: RankContext,
        held: HeldLayers,
        segments: Sequence[Segment],
        *,
        mover: Mover,
        sharding: Sharding | None = None,
    ) -> None:
        self._rank = rank
        self._held = held
        self._mover = mover
        shared = [segment for segment in segments if not segment.tied and len(segment.holders) > 1]
        self._slots = [_Slot(layer, holder) for each in shared for layer in each.layers for holder in each.holders]
        for layer, own in enumerate(() if sharding is None else sharding.layers):
            slices = [each for each in own.slices if len(each.owners) > 1]
            self._slots += [_Slot(layer, owner, (each.start, each.stop)) for each in slices for owner in each.owners]
        self._stream = side_stream(rank.device)
        self._checksums: Future[dict[_Slot, int]] | None = None

    def begin(self) -> None:
        """Begin to compute the checksums of the layers held, whose state is constant until the next update."""
        own = [slot for slot in self._slots if slot.holder == self._rank.worker and slot.layer in self._held.layers]
        updated = None if self._stream is None else torch.accelerator.current_stream().record_event()
        self._checksums = self._mover.start(self._checksums_of, own, updated)

    def ballot(self) -> list[float]:
        """Return this worker's part of the vote: a number for each holder of each layer, zero except its own.

        Empty unless `begin` was called since the last vote.
        """
        if self._checksums is None:
            return []
        checksums = self._checksums.result()
        return [float(checksums.get(slot, 0)) for slot in self._slots]

    def compare(self, sums: Sequence[float]) -> bool:
        """Return whether the sums of all ballots were compared, and are equal.

        Raises StateDiffersError if they differ.
        """
        is_checked, self._checksums = self._checksums is not None, None
        found: dict[tuple[int, Range | None], dict[int, int]] = defaultdict(dict)
        for slot, checksum in zip(self._slots, sums, strict=False):
            if checksum:
                found[slot.layer, slot.units][slot.holder] = round(checksum)
        different: dict[int, dict[int, int]] = {}
        for (layer, _), each in found.items():
            if len(set(each.values())) > 1:
                different.setdefault(layer, each)
        if different:
            raise StateDiffersError(different)
        return is_checked

    def _checksums_of(self, slots: Sequence[_Slot], updated: torch.Event | None) -> dict[_Slot, int]:
        found = {}
        with nullcontext() if self._stream is None else self._stream:
            if self._stream is not None and updated is not None:
                self._stream.wait_event(updated)
            for slot in slots:
                self._mover.check()
                if slot.units is None:
                    state = self._held.compared_state_of(slot.layer)
                else:
                    state = dict(sorted(self._held.state_of_slice(slot.layer, slot.units).items()))
                pieces = np.array(layer_checksums(state, self._rank.device), dtype=np.int64)
                found[slot] = (xxhash.xxh3_64_intdigest(pieces.tobytes()) >> _SHIFT) or 1
        return found


_CLIP_EPSILON: Final = 1e-6  # as in torch.nn.utils.clip_grad_norm_
# A vote only sums: this norm of n equal times is at most n**(1/32) times their maximum.
_MAX_NORM: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedStep:
    """A step as a worker has computed it.

    Attributes:
        stats: Sums and times of the operations; the commit completes them.
        reductions: The reductions of its gradients, which may still be in flight.
        contributions: How many contributions of micro-batches to layers the gradients of this worker stand for.
        is_skipped: No worker has computed anything, because the step is known to be bad.
        repetition: If the step is computed again, it is given the contributions of this worker.
    """

    stats: StepStats
    reductions: Reductions
    contributions: int
    is_skipped: bool = False
    repetition: Repetition | None = None

    def sums(self) -> Contributions:
        """Return the sums of this worker's own contributions to the loss and, once reduced, to the gradients."""
        return {"loss": self.stats.loss, **self.reductions.contributions()}


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitContext:
    """The workers that commit a step together, and what its commit waits for.

    Layers that migrate take part in the update, and the migration has to be resumed afterwards. Copies for snapshots
    and comparisons of the state before the update must be complete.
    """

    communicators: Communicators
    members: tuple[int, ...]
    migration: LayerMigration | None = None
    snapshots: SnapshotTaker | None = None
    check: StateCheck | None = None
    position_after: Callable[[int], bytes] | None = None
    """Waits until it is known where in the stream of samples a step ends."""
    batch: Batch | None = None
    """The batch of a step of which samples may be left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """Wishes in the vote of a worker: to finish and to switch count if any worker has them, the others if all do.

    A checkpoint, a snapshot and an evaluation are of the state after this step.
    """

    finish: bool = False
    switch: bool = False
    checkpoint: bool = False
    snapshot: bool = False
    evaluate: bool = False


@dataclass(frozen=True, slots=True)
class AppliedStep:
    """A step that is over. `grad_norm`: global L2 norm of the mean gradient before clipping; 0 if it is skipped."""

    vote: Vote
    grad_norm: float
    lr: float


@dataclass(slots=True, kw_only=True)
class Committer:
    """Counts the steps that this rank has applied, and applies the next.

    Attributes:
        committed: The number of steps applied; the next one is step `committed`.
        contributions: Returns how many contributions of micro-batches to layers a step has, over all workers.
        state: The state of step `committed`, once it has begun.
        reduced: The gradient buffers hold the fully reduced gradient of step `committed`.
        last_vote: The vote of step ``committed - 1``, if this process has applied it.
        recent: The last steps that it has applied.
        step_s: The seconds of the last step that it has run as a whole; None before the first.
        gather: The exchange after an update, if slices of the optimizer's state have owners.
        missing: Layers of which some parameters may not be those after the last update, because others own them.
        position: Where in the stream of samples step `committed` ends, once it is `reduced`; None without a stream.
    """

    rank: RankContext
    held: HeldLayers
    buffers: GradientBuffers
    contributions: Callable[[int], int]
    committed: int
    recent: RecentSteps = field(default_factory=lambda: RecentSteps(0.0))
    state: StepState | None = None
    reduced: bool = False
    last_vote: Vote | None = None
    step_s: float | None = None
    gather: ParameterExchange | None = None
    missing: frozenset[int] = frozenset()
    position: bytes | None = None

    def begin(self) -> StepState:
        """Begin step `committed`: there is nothing of it yet."""
        self.reduced = False
        self.buffers.zero()
        self.state = StepState(self.committed)
        return self.state

    def drop(self) -> None:
        """Give up what there is of step `committed`: the state before it cannot be trusted."""
        self.reduced = False
        self.state = None

    def progress(self) -> StepProgress | None:
        """Return what this rank holds of step `committed`; None if it has not begun it."""
        return None if self.state is None else self.state.progress(self.buffers.totals)

    def commit(self, step: ComputedStep, context: CommitContext, wishes: Callable[[], Wishes] = Wishes) -> AppliedStep:
        """Reduce, vote and apply the step that was just computed, and complete its `stats`.

        The wishes are asked for just before the vote.

        Raises:
            CommunicationError: a reduction or the vote failed.
            StateDiffersError: the state before the update differs between holders; no rank applies the step.
            JobError: the first layer and the loss have got different samples; no rank applies the step.
            LeftOutError: the same, because some workers cannot read a sample; no rank applies the step.
            ControlError: some contribution is missing, or is there twice; no rank applies the step.
            BadStepError: the loss or the gradient is bad; no rank applies the step.
        """
        self.rank.activity.begin(f"gradient sync in step {self.committed}")
        self.rank.faults.at("sync", self.committed)
        with self.rank.activity.waiting("sync", for_message=True):
            step.stats.reductions = step.reductions.finish()
            self.await_parameters()
            if context.migration is not None:
                # Layers may take long, and then the vote that waits for them is no lost message.
                with self.rank.activity.waiting("layers that arrive", for_message=not context.migration.holds_vote):
                    context.migration.settle()
            if context.snapshots is not None:
                context.snapshots.settle(self.committed)
        if context.position_after is not None:
            self.position = context.position_after(self.committed)
        self.reduced = True
        reduced_s = time.perf_counter()
        vote, bounds = self._vote(step, context, wishes())
        step.stats.vote_s = (reduced_s, time.perf_counter())
        if step.repetition is not None:
            step.repetition.contributions = step.sums()
        if step.is_skipped:
            vote = replace(vote, skipped=True)
        elif vote.terms > 0:
            loss, grad_norm = vote.loss_sum / vote.terms, _grad_norm(vote)
            if (why := self.recent.why_bad(loss, grad_norm, bounds)) is not None:
                raise BadStepError(vote, why, step.sums())
            self.recent.add(loss, grad_norm)
        else:
            vote = replace(vote, loss_sum=0.0, auxiliary_sum=0.0, grad_square_sum=0.0, skipped=True, empty=True)
        applied = self.apply(vote)
        step.stats.end_s = time.perf_counter()
        return applied

    def compare(self, check: StateCheck, context: CommitContext) -> None:
        """Compare the state after the last update between its holders, in a vote of its own.

        Raises:
            CommunicationError: the vote failed.
            StateDiffersError: the state differs.
        """
        check.begin()
        voters, *checksums = self._sum([1.0, *check.ballot()], context)
        _require_all(voters, context.members)
        check.compare(checksums)

    def apply(self, vote: Vote) -> AppliedStep:
        """Apply step `committed` from the reduced gradients and its vote, without any message; or skip it."""
        assert self.reduced, "a step is applied only from a fully reduced gradient"
        if vote.skipped:
            return self._applied(vote, 0.0, self.held.learning_rate(self.committed))
        grad_norm = _grad_norm(vote)
        self.rank.activity.begin(f"the optimizer in step {self.committed}")
        max_norm = self.rank.job.clip_norm
        clip = 1.0 if max_norm is None else min(1.0, max_norm / (grad_norm + _CLIP_EPSILON))
        if self.gather is not None:
            self.gather.restart()
            self.missing = self.held.layers
        with self.buffers.without_idle():
            self.buffers.scale(clip / vote.terms)
            if self.rank.job.clip_value is not None:
                self.buffers.clamp(self.rank.job.clip_value)
            lr = self.held.update(self.committed)
        self.held.after_step()
        # After the update, which may round a flipped bit away.
        self.rank.faults.at("optimizer", self.committed)
        return self._applied(vote, grad_norm, lr)

    def begin_exchange(self, *, again: bool = False) -> None:
        """Begin to exchange the parameters that owners have updated, beside what follows.

        The step is applied, whatever happens here: after a failure, the next generation exchanges them again, because
        other workers may lack some, though this one may have all.
        """
        if self.gather is None or not (self.missing or again):
            return
        self.rank.activity.begin(f"the exchange of parameters after step {self.committed - 1}")
        self.rank.faults.at("gather", self.committed - 1)
        self.gather.begin(self.missing)

    def await_parameters(self, layers: Collection[int] | None = None, migration: LayerMigration | None = None) -> None:
        """Wait for the updated parameters of these layers, or of all; send a migration's to shadow holders, too.

        Raises CommunicationError.
        """
        if self.gather is None or (layers is not None and (not self.missing or self.gather.has(layers))):
            return
        with self.rank.activity.waiting("parameters", for_message=True):
            self.gather.wait(layers)
            if migration is not None and self.missing:
                migration.exchange_parameters()
        if layers is None:
            self.missing = frozenset()

    def wait_for_exchange(self) -> None:
        """Wait until all parameters of the last update have been exchanged. Called from any thread.

        Raises CommunicationError.
        """
        if self.gather is not None:
            self.gather.wait()

    def end_exchange(self) -> None:
        """End the exchange, once the mover is closed; then `missing` is known."""
        if self.gather is not None:
            self.gather.drop()
            self.missing -= self.gather.complete

    def _applied(self, vote: Vote, grad_norm: float, lr: float) -> AppliedStep:
        self.committed += 1
        if self.position is not None:
            self.held.position = self.position
        # The vote is complete, so all messages have arrived.
        self.state = None
        self.reduced = False
        self.last_vote = vote
        return AppliedStep(vote, grad_norm, lr)

    def _vote(self, step: ComputedStep, context: CommitContext, wishes: Wishes) -> tuple[Vote, list[float]]:
        """Return the vote, and the sums of the bounds for spikes."""
        stats, check = step.stats, context.check
        bounds, checksums = self.recent.ballot(), () if check is None else check.ballot()
        totals = self.held.side_totals(layer for layer, *tied in self.buffers.first_held(self.rank.worker) if not tied)
        side = [number for name in self._side_names for number in totals.get(name, (0.0, 0.0))]
        ballot = [
            self.buffers.square_sum(self.rank.worker),
            *(stats.loss, stats.terms, stats.samples, stats.draws),
            stats.data_wait_s**_MAX_NORM,
            *(wishes.finish, wishes.switch, wishes.checkpoint, wishes.snapshot, wishes.evaluate),
            step.contributions,
            1.0,
            *side,
            *bounds,
            *checksums,
        ]
        total = self._sum(ballot, context)
        grad_square_sum, loss_sum, terms, samples, draws, data_wait, finishing, switching, *counts = total
        checkpointing, snapshotting, evaluating, contributions, voters, *others = counts
        sides = zip(others[: len(side) : 2], others[1 : len(side) : 2], strict=True)
        logged, others = dict(zip(self._side_names, sides, strict=True)), others[len(side) :]
        auxiliary_sum, _ = logged.pop(AUXILIARY, (0.0, 0.0))
        _require_all(voters, context.members)
        if draws and context.batch is not None:
            self._require_equal(stats.left_out, context.batch, context)
        if draws:
            raise JobError(
                f"`dataset` reads a sample of step {self.committed} differently for the inputs and for the targets; "
                "let it draw from the global generators of Python, NumPy and torch, which are seeded for each read, "
                "instead of a generator of its own or the clock"
            )
        is_checked = check is not None and check.compare(others[len(bounds) :])
        expected = 0 if step.is_skipped else self.contributions(self.committed)
        if round(contributions) != expected:
            raise ControlError(
                f"the gradients of step {self.committed} have {contributions:g} contributions of micro-batches to "
                f"layers instead of {expected}"
            )
        vote = Vote(
            grad_square_sum=grad_square_sum,
            loss_sum=loss_sum + auxiliary_sum,
            auxiliary_sum=auxiliary_sum,
            logged=tuple(
                (name, total / weight if math.isfinite(total) else None)
                for name, (total, weight) in logged.items()
                if weight
            ),
            terms=terms,
            samples=round(samples),
            data_wait_s=data_wait ** (1 / _MAX_NORM),
            finish=finishing > 0,
            switch=switching > 0,
            checkpoint=round(checkpointing) == len(context.members),
            snapshot=round(snapshotting) == len(context.members),
            checked=is_checked,
            evaluate=round(evaluating) == len(context.members),
        )
        return vote, others[: len(bounds)]

    @property
    def _side_names(self) -> list[str]:
        """The names of all that layers give beside their outputs, in the order of the vote."""
        return sorted({name for names in self.rank.job.side_outputs for name in names})

    def _require_equal(self, left_out: Collection[tuple[int, int]], batch: Batch, context: CommitContext) -> None:
        """Raise LeftOutError with the samples that any worker has left out, if there are some."""
        size = batch.micro_batch_size
        rows = [divmod(number, size) for number in range(batch.micro_batches_at(self.committed) * size)]
        voters, *found = self._sum([1.0, *(float(row in left_out) for row in rows)], context)
        _require_all(voters, context.members)
        if any(found):
            raise LeftOutError([row for row, count in zip(rows, found, strict=True) if count])

    def total(self, numbers: Sequence[float], context: CommitContext) -> list[float]:
        """Return the sums of numbers of all members, in a vote of its own. Raises CommunicationError."""
        voters, *total = self._sum([1.0, *numbers], context, phase="evaluation")
        _require_all(voters, context.members)
        return total

    def _sum(self, numbers: Sequence[float], context: CommitContext, *, phase: str = "vote") -> list[float]:
        """Return the sums of the ballots of all members."""
        ballot = torch.tensor(numbers, dtype=torch.float64)
        if len(context.members) > 1:
            result = context.communicators.vote(ballot, context.members)
            self.rank.faults.at(phase, self.committed)
            with self.rank.activity.waiting(phase, for_message=True):
                result.wait()
        return ballot.tolist()


def _require_all(voters: float, members: tuple[int, ...]) -> None:
    if round(voters) != len(members):
        raise CommunicationError(None, f"the vote counted {voters:g} of {len(members)} workers")


def _grad_norm(vote: Vote) -> float:
    return math.sqrt(vote.grad_square_sum) / vote.terms
