"""Sends the results of operations, and holds them for as long as they may have to be sent again."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection

from torch import Tensor

from chameleon_ft.estimate import MessageBuffers
from chameleon_ft.runtime.activity import Activity
from chameleon_ft.runtime.communicators import Communicators
from chameleon_ft.runtime.communicators.tags import tag_of
from chameleon_ft.runtime.execution.step_state import Result, StepState


class SentMessages:
    """Sends results of operations, and holds them in `state` until their receivers have certainly used them.

    An activation whose gradient comes back is held until then. Nothing answers other messages, which are gradients and,
    in the rest of a step, some activations: those without a gradient, and those whose gradient is sent again, maybe
    before they are used. Of these, the latest `sends_kept` of each receiver are held, and only `sends_in_flight` may be
    on their way; see there why this is enough. The wait for the earliest of them cannot deadlock: a receive is posted
    by its operation at the latest, and a checked program does not deadlock even if a worker blocks with a single
    message in flight on a channel. Results that are sent again may be taken in any order: nothing waits for them, and
    those to which nothing answers are held until the step ends.

    Args:
        answered: activations whose gradient comes back.
        num_layers: of the model.
    """

    def __init__(
        self,
        state: StepState,
        communicators: Communicators,
        activity: Activity,
        *,
        buffers: MessageBuffers,
        answered: Collection[Result],
        num_layers: int,
    ) -> None:
        self._state = state
        self._communicators = communicators
        self._activity = activity
        self._buffers = buffers
        self._answered = answered
        self._num_layers = num_layers
        self._unanswered: defaultdict[tuple[bool, int], deque[Result]] = defaultdict(deque)

    def send(self, result: Result, tensor: Tensor, *, receiver: int) -> None:
        """Start sending a contiguous tensor, once not too many others are on their way. Raises CommunicationError."""
        # Before anything can fail: the operation counts as run, so its result must not be lost.
        self._state.results[result] = tensor
        if result not in self._answered:
            sent = self._unanswered[result[0], receiver]
            sent.append(result)
            if len(sent) > self._buffers.sends_in_flight:
                self._wait_for(sent[-1 - self._buffers.sends_in_flight], receiver)
            while len(sent) > self._buffers.sends_kept:
                self.release(sent.popleft())
        self._start(result, tensor, receiver)

    def send_again(self, result: Result, *, receiver: int) -> None:
        """Start sending a result that is held, without waiting. Raises CommunicationError."""
        tensor = self._state.results[result] = self._state.results[result].contiguous()
        self._start(result, tensor, receiver)

    def release(self, result: Result) -> None:
        """Release a result, if it is held: its receiver has used it."""
        self._state.results.pop(result, None)
        self._state.in_flight.pop(result, None)

    def _wait_for(self, result: Result, receiver: int) -> None:
        forward, micro_batch, _ = result
        kind = "activation" if forward else "gradient"
        doing = f"worker {receiver} to take the {kind} of micro-batch {micro_batch}"
        with self._activity.waiting(doing, for_message=True, peer=receiver):
            self._state.in_flight[result].wait()

    def _start(self, result: Result, tensor: Tensor, receiver: int) -> None:
        tag = tag_of(result, num_layers=self._num_layers)
        self._state.in_flight[result] = self._communicators.send(tensor, peer=receiver, tag=tag)
