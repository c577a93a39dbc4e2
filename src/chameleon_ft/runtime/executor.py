"""Runs a worker's program for one step. It knows operations and messages, and nothing of plans or policies."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch
from torch import Tensor

from chameleon_ft.estimate import MessageBuffers
from chameleon_ft.job import BoundarySpec, Job
from chameleon_ft.runtime.activity import Activity
from chameleon_ft.runtime.batches import Batches
from chameleon_ft.runtime.communicators import Channel, Communicators, InFlight
from chameleon_ft.runtime.fault_injection import FaultInjector
from chameleon_ft.runtime.kept_hops import KeptHop, WeightHalf
from chameleon_ft.runtime.layers import HeldLayers
from chameleon_ft.runtime.sent_messages import SentMessage, SentMessages, tag_of
from chameleon_ft.schedule import Operation, OperationKind

__all__ = ["Executor", "Pace", "StepSums", "channels_of"]

_BUFFERS: Final = MessageBuffers()  # one model for the prediction of memory and for what is done here

_Hop = tuple[int, int]  # (micro-batch, hop)


class Pace(Protocol):
    """How long operations last where the device that runs them is emulated."""

    def fill(self, operation: Operation, *, since: float) -> None:
        """Return when `operation`, begun at `since` by `time.perf_counter`, would be over on that device."""


@dataclass(slots=True)
class StepSums:
    """What a worker adds up over the operations of a step."""

    loss: float = 0.0
    terms: int = 0
    samples: int = 0
    spans: list[tuple[OperationKind, float, float]] = field(default_factory=list)
    """Of each operation, in order: when it began to compute and when it had its result, by `time.perf_counter`."""
    under_way: list[SentMessage] = field(default_factory=list)
    """Messages that may not have arrived: to be kept until the step's vote is complete."""

    def median_s(self, kind: OperationKind) -> float:
        """Median seconds of the operations of a kind; 0 where there were none."""
        found = [end - start for each, start, end in self.spans if each is kind]
        return statistics.median(found) if found else 0.0

    @property
    def longest_s(self) -> float:
        return max((end - start for _, start, end in self.spans), default=0.0)


class Executor:
    """Executes programs on the layers a rank holds.

    Per operation: wait for its message, compute, start sending the result. A message crosses while its receiver
    computes only if its receive has been posted, so receives are posted a few ahead, in program order. Sends are waited
    for only where too many are under way (`SentMessages`). With the checks that a program passes this cannot deadlock.
    """

    def __init__(
        self,
        *,
        job: Job,
        held: HeldLayers,
        boundaries: Sequence[BoundarySpec],
        batches: Batches,
        device: torch.device,
        communicators: Communicators,
        activity: Activity,
        faults: FaultInjector,
        pace: Pace | None = None,
    ) -> None:
        self._job = job
        self._held = held
        self._boundaries = boundaries
        self._batches = batches
        self._device = device
        self._communicators = communicators
        self._activity = activity
        self._faults = faults
        self._pace = pace

    def run(self, step: int, operations: Sequence[Operation], *, after: Callable[[int], None]) -> StepSums:
        """Run all operations of `step` in order, accumulating gradients. Raises CommunicationError.

        `after` is called with the number of operations that have been run: 0 before the first, and after each.
        """
        return _StepExecution(self, step, operations).run(after)


