"""Runs a worker's program for one step. It knows operations and messages, and nothing of plans or policies."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from time import perf_counter
from typing import Final

import torch
from torch import Tensor

from chameleon_ft.config import Batch
from chameleon_ft.data.order import SampleOrder
from chameleon_ft.data.samples import load_micro_batch
from chameleon_ft.estimate import MessageBuffers
from chameleon_ft.job import BoundarySpec, Job
from chameleon_ft.runtime.activity import Activity
from chameleon_ft.runtime.communicators import Channel, Communicators, InFlight
from chameleon_ft.runtime.execution.layers import HeldLayers
from chameleon_ft.runtime.execution.saved_activations import SavedActivations, WeightHalf
from chameleon_ft.runtime.execution.step_stats import StepStats
from chameleon_ft.runtime.fault_injection import FaultInjector
from chameleon_ft.schedule import Operation, OperationKind

__all__ = ["KEPT_MICRO_BATCHES", "Executor", "MicroBatches", "Pace", "SentMessages", "channels_of", "micro_batches_of"]

_BUFFERS: Final = MessageBuffers()  # the memory estimate goes by it too

_Hop = tuple[int, int]  # (micro-batch, hop)

Pace = Callable[[Operation, float], None]
"""Returns when an operation, begun at so many seconds of `time.perf_counter`, would end on an emulated device."""

MicroBatches = Callable[[int, int], tuple[Tensor, Tensor]]
"""Returns (inputs, targets) for (step, number of the micro-batch in the global batch of the step)."""

KEPT_MICRO_BATCHES: Final = 64
"""The latest micro-batches stay loaded, because a hop reads its inputs, and later its targets, one by one."""


def micro_batches_of(job: Job, batch: Batch, *, seed: int, device: torch.device) -> MicroBatches:
    """Return a function that loads micro-batches of `job` onto `device`."""
    order, size = SampleOrder(len(job.dataset), seed), batch.micro_batch_size

    @lru_cache(KEPT_MICRO_BATCHES)
    def load(step: int, micro_batch: int) -> tuple[Tensor, Tensor]:
        ids = order.ids(step, batch.samples)[micro_batch * size : (micro_batch + 1) * size]
        inputs, targets = load_micro_batch(job.dataset, ids)
        return inputs.to(device), targets.to(device)

    return load


@dataclass(frozen=True, slots=True, kw_only=True)
class Executor:
    """Executes programs on the layers a rank holds.

    Per operation: wait for its message, compute, start sending the result. A message crosses while its receiver
    computes only if its receive has been posted, so receives are posted a few ahead, in program order. Only too many
    sends in flight are waited for (`SentMessages`). A checked program cannot deadlock this way.
    """

    job: Job
    held: HeldLayers
    boundaries: Sequence[BoundarySpec]
    micro_batches: MicroBatches
    device: torch.device
    communicators: Communicators
    activity: Activity
    faults: FaultInjector
    pace: Pace | None = None

    def run(self, step: int, operations: Sequence[Operation], *, after: Callable[[int], None]) -> StepStats:
        """Run all operations of `step` in order, accumulating gradients. Raises CommunicationError.

        `after` is called with the number of operations that have been run: 0 before the first, and after each.
        """
        return _StepExecution(self, step, operations).run(after)


class _StepExecution:
    """The state of one step: tensors between forward and backward, and messages in flight."""

    def __init__(self, executor: Executor, step: int, operations: Sequence[Operation]) -> None:
        self._executor = executor
        self._step = step
        self._operations = operations
        self._stats = StepStats()
        self._losses: list[Tensor] = []
        self._saved: dict[_Hop, SavedActivations] = {}
        self._pending: dict[_Hop, WeightHalf] = {}
        self._local: dict[tuple[bool, int, int], Tensor] = {}  # results for this worker's own next hop
        self._receives: dict[int, tuple[InFlight, Tensor]] = {}  # by index of the operation
        self._to_post = deque(i for i, operation in enumerate(operations) if operation.receive_from is not None)
        self._sent = SentMessages(executor.communicators, executor.activity, kept=_BUFFERS.sends_kept)
        self._fault_at = _middle_of_each_kind(operations)

    def run(self, after: Callable[[int], None]) -> StepStats:
        after(0)
        for index, operation in enumerate(self._operations):
            if index in self._fault_at:
                self._executor.faults.at(self._fault_at[index], self._step)
            self._run_operation(index, operation)
            after(index + 1)
        self._stats.in_flight += self._sent.in_flight()
        self._stats.loss = float(torch.stack(self._losses).sum(dtype=torch.float64)) if self._losses else 0.0
        return self._stats

    def _run_operation(self, index: int, operation: Operation) -> None:
        message = self._message(index, operation)
        self._executor.activity.begin(f"{operation.kind.value}{operation.micro_batch}")
        start = perf_counter()
        result = self._compute(operation, message)
        if self._executor.pace is not None:
            self._executor.pace(operation, start)
        self._stats.spans.append((operation.kind, start, perf_counter()))
        if result is None:
            return
        if operation.send_to is None:
            forward = operation.kind is OperationKind.FORWARD
            self._local[forward, operation.micro_batch, operation.hop + (1 if forward else -1)] = result
        else:
            self._sent.send(operation, result.contiguous())

    def _message(self, index: int, operation: Operation) -> Tensor | None:
        """Return the operation's incoming tensor: an activation, or a gradient; None where nothing comes in."""
        while self._to_post and (len(self._receives) < _BUFFERS.receives_ahead or self._to_post[0] <= index):
            self._post(self._to_post.popleft())
        forward = operation.kind is OperationKind.FORWARD
        if operation.receive_from is None:
            return self._local.pop((forward, operation.micro_batch, operation.hop), None)
        receive, tensor = self._receives.pop(index)
        with self._executor.activity.waiting(
            f"{operation.kind.value}{operation.micro_batch} of worker {operation.receive_from}"
        ):
            receive.wait()
        if not forward:
            self._sent.answered(operation)
        return tensor

    def _post(self, index: int) -> None:
        operation = self._operations[index]
        assert operation.receive_from is not None
        forward = operation.kind is OperationKind.FORWARD
        tensor = self._on_boundary(torch.empty, operation.layers.start - 1 if forward else operation.layers.stop - 1)
        receive = self._executor.communicators.receive(
            tensor, peer=operation.receive_from, tag=_tag_of(operation.micro_batch, forward)
        )
        self._receives[index] = (receive, tensor)

    def _compute(self, operation: Operation, message: Tensor | None) -> Tensor | None:
        """Compute, and return what the next hop needs: an activation, or a gradient; None where there is none."""
        hop = operation.micro_batch, operation.hop
        match operation.kind:
            case OperationKind.FORWARD:
                return self._forward(operation, message)
            case OperationKind.WEIGHT_GRAD:
                self._pending.pop(hop)()
                return None
            case OperationKind.BACKWARD:
                gradient = self._saved.pop(hop).backward(message)
            case OperationKind.INPUT_GRAD:
                gradient, self._pending[hop] = self._saved.pop(hop).input_gradient(message)
        if operation.first:
            return None
        # The hop before needs a gradient even of layers that do not depend on their input.
        return self._on_boundary(torch.zeros, operation.layers.start - 1) if gradient is None else gradient

    def _forward(self, operation: Operation, message: Tensor | None) -> Tensor | None:
        executor = self._executor
        if operation.first:
            boundary, _ = executor.micro_batches(self._step, operation.micro_batch)
        else:
            assert message is not None
            boundary = message.detach().requires_grad_(message.is_floating_point() or message.is_complex())
        saved = SavedActivations(executor.held, operation, step=self._step, num_layers=len(executor.boundaries))
        output = saved.forward(boundary)
        self._saved[operation.micro_batch, operation.hop] = saved
        if operation.last:
            saved.end_in(self._loss(operation.micro_batch, output))
            return None
        return output.detach()

    def _loss(self, micro_batch: int, output: Tensor) -> Tensor:
        job = self._executor.job
        _, targets = self._executor.micro_batches(self._step, micro_batch)
        loss = job.loss(output, targets)
        self._losses.append(loss.detach().clone())  # some losses are a view of all their terms
        self._stats.terms += int(job.loss_terms(targets))
        self._stats.samples += len(targets)
        return loss

    def _on_boundary(self, make: Callable[..., Tensor], layer: int) -> Tensor:
        """Make a tensor of the shape and type of the output of `layer`."""
        spec = self._executor.boundaries[layer]
        return make(spec.shape, dtype=spec.dtype, device=self._executor.device)


