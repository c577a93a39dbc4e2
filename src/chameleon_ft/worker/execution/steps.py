"""The state of a step between its first operation and its vote; its sums and times, and their records."""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import torch
from torch import Tensor

from chameleon_ft.clock import unix_s
from chameleon_ft.plan.rest import GradientKey, HopKey, StepProgress
from chameleon_ft.protocol.parts import ChannelTimes, OperationTimes
from chameleon_ft.schedule import Operation, OperationKind
from chameleon_ft.storage.timelines import RecordedReduction, RecordedStep, StepPart, TimelineLog
from chameleon_ft.sync import Segment
from chameleon_ft.worker.communicators.base import CommunicationError, InFlight
from chameleon_ft.worker.execution.backward import SavedActivations, WeightHalf

Result: TypeAlias = tuple[bool, int, int]
"""(whether it is an activation, micro-batch, layer): the output of the layer, or the gradient of its input."""

Span: TypeAlias = tuple[OperationKind, float, float]
"""(kind, start, end) of the computation of an operation, by `time.perf_counter`."""


def hop_of(operation: Operation) -> HopKey:
    """Return the key of the hop that an operation belongs to."""
    return operation.micro_batch, operation.layers


@dataclass(frozen=True, slots=True)
class CountedLoss:
    """The loss of one micro-batch: its sum, of shape [], its terms and the number of its samples."""

    value: Tensor
    terms: float
    samples: int


@dataclass(slots=True)
class StepState:
    """The state of one step, which outlives a generation that ends in the middle of it.

    Attributes:
        contributed: Hops whose weight gradients have been added to the gradient buffers.
        saved: Hops whose F has run, and whose backward has not begun.
        deferred: Hops whose I has run, and whose W has not.
        losses: The losses that this worker has counted, by micro-batch.
        results: Results of operations that are still held: for this worker's own next hop, or because the worker that
            they were sent to may not have used them.
        spans: The operations that the program in execution has run, in order.
        in_flight: Messages to be held until they have arrived, at the latest until the step's vote is complete.
    """

    step: int
    contributed: set[HopKey] = field(default_factory=set)
    saved: dict[HopKey, SavedActivations] = field(default_factory=dict)
    deferred: dict[HopKey, WeightHalf] = field(default_factory=dict)
    losses: dict[int, CountedLoss] = field(default_factory=dict)
    results: dict[Result, Sequence[Tensor]] = field(default_factory=dict)
    in_flight: dict[Result, InFlight] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    @property
    def loss(self) -> float:
        """The sum of the losses counted so far."""
        values = [loss.value for loss in self.losses.values()]
        return float(torch.stack(values).sum(dtype=torch.float64)) if values else 0.0

    def contributions(self, known: Collection[int] = ()) -> int:
        """Return how many pairs of micro-batch and layer are in the gradients; those of `known` layers do not count."""
        return sum(1 for _, layers in self.contributed for layer in layers if layer not in known)

    def progress(self, totals: Collection[GradientKey]) -> StepProgress:
        """Return what the worker holds of the step; `totals` are the keys of the gradients whose sum it holds."""
        return StepProgress(
            contributed=frozenset(self.contributed),
            saved=frozenset(self.saved),
            deferred=frozenset(self.deferred),
            counted=frozenset(self.losses),
            totals=frozenset(totals),
            activations=frozenset((micro_batch, layer) for forward, micro_batch, layer in self.results if forward),
            gradients=frozenset((micro_batch, layer) for forward, micro_batch, layer in self.results if not forward),
        )

    def keep_for(self, operations: Collection[Operation], results: Collection[Result]) -> None:
        """Release what the program of the step's rest does not use; of the results keep only these."""
        forwards, backwards, weights = (
            {hop_of(operation) for operation in operations if operation.kind in kinds}
            for kinds in (
                (OperationKind.FORWARD,),
                (OperationKind.BACKWARD, OperationKind.INPUT_GRAD),
                (OperationKind.WEIGHT_GRAD,),
            )
        )
        self.saved = {hop: saved for hop, saved in self.saved.items() if hop in backwards - forwards}
        self.deferred = {hop: half for hop, half in self.deferred.items() if hop in weights - backwards}
        self.results = {result: tensors for result, tensors in self.results.items() if result in results}


# Of each channel in a step: the shortest of some is hardly noise.
_TIMED_MESSAGES: Final = 8
# A shorter wait may be for a message that is there.
_WAITED_S: Final = 2e-4
_RECORDED_AFTER_A_CHANGE = 2


@dataclass(frozen=True, slots=True)
class TimedReduction:
    """When the all-reduce of a segment was issued and when it was done, by `time.perf_counter`."""

    segment: Segment
    start_s: float
    end_s: float