class _StepExecution:
    """The state of one step: tensors between forward and backward, and messages under way."""

    def __init__(self, executor: Executor, step: int, operations: Sequence[Operation]) -> None:
        self._executor = executor
        self._step = step
        self._operations = operations
        self._sums = StepSums()
        self._losses: list[Tensor] = []
        self._saved: dict[_Hop, KeptHop] = {}
        self._pending: dict[_Hop, WeightHalf] = {}
        self._handed: dict[tuple[bool, int, int], Tensor] = {}  # what this worker hands to its own next hop
        self._receives: dict[int, tuple[InFlight, Tensor]] = {}  # by index of the operation
        self._to_post = deque(i for i, operation in enumerate(operations) if operation.receive_from is not None)
        self._sent = SentMessages(executor._communicators, executor._activity, kept=_BUFFERS.sends_kept)
        self._fault_at = _middle_of_each_kind(operations)

    def run(self, after: Callable[[int], None]) -> StepSums:
        after(0)
        for index, operation in enumerate(self._operations):
            if index in self._fault_at:
                self._executor._faults.at(self._fault_at[index], self._step)
            self._run_operation(index, operation)
            after(index + 1)
        self._sums.under_way = self._sent.under_way()
        self._sums.loss = float(torch.stack(self._losses).sum(dtype=torch.float64)) if self._losses else 0.0
        return self._sums

    def _run_operation(self, index: int, operation: Operation) -> None:
        message = self._message(index, operation)
        self._executor._activity.begin(f"{operation.kind.value}{operation.micro_batch}")
        start = time.perf_counter()
        result = self._compute(operation, message)
        if self._executor._pace is not None:
            self._executor._pace.fill(operation, since=start)
        self._sums.spans.append((operation.kind, start, time.perf_counter()))
        if result is not None:
            self._pass_on(operation, result)

    def _message(self, index: int, operation: Operation) -> Tensor | None:
        """Return the operation's incoming tensor: an activation, or a gradient; None where nothing comes in."""
        while self._to_post and (len(self._receives) < _BUFFERS.receives_ahead or self._to_post[0] <= index):
            self._post(self._to_post.popleft())
        if operation.receive_from is not None:
            receive, tensor = self._receives.pop(index)
            what = f"{operation.kind.value}{operation.micro_batch} of worker {operation.receive_from}"
            with self._executor._activity.waiting(what):
                receive.wait()
            if operation.kind is not OperationKind.FORWARD:
                self._sent.answered(operation)
            return tensor
        forward = operation.kind is OperationKind.FORWARD
        return self._handed.pop((forward, operation.micro_batch, operation.hop), None)

    def _post(self, index: int) -> None:
        operation = self._operations[index]
        assert operation.receive_from is not None
        forward = operation.kind is OperationKind.FORWARD
        spec = self._executor._boundaries[operation.layers.start - 1 if forward else operation.layers.stop - 1]
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device=self._executor._device)
        receive = self._executor._communicators.receive(
            tensor, peer=operation.receive_from, tag=tag_of(operation.micro_batch, forward)
        )
        self._receives[index] = (receive, tensor)

    def _pass_on(self, operation: Operation, tensor: Tensor) -> None:
        """Pass an operation's result on, to another worker or to this worker's own next operation."""
        forward = operation.kind is OperationKind.FORWARD
        if operation.send_to is None:
            self._handed[forward, operation.micro_batch, operation.hop + (1 if forward else -1)] = tensor
            return
        self._sent.send(operation, tensor.contiguous())

    def _compute(self, operation: Operation, message: Tensor | None) -> Tensor | None:
        """Compute, and return what the next hop needs of it: an activation, or a gradient; None where there is none."""
        match operation.kind:
            case OperationKind.FORWARD:
                return self._forward(operation, message)
            case OperationKind.BACKWARD:
                return self._backward(operation, message)
            case OperationKind.INPUT_GRAD:
                return self._input_gradient(operation, message)
            case OperationKind.WEIGHT_GRAD:
                self._pending.pop((operation.micro_batch, operation.hop)).run()
                return None

    def _forward(self, operation: Operation, message: Tensor | None) -> Tensor | None:
        micro_batch = operation.micro_batch
        if operation.first:
            boundary, _ = self._executor._batches.micro_batch(self._step, micro_batch)
        else:
            assert message is not None
            boundary = message.detach().requires_grad_(message.is_floating_point() or message.is_complex())
        held, num_layers = self._executor._held, len(self._executor._boundaries)
        kept = KeptHop(held, operation, step=self._step, num_layers=num_layers)
        output = kept.forward(boundary)
        self._saved[micro_batch, operation.hop] = kept
        if operation.last:
            kept.end_in(self._loss(micro_batch, output))
            return None
        return output.detach()

    def _loss(self, micro_batch: int, output: Tensor) -> Tensor:
        job = self._executor._job
        _, targets = self._executor._batches.micro_batch(self._step, micro_batch)
        loss = job.loss(output, targets)
        self._losses.append(loss.detach().clone())  # some losses are a view of all their terms
        self._sums.terms += int(job.loss_terms(targets))
        self._sums.samples += len(targets)
        return loss

    def _backward(self, operation: Operation, gradient: Tensor | None) -> Tensor | None:
        hop = self._saved.pop((operation.micro_batch, operation.hop))
        return self._owed(operation, hop.backward(gradient))

    def _input_gradient(self, operation: Operation, gradient: Tensor | None) -> Tensor | None:
        hop = (operation.micro_batch, operation.hop)
        input_grad, self._pending[hop] = self._saved.pop(hop).input_gradient(gradient)
        return self._owed(operation, input_grad)

    def _owed(self, operation: Operation, gradient: Tensor | None) -> Tensor | None:
        """What the hop before gets for its backward, also from layers that do not depend on their input."""
        if operation.first:
            return None
        if gradient is not None:
            return gradient
        spec = self._executor._boundaries[operation.layers.start - 1]
        return torch.zeros(spec.shape, dtype=spec.dtype, device=self._executor._device)


def channels_of(worker: int, operations: Sequence[Operation]) -> tuple[Channel, ...]:
    """The channels that a worker's program sends and receives on, each once, in order."""
    found: set[Channel] = set()
    for operation in operations:
        forward = operation.kind is OperationKind.FORWARD
        if operation.receive_from is not None:
            found.add(Channel(operation.receive_from, worker, forward))
        if operation.send_to is not None:
            found.add(Channel(worker, operation.send_to, forward))
    return tuple(sorted(found))


def _middle_of_each_kind(operations: Sequence[Operation]) -> dict[int, str]:
    """Where in a step the injected failures of the phases "forward" and "backward" happen: half-way through them."""
    forwards = [i for i, operation in enumerate(operations) if operation.kind is OperationKind.FORWARD]
    backwards = [i for i, o in enumerate(operations) if o.kind in (OperationKind.BACKWARD, OperationKind.INPUT_GRAD)]
    return {
        indices[len(indices) // 2]: phase
        for phase, indices in (("forward", forwards), ("backward", backwards))
        if indices
    }