@dataclass(frozen=True, slots=True)
class _SentMessage:
    operation: Operation
    tensor: Tensor
    in_flight: InFlight


class SentMessages:
    """Sends the results of operations, and holds their tensors for as long as they may not have arrived.

    An activation is held until the gradient that answers it has come. Nothing answers a gradient: of each receiver the
    latest `kept` are held, and before another one is sent the earliest of them must have arrived. This wait cannot
    deadlock: a receive is posted by its operation at the latest, and a checked program does not deadlock even if a
    worker blocks with a single message in flight on a channel.
    """

    def __init__(self, communicators: Communicators, activity: Activity, *, kept: int) -> None:
        self._communicators = communicators
        self._activity = activity
        self._kept = kept
        self._activations: dict[_Hop, _SentMessage] = {}
        self._gradients: defaultdict[int, deque[_SentMessage]] = defaultdict(deque)

    def send(self, operation: Operation, tensor: Tensor) -> None:
        """Start sending the result of `operation`, which is contiguous. Raises CommunicationError."""
        receiver = operation.send_to
        assert receiver is not None
        forward = operation.kind is OperationKind.FORWARD
        gradients = self._gradients[receiver]
        if not forward and len(gradients) >= self._kept:
            with self._activity.waiting(f"worker {receiver} to take the gradient of {gradients[0].operation}"):
                gradients[0].in_flight.wait()
            gradients.popleft()
        in_flight = self._communicators.send(tensor, peer=receiver, tag=_tag_of(operation.micro_batch, forward))
        sent = _SentMessage(operation, tensor, in_flight)
        if forward:
            self._activations[operation.micro_batch, operation.hop] = sent
        else:
            gradients.append(sent)

    def answered(self, operation: Operation) -> None:
        """Release the activation whose gradient `operation`, a B or I, has received."""
        del self._activations[operation.micro_batch, operation.hop]

    def in_flight(self) -> list[_SentMessage]:
        """The messages that are held."""
        return [*self._activations.values(), *(sent for own in self._gradients.values() for sent in own)]


def _tag_of(micro_batch: int, forward: bool) -> int:
    """Return the tag of a message: even for activations, odd for gradients."""
    return 2 * micro_batch + (0 if forward else 1)


def channels_of(worker: int, operations: Sequence[Operation]) -> tuple[Channel, ...]:
    """Return the channels on which a worker's program sends and receives, each once, in order."""
    forward = OperationKind.FORWARD
    received = {Channel(o.receive_from, worker, o.kind is forward) for o in operations if o.receive_from is not None}
    sent = {Channel(worker, o.send_to, o.kind is forward) for o in operations if o.send_to is not None}
    return tuple(sorted(received | sent))


def _middle_of_each_kind(operations: Sequence[Operation]) -> dict[int, str]:
    """Return where in a step the injected failures of the phases "forward" and "backward" happen: half-way through."""
    forwards = [i for i, operation in enumerate(operations) if operation.kind is OperationKind.FORWARD]
    backwards = [i for i, o in enumerate(operations) if o.kind in (OperationKind.BACKWARD, OperationKind.INPUT_GRAD)]
    phases = {"forward": forwards, "backward": backwards}
    return {indices[len(indices) // 2]: phase for phase, indices in phases.items() if indices}