@dataclass(slots=True)
class StepStats:
    """Sums and times of one worker's step. The executor begins it and the commit completes it.

    All times are by `time.perf_counter`.
    """

    loss: float = 0.0
    terms: float = 0.0
    samples: int = 0
    data_wait_s: float = 0.0
    """Seconds in which this worker read samples, between its operations."""
    draws: int = 0
    """Digests of the micro-batches read for the first layer, less those read for the loss; all workers' add up to 0."""
    left_out: set[tuple[int, int]] = field(default_factory=set)
    """(micro-batch, row) of the samples that this worker has left out."""
    spans: list[Span] = field(default_factory=list)
    """Of each operation, in order."""
    sent: dict[tuple[int, bool], list[float]] = field(default_factory=dict)
    """(receiver, whether forward) -> when the first messages were sent."""
    arrived: dict[tuple[int, bool], list[float]] = field(default_factory=dict)
    """(sender, whether forward) -> when the first messages arrived; 0 for those that were not waited for."""
    reductions: tuple[TimedReduction, ...] = ()
    vote_s: tuple[float, float] = (0.0, 0.0)
    """(start, end)"""
    end_s: float = 0.0

    def operation_times(self) -> OperationTimes:
        """Return the median seconds of the operations; the halves of a split backward count as one."""
        return OperationTimes(
            forward_s=self._median_s(OperationKind.FORWARD),
            backward_s=self._median_s(OperationKind.BACKWARD)
            or self._median_s(OperationKind.INPUT_GRAD) + self._median_s(OperationKind.WEIGHT_GRAD),
            longest_s=max((end - start for _, start, end in self.spans), default=0.0),
            channels=self._channels(),
        )

    def note_sent(self, receiver: int, *, forward: bool) -> None:
        """Note that a message has been sent."""
        times = self.sent.setdefault((receiver, forward), [])
        if len(times) < _TIMED_MESSAGES:
            times.append(time.perf_counter())

    def note_arrived(self, sender: int, *, forward: bool, waited_since_s: float) -> None:
        """Note that a message is there, for which the worker has waited since a time."""
        times = self.arrived.setdefault((sender, forward), [])
        if len(times) < _TIMED_MESSAGES:
            now = time.perf_counter()
            times.append(now if now - waited_since_s > _WAITED_S else 0.0)

    def _channels(self) -> tuple[ChannelTimes, ...]:
        return tuple(
            ChannelTimes(
                peer=peer,
                forward=forward,
                sent_s=_rounded(self.sent.get((peer, forward), ())),
                arrived_s=_rounded(self.arrived.get((peer, forward), ())),
            )
            for peer, forward in sorted(self.sent.keys() | self.arrived.keys())
        )

    def _median_s(self, kind: OperationKind) -> float:
        found = [end - start for each, start, end in self.spans if each is kind]
        return statistics.median(found) if found else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecorder:
    """Writes steps of one worker to `log`: each whose number `every` divides, and the first after a change.

    Of a step that is interrupted it writes both parts. With `every` = 0 it writes none.
    """

    log: TimelineLog
    worker: int
    every: int

    def is_due(self, step: int, *, first_step: int) -> bool:
        """Return whether this step of a generation that began with `first_step` is to be written."""
        return self.every > 0 and (step % self.every == 0 or step < first_step + _RECORDED_AFTER_A_CHANGE)

    @contextmanager
    def noting_interruption(self, state: StepState, *, generation: int) -> Iterator[None]:
        """Write what has run of a step if a failure interrupts it inside the block, later and with the next record."""
        start_s, start_unix_s = time.perf_counter(), unix_s()
        try:
            yield
        except CommunicationError:
            if self.every:
                vote_s, now_s = (start_s, start_s), time.perf_counter()
                stats = StepStats(spans=state.spans, vote_s=vote_s, end_s=now_s)
                times = {"start_s": start_s, "start_unix_s": start_unix_s}
                self.log.defer(self._recorded(state.step, stats, generation, part="interrupted", **times))
            raise

    def record(
        self,
        step: int,
        stats: StepStats,
        *,
        generation: int,
        start_s: float,
        start_unix_s: float,
        part: StepPart = "whole",
    ) -> None:
        """Write a step, which began at `start_s` of the clock of `stats`."""
        times = {"start_s": start_s, "start_unix_s": start_unix_s}
        self.log.append(self._recorded(step, stats, generation, part=part, **times))

    def _recorded(
        self,
        step: int,
        stats: StepStats,
        generation: int,
        *,
        start_s: float,
        start_unix_s: float,
        part: StepPart,
    ) -> RecordedStep:
        return RecordedStep(
            generation=generation,
            step=step,
            worker=self.worker,
            time=start_unix_s,
            operations=tuple((begun - start_s, ended - start_s) for _, begun, ended in stats.spans),
            reductions=tuple(
                RecordedReduction(
                    timed.segment.layers.start,
                    timed.segment.layers.stop,
                    timed.start_s - start_s,
                    timed.end_s - start_s,
                )
                for timed in stats.reductions
            ),
            vote_s=(stats.vote_s[0] - start_s, stats.vote_s[1] - start_s),
            end_s=stats.end_s - start_s,
            part=part,
            kinds="" if part == "whole" else "".join(kind.value for kind, _, _ in stats.spans),
        )


def _rounded(times_s: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(each, 6) for each in times_s)
