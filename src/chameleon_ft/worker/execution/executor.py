"""Runs a worker's program for one step. It knows operations and messages, and nothing of plans or policies.

It holds the results of operations that it has sent for as long as they may have to be sent again.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Final

import torch
from torch import Tensor

from chameleon_ft.cost.memory import MessageBuffers
from chameleon_ft.errors import ConfigError
from chameleon_ft.job.job import sample_count
from chameleon_ft.keys import generator_lock
from chameleon_ft.models.precision import loss_and_terms, terms_of
from chameleon_ft.schedule import Operation, OperationKind
from chameleon_ft.trees import BoundarySpec, leaves_of
from chameleon_ft.worker.communicators.base import Communicators, InFlight, tag_of
from chameleon_ft.worker.context import RankContext
from chameleon_ft.worker.control_client import Activity
from chameleon_ft.worker.device import wait_for_stream
from chameleon_ft.worker.execution.backward import SavedActivations
from chameleon_ft.worker.execution.bad_steps import Repetition, noting
from chameleon_ft.worker.execution.layers import NO_FIELDS, HeldLayers
from chameleon_ft.worker.execution.micro_batches import (
    MicroBatch,
    MicroBatches,
    reads_samples,
    uses_inputs,
    without_rows,
)
from chameleon_ft.worker.execution.steps import CountedLoss, Result, StepState, StepStats, hop_of


class SentMessages:
    """Sends results of operations, and holds them in `state` until their receivers have certainly used them.

    An activation whose gradient comes back is held until then. Nothing answers other messages, which are gradients and,
    in the rest of a step, some activations: those without a gradient, and those whose gradient is sent again, maybe
    before they are used. Of these, the latest `sends_kept` of each receiver are held, and only `sends_in_flight` may be
    on their way; see there why this is enough. The wait for the earliest of them cannot deadlock: a receive is posted
    by its operation at the latest, and a checked program does not deadlock even if a worker blocks with a single
    message in flight on a channel. Results that are sent again may be taken in any order: nothing waits for them, and
    those to which nothing answers are held until the step ends.
    """

    def __init__(
        self,
        state: StepState,
        communicators: Communicators,
        activity: Activity,
        *,
        buffers: MessageBuffers,
        answered: Collection[Result],
        tag_of: Callable[[Result], int],
    ) -> None:
        self._state = state
        self._communicators = communicators
        self._activity = activity
        self._buffers = buffers
        self._answered = answered
        self._tag_of = tag_of
        self._unanswered: defaultdict[tuple[bool, int], deque[Result]] = defaultdict(deque)

    def send(self, result: Result, tensors: Sequence[Tensor], *, receiver: int) -> None:
        """Start sending contiguous tensors, once not too many results are on their way. Raises CommunicationError."""
        # Before anything can fail: the operation counts as run, so its result must not be lost.
        self._state.results[result] = tensors
        if result not in self._answered:
            sent = self._unanswered[result[0], receiver]
            sent.append(result)
            if len(sent) > self._buffers.sends_in_flight:
                forward, micro_batch, _ = before = sent[-1 - self._buffers.sends_in_flight]
                kind = "activation" if forward else "gradient"
                doing = f"worker {receiver} to take the {kind} of micro-batch {micro_batch}"
                with self._activity.waiting(doing, for_message=True, peer=receiver):
                    self._state.in_flight[before].wait()
            while len(sent) > self._buffers.sends_kept:
                self.release(sent.popleft())
        self._start(result, tensors, receiver)

    def send_again(self, result: Result, *, receiver: int) -> None:
        """Start sending a result that is held, without waiting. Raises CommunicationError."""
        tensors = self._state.results[result] = [each.contiguous() for each in self._state.results[result]]
        self._start(result, tensors, receiver)

    def release(self, result: Result) -> None:
        """Release a result, if it is held: its receiver has used it."""
        self._state.results.pop(result, None)
        self._state.in_flight.pop(result, None)

    def _start(self, result: Result, tensors: Sequence[Tensor], receiver: int) -> None:
        tag = self._tag_of(result)
        self._state.in_flight[result] = Together(
            [self._communicators.send(tensor, peer=receiver, tag=tag) for tensor in tensors]
        )


@dataclass(frozen=True, slots=True)
class Together:
    """The messages of the tensors of one result, of which each has one, in order and under one tag."""

    messages: Sequence[InFlight]

    def wait(self) -> None:
        """See `InFlight`."""
        for message in self.messages:
            message.wait()


# The memory estimate goes by these, too.
_BUFFERS: Final = MessageBuffers()

_OPERATIONS: Final = {
    OperationKind.FORWARD: "the forward",
    OperationKind.BACKWARD: "the backward",
    OperationKind.INPUT_GRAD: "the input gradient",
    OperationKind.WEIGHT_GRAD: "the weight gradient",
}
_BACKWARDS: Final = (OperationKind.BACKWARD, OperationKind.INPUT_GRAD)

Measure = Callable[[int, Any, Any], None]
"""Takes the output of the last layer, and the targets, of a micro-batch by its number."""

Resend = tuple[int, int, bool, int]
"""(micro-batch, layer, forward, receiver) of a message that is sent again, as in `Rest`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Executor:
    """Executes programs on the layers a rank holds.

    Per operation: read its samples, wait for its message, compute, start sending the result. A message crosses while
    its receiver computes only if its receive has been posted, so receives are posted a few ahead, in program order.
    Only too many sends in flight are waited for (`SentMessages`). A checked program cannot deadlock this way.
    """

    rank: RankContext
    held: HeldLayers
    micro_batches: MicroBatches
    communicators: Communicators
    await_parameters: Callable[[Collection[int]], None] = lambda layers: None

    def run(
        self,
        state: StepState,
        operations: Sequence[Operation],
        *,
        after: Callable[[int], None],
        repetition: Repetition | None = None,
    ) -> StepStats:
        """Run all operations of a new step in order, accumulating gradients.

        Hold `state` until the step's vote is complete, because messages may still be on their way. If the step is
        interrupted, it is what `resume` continues from.

        Args:
            after: is called with the number of operations that have been run: 0 before the first, and after each.
            repetition: looks at all that they compute, if the step was bad when it was computed before.

        Raises:
            CommunicationError: the generation is over.
            ConfigError: a result has another shape or type than its receiver expects.
        """
        fault_at = _middle_of_each_kind(operations)
        return _StepExecution(self, state, operations, fault_at, repetition=repetition).run(after)

    def resume(
        self,
        state: StepState,
        operations: Sequence[Operation],
        *,
        resends: Sequence[Resend],
        resent_gradients: Collection[tuple[int, int]] = (),
        counted: Collection[int],
        after: Callable[[int], None],
    ) -> StepStats:
        """Continue an interrupted step with the program of its rest; the sums of the result are those of the step.

        What the program does not need of `state` is released.

        Args:
            resends: (micro-batch, layer, forward, receiver) of the results that other workers are sent again first.
            resent_gradients: (micro-batch, layer) of those gradients that this worker is sent again.
            counted: micro-batches whose loss some worker has counted.
            after: See `run`.

        Raises:
            CommunicationError: the generation is over; `state` can be resumed again.
        """
        fault_at = {len(operations) // 2: "rest"}
        execution = _StepExecution(self, state, operations, fault_at, counted, resent_gradients, is_rest=True)
        execution.send_again(resends)
        stats = execution.run(after)
        # The reads for the parts that were done before the interruption are not known any more. No sample was left out.
        stats.draws = len(stats.left_out)
        return stats

    def evaluate(
        self, state: StepState, operations: Sequence[Operation], *, measure: Measure, after: Callable[[int], None]
    ) -> StepStats:
        """Run a program of forwards without gradients; `state` is that of an evaluation after step ``state.step``.

        Hold `state` until all workers have run theirs, because messages may still be on their way.

        Args:
            measure: is called with each output of the last layer.
            after: See `run`.

        Raises:
            CommunicationError: the generation is over.
        """
        fault_at = {len(operations) // 2: "evaluation"}
        with torch.no_grad():
            return _StepExecution(self, state, operations, fault_at, measure=measure).run(after)


class _StepExecution:
    """Runs a program on the state of a step, with the messages of one generation.

    The program of the rest of a step lacks operations. What they would have used is not saved.
    """

    def __init__(
        self,
        executor: Executor,
        state: StepState,
        operations: Sequence[Operation],
        fault_at: Mapping[int, str],
        counted: Collection[int] = (),
        resent_gradients: Collection[tuple[int, int]] = (),
        repetition: Repetition | None = None,
        measure: Measure | None = None,
        *,
        is_rest: bool = False,
    ) -> None:
        self._executor = executor
        self._measure = measure
        self._part = f"step {state.step}" if measure is None else f"the evaluation after step {state.step}"
        self._repetition = repetition
        self._state = state
        self._operations = operations
        self._fault_at = fault_at
        self._counted = counted
        self._stats = StepStats()
        state.spans = self._stats.spans
        self._backwards = {hop_of(o) for o in operations if o.kind in _BACKWARDS}
        self._weights = {hop_of(o) for o in operations if o.kind is OperationKind.WEIGHT_GRAD}
        # Results that this worker's own operations use, and activations that are answered by another worker: with a
        # gradient that is made from them, and not one that is sent again.
        self._used_here = {_input_of(o) for o in operations if o.receive_from is None}
        self._answered = {
            (True, o.micro_batch, o.layers.stop - 1)
            for o in operations
            if o.kind in _BACKWARDS and o.receive_from is not None and self._returned(o.layers.stop - 1)
        } - {(True, micro_batch, layer - 1) for micro_batch, layer in resent_gradients}
        self._receive_of_index: dict[int, tuple[InFlight, list[Tensor]]] = {}
        self._tag_of = partial(tag_of, num_layers=len(executor.rank.boundaries), is_rest=is_rest)
        self._to_post = deque(i for i, operation in enumerate(operations) if operation.receive_from is not None)
        self._sent = SentMessages(
            state,
            executor.communicators,
            executor.rank.activity,
            buffers=_BUFFERS,
            answered=self._answered,
            tag_of=self._tag_of,
        )

    def send_again(self, resends: Sequence[Resend]) -> None:
        again = {(forward, micro_batch, layer): receiver for micro_batch, layer, forward, receiver in resends}
        self._state.keep_for(self._operations, self._used_here | self._answered | again.keys())
        for result, receiver in again.items():
            self._sent.send_again(result, receiver=receiver)

    def run(self, after: Callable[[int], None]) -> StepStats:
        after(0)
        for index, operation in enumerate(self._operations):
            self._fail_if_planned(index)
            self._run_operation(index, operation)
            after(index + 1)
        if not self._operations:
            self._fail_if_planned(0)
        losses = self._state.losses.values()
        self._stats.data_wait_s = self._executor.micro_batches.wait_s
        self._stats.loss = self._state.loss
        self._stats.terms = math.fsum(loss.terms for loss in losses)
        self._stats.samples = sum(loss.samples for loss in losses)
        return self._stats

    def _fail_if_planned(self, index: int) -> None:
        if index in self._fault_at:
            self._executor.rank.faults.at(self._fault_at[index], self._state.step)

    def _run_operation(self, index: int, operation: Operation) -> None:
        if reads_samples(operation, self._executor.rank.job):
            self._executor.micro_batches(self._state.step, operation.micro_batch)
        message = self._message(index, operation)
        if operation.kind is OperationKind.FORWARD:
            self._executor.await_parameters(operation.layers)
        self._executor.rank.activity.begin(f"{_describe(operation)} in {self._part}")
        start = perf_counter()
        # A loss may draw random numbers, and so may what a backward computes again.
        with noting(f"in {_describe(operation)}"), generator_lock:
            tensors = self._compute(operation, message)
        # Or the time would be that of queueing the operation.
        wait_for_stream(self._executor.rank.device)
        if self._executor.rank.pace is not None:
            self._executor.rank.pace(operation, start)
        self._executor.rank.faults.slow_down(start)
        self._stats.spans.append((operation.kind, start, perf_counter()))
        if self._repetition is not None:
            self._examine(self._repetition, operation, message, tensors)
        if tensors is None:
            return
        forward = operation.kind is OperationKind.FORWARD
        layer = operation.layers.stop - 1 if forward else operation.layers.start
        result = forward, operation.micro_batch, layer
        if operation.send_to is not None:
            # The receiver's buffer is a boundary.
            boundary = layer if forward else layer - 1
            for spec, tensor in zip(self._sent_over(boundary, forward=forward), tensors, strict=True):
                spec.require(tensor, layer=boundary, gradient=not forward)
            self._sent.send(result, [tensor.contiguous() for tensor in tensors], receiver=operation.send_to)
            if tensors:
                self._stats.note_sent(operation.send_to, forward=forward)
        elif result in self._used_here:
            self._state.results[result] = tensors

    def _sent_over(self, layer: int, *, forward: bool) -> Sequence[BoundarySpec]:
        """Return the tensors that are sent over the boundary behind a layer, one by one."""
        spec = self._executor.rank.boundaries[layer]
        return spec.leaves if forward else [spec.leaves[number] for number in self._returned(layer)]

    def _returned(self, layer: int) -> Sequence[int]:
        """Return the numbers of the tensors behind a layer whose gradients come back; none if it ends no trained part.

        Then no message is sent, and the backward before it is an operation without work, which waits for nothing.
        """
        is_needed = layer >= self._executor.held.first_trained
        return self._executor.rank.boundaries[layer].returned if is_needed else ()

    def _examine(
        self,
        repetition: Repetition,
        operation: Operation,
        received: Sequence[Tensor] | None,
        result: Sequence[Tensor] | None,
    ) -> None:
        micro_batch, layers, executor = operation.micro_batch, operation.layers, self._executor
        if operation.kind is not OperationKind.FORWARD:
            gradients = {
                layer: [each.grad for each in executor.held.parameters([layer]) if each.grad is not None]
                for layer in layers
            }
            repetition.backward(micro_batch, layers, received=received or (), result=result or (), gradients=gradients)
            return
        data: list[Tensor] = []
        if reads_samples(operation, executor.rank.job):
            read = executor.micro_batches(self._state.step, micro_batch)
            used = uses_inputs(operation, executor.rank.job), operation.last
            data = leaves_of([each for each, is_used in zip(read, used, strict=False) if is_used])
        output = [self._state.losses[micro_batch].value] if operation.last else result
        assert output is not None
        repetition.forward(micro_batch, layers, data=data, received=received or (), result=output)

    def _message(self, index: int, operation: Operation) -> Sequence[Tensor] | None:
        """Return the operation's incoming tensors: activations, or gradients; None where nothing comes in."""
        while self._to_post and (len(self._receive_of_index) < _BUFFERS.receives_ahead or self._to_post[0] <= index):
            self._post(self._to_post.popleft())
        if operation.receive_from is None:
            return self._state.results.pop(_input_of(operation), None)
        receive, tensors = self._receive_of_index.pop(index)
        if not tensors:
            return tensors
        doing = f"the input of {_describe(operation)} from worker {operation.receive_from}"
        with self._executor.rank.activity.waiting(doing, for_message=True, peer=operation.receive_from):
            since_s = perf_counter()
            receive.wait()
        forward = operation.kind is OperationKind.FORWARD
        self._stats.note_arrived(operation.receive_from, forward=forward, waited_since_s=since_s)
        sent = True, operation.micro_batch, operation.layers.stop - 1
        if operation.kind in _BACKWARDS and sent in self._answered:
            self._sent.release(sent)
        return tensors

    def _post(self, index: int) -> None:
        operation = self._operations[index]
        assert operation.receive_from is not None
        forward = operation.kind is OperationKind.FORWARD
        boundary = operation.layers.start - 1 if forward else operation.layers.stop - 1
        specs = self._sent_over(boundary, forward=forward)
        tensors = [self._made(torch.empty, spec, operation.micro_batch) for spec in specs]
        tag = self._tag_of(_input_of(operation))
        receive = self._executor.communicators.receive
        messages = [receive(tensor, peer=operation.receive_from, tag=tag) for tensor in tensors]
        self._receive_of_index[index] = (Together(messages), tensors)

    def _compute(self, operation: Operation, message: Sequence[Tensor] | None) -> Sequence[Tensor] | None:
        """Compute, and return what the next hop needs: activations, or gradients; None where there are none."""
        hop, state, executor = hop_of(operation), self._state, self._executor
        match operation.kind:
            case OperationKind.FORWARD:
                return self._forward(operation, message)
            case OperationKind.WEIGHT_GRAD:
                state.deferred.pop(hop)()
                state.contributed.add(hop)
                return None
            case OperationKind.BACKWARD:
                gradients = state.saved.pop(hop).backward(self._gradients(operation, message))
                state.contributed.add(hop)
            case OperationKind.INPUT_GRAD:
                saved = state.saved.pop(hop)
                gradients, weight_half = saved.input_gradient(self._gradients(operation, message))
                if hop in self._weights:
                    state.deferred[hop] = weight_half
        if operation.first:
            return None
        # The hop before gets gradients even of layers that do not depend on their input.
        spec, made = executor.rank.boundaries[operation.layers.start - 1], list[Tensor]()
        for number in self._returned(operation.layers.start - 1):
            gradient = gradients[number]
            leaf = spec.leaves[number]
            made.append(self._made(torch.zeros, leaf, operation.micro_batch) if gradient is None else gradient)
        return made

    def _gradients(self, operation: Operation, message: Sequence[Tensor] | None) -> Sequence[Tensor | None]:
        """Return the gradients of all tensors of an operation's output, of which some came in; None of the loss."""
        if message is None:
            return [None]
        spec = self._executor.rank.boundaries[operation.layers.stop - 1]
        found: list[Tensor | None] = [None] * len(spec.leaves)
        for number, gradient in zip(self._returned(operation.layers.stop - 1), message, strict=True):
            found[number] = gradient
        return found

    def _forward(self, operation: Operation, message: Sequence[Tensor] | None) -> Sequence[Tensor] | None:
        executor, step, fields = self._executor, self._state.step, NO_FIELDS
        if uses_inputs(operation, executor.rank.job):
            read = executor.micro_batches(step, operation.micro_batch)
            fields = read.fields
            self._note_left_out(operation.micro_batch, read, is_compared=operation.first)
        if operation.first:
            boundary = read.input_of(executor.rank.job)
            self._stats.draws += read.digest
        else:
            assert message is not None
            spec = executor.rank.boundaries[operation.layers.start - 1]
            leaves = zip(message, spec.leaves, strict=True)
            is_trained = operation.layers.start > executor.held.first_trained
            given = [each.detach().requires_grad_(leaf.has_gradient and is_trained) for each, leaf in leaves]
            boundary = spec.unflatten(given)
        # With a graph even if no backward follows: without one torch may choose other kernels, with other last bits.
        saved = SavedActivations(
            executor.held,
            operation,
            step=step,
            num_layers=len(executor.rank.boundaries),
            fields=fields,
            terms=lambda: terms_of(executor.rank.job, executor.micro_batches(step, operation.micro_batch).counted),
        )
        output = saved.forward(boundary)
        if hop_of(operation) in self._backwards:
            self._state.saved[hop_of(operation)] = saved
        if operation.last:
            saved.end_in(self._loss(operation.micro_batch, output))
            return None
        return [leaf.detach() for leaf in leaves_of(output)]

    def _loss(self, micro_batch: int, output: Any) -> Tensor:
        read = self._executor.micro_batches(self._state.step, micro_batch)
        self._stats.draws -= read.digest
        self._note_left_out(micro_batch, read, is_compared=True)
        if read.left_out:
            count, rows = sample_count(read.targets), [len(leaf) if leaf.ndim else 0 for leaf in leaves_of(output)]
            if other := [number for number in rows if number != count]:
                raise ConfigError(
                    f"a sample is to be left out (loading.on_error), but the last layer returns {other[0]} rows for "
                    f"{count} samples; let it return a row for each"
                )
        output, targets = without_rows(output, read.left_out), read.counted
        with noting("in the loss"):
            loss, terms = loss_and_terms(self._executor.rank.job, output, targets)
        if micro_batch not in self._counted:
            # Some losses are a view of all their terms.
            value = loss.detach().clone()
            self._state.losses[micro_batch] = CountedLoss(value, terms, sample_count(targets))
        if self._measure is not None:
            self._measure(micro_batch, output, targets)
        return loss

    def _note_left_out(self, micro_batch: int, read: MicroBatch, *, is_compared: bool) -> None:
        """Note which samples of a micro-batch are left out; `is_compared`: its digest is among the draws."""
        self._stats.left_out.update((micro_batch, row) for row in read.left_out)
        if not is_compared and any(read.left_out.values()):
            # The workers of the first layer and of the loss may have read them.
            self._stats.draws += 1

    def _made(self, make: Callable[..., Tensor], spec: BoundarySpec, micro_batch: int) -> Tensor:
        bucket = self._executor.micro_batches.bucket(self._state.step, micro_batch)
        return make((spec.shapes or (spec.shape,))[bucket], dtype=spec.dtype, device=self._executor.rank.device)


def _describe(operation: Operation) -> str:
    layers = f"layers {operation.layers.start}-{operation.layers.stop - 1}"
    return f"{_OPERATIONS[operation.kind]} of micro-batch {operation.micro_batch} in {layers}"


def _input_of(operation: Operation) -> Result:
    """Return the result that an operation uses: of the hop before, or of the hop after. W uses none."""
    forward, layers = operation.kind is OperationKind.FORWARD, operation.layers
    return forward, operation.micro_batch, layers.start - 1 if forward else layers.stop


def _middle_of_each_kind(operations: Sequence[Operation]) -> dict[int, str]:
    """Return where in a step the injected failures of the phases "forward" and "backward" happen: half-way through."""
    forwards = [i for i, operation in enumerate(operations) if operation.kind is OperationKind.FORWARD]
    backwards = [i for i, o in enumerate(operations) if o.kind in _BACKWARDS]
    phases = {"forward": forwards, "backward": backwards}
    return {indices[len(indices) // 2]: phase for phase, indices in phases.items() if indices}
