"""Messages that a worker has sent in a step, kept until they are known to have arrived."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

from torch import Tensor

from chameleon_ft.runtime.activity import Activity
from chameleon_ft.runtime.communicators import Communicators, InFlight
from chameleon_ft.schedule import Operation, OperationKind

__all__ = ["SentMessage", "SentMessages", "tag_of"]


@dataclass(frozen=True, slots=True)
class SentMessage:
    """The result of an operation on its way to another worker."""

    operation: Operation
    tensor: Tensor
    in_flight: InFlight


class SentMessages:
    """Sends messages, and holds their tensors for as long as they may not have arrived.

    An activation is held until the gradient that answers it has come. Nothing answers a gradient: of each receiver the
    latest `kept` are held, and before another one is sent the earliest of them must have arrived. A receive is posted
    by its operation at the latest, and programs are checked not to deadlock if a worker blocks with a single message
    under way on a channel. So waiting here cannot deadlock.
    """

    def __init__(self, communicators: Communicators, activity: Activity, *, kept: int) -> None:
        self._communicators = communicators
        self._activity = activity
        self._kept = kept
        self._activations: dict[tuple[int, int], SentMessage] = {}
        self._gradients: defaultdict[int, deque[SentMessage]] = defaultdict(deque)

    def send(self, operation: Operation, tensor: Tensor) -> None:
        """Start sending what `operation` has made of contiguous memory to its receiver. Raises CommunicationError."""
        assert operation.send_to is not None
        forward = operation.kind is OperationKind.FORWARD
        if not forward:
            self._make_room(operation.send_to)
        in_flight = self._communicators.send(tensor, peer=operation.send_to, tag=tag_of(operation.micro_batch, forward))
        sent = SentMessage(operation, tensor, in_flight)
        if forward:
            self._activations[operation.micro_batch, operation.hop] = sent
        else:
            self._gradients[operation.send_to].append(sent)

    def answered(self, operation: Operation) -> None:
        """Let go of the activation that the gradient which `operation`, a B or I, has received is the answer to."""
        del self._activations[operation.micro_batch, operation.hop]

    def under_way(self) -> list[SentMessage]:
        """The messages that are held."""
        return [*self._activations.values(), *(sent for own in self._gradients.values() for sent in own)]

    def _make_room(self, receiver: int) -> None:
        gradients = self._gradients[receiver]
        if len(gradients) < self._kept:
            return
        with self._activity.waiting(f"worker {receiver} to take the gradient of {gradients[0].operation}"):
            gradients[0].in_flight.wait()
        gradients.popleft()


def tag_of(micro_batch: int, forward: bool) -> int:
    """The tag of a message: even for activations, odd for gradients."""
    return 2 * micro_batch + (0 if forward else 1)
