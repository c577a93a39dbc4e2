"""How much memory each worker needs at its worst moment, by going through its operations one by one.

What a worker holds:

- all the time, for the layers that it holds: parameters, gradients, optimizer state;
- from the F of a hop to its B or I: the activations of the hop's layers, and the hop's output;
- from I to W: what the layers keep for their weight gradients; at the first hop of a route, whose I computes nothing,
  the activations and the gradient that has come in;
- messages: those it has asked for and not yet used; those it has sent, until it may let go of them; gradients handed
  over between two hops of its own;
- while an operation runs: the most that any of its layers works with, the gradient that comes in and the one that goes
  out.

The logits are activations and working bytes of the last layer. While an I runs, activations are all still there and
what it leaves for W comes on top, although part of that is activations: an upper bound. With tensor parallelism all
bytes are those of one rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from chameleon_ft.errors import ConfigError, PlanError
from chameleon_ft.plan import LayerRange, Placement
from chameleon_ft.schedule import Operation, OperationKind, Program
from chameleon_ft.workload import LayerCost, Workload

__all__ = ["MemoryUse", "MessageBuffers", "WorkerMemory", "program_memory"]


@dataclass(frozen=True, slots=True)
class MessageBuffers:
    """How long a runtime holds messages; the defaults are those of this package's own.

    Attributes:
        receives_ahead: receives that are posted, at most, counting the one that the next operation needs.
        sends_kept: the latest sends whose tensors are kept; None keeps all until the step has ended.

    Raises:
        ConfigError: `receives_ahead` below one, or negative `sends_kept`.
    """

    receives_ahead: int = 4
    sends_kept: int | None = None

    def __post_init__(self) -> None:
        if self.receives_ahead < 1:
            raise ConfigError(f"receives_ahead must be at least 1; got {self.receives_ahead}")
        if self.sends_kept is not None and self.sends_kept < 0:
            raise ConfigError(f"sends_kept must be zero or more, or None for all of a step; got {self.sends_kept}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes that a worker holds at one moment, by what they are for; the module's text says what counts as what."""

    param_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int = 0
    weight_grad_bytes: int = 0
    message_bytes: int = 0
    working_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return (
            self.param_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.activation_bytes
            + self.weight_grad_bytes
            + self.message_bytes
            + self.working_bytes
        )


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """The worst moment of a worker: what it holds then, and the operation it is in (None if it runs none)."""

    peak: MemoryUse
    during: Operation | None

    @property
    def peak_bytes(self) -> int:
        """Bytes held at that moment."""
        return self.peak.total_bytes


def program_memory(
    program: Program,
    placement: Placement,
    workload: Workload,
    buffers: MessageBuffers = MessageBuffers(),
) -> Mapping[int, WorkerMemory]:
    """The worst moment of every worker of `placement`, ascending.

    Exact for what the module's text says, whatever the routes: it follows from the order of a worker's own operations.

    Raises:
        PlanError: the workload has another number of layers than the placement.
    """
    if placement.num_layers != len(workload.layers):
        raise PlanError(
            f"{placement.num_layers} layers are placed, but the workload has {len(workload.layers)}; "
            "use the workload of the model that is planned"
        )
    layers = _Layers(workload)
    return {
        worker: _Worker(layers.state_of(placement, worker), layers, buffers, program.of(worker)).worst()
        for worker in placement.workers
    }


class _Layers:
    """Sums over ranges of layers."""

    def __init__(self, workload: Workload) -> None:
        self._costs = workload.layers
        self._working: dict[LayerRange, int] = {}
        self.activations = self._summed(lambda layer: layer.activation_bytes)
        self.weight_grads = self._summed(lambda layer: layer.weight_grad_bytes)
        self._params = self._summed(lambda layer: layer.param_bytes)
        self._gradients = self._summed(lambda layer: layer.gradient_bytes)
        self._optimizer = self._summed(lambda layer: layer.optimizer_bytes)

    def output(self, layer: int) -> int:
        return self._costs[layer].output_bytes

    def working(self, layers: LayerRange) -> int:
        found = self._working.get(layers)
        if found is None:
            found = max(cost.working_bytes for cost in self._costs[layers.start : layers.stop])
            self._working[layers] = found
        return found

    def state_of(self, placement: Placement, worker: int) -> MemoryUse:
        held = placement.ranges_of(worker)
        return MemoryUse(
            param_bytes=sum(map(self._params, held)),
            gradient_bytes=sum(map(self._gradients, held)),
            optimizer_bytes=sum(map(self._optimizer, held)),
        )

    def _summed(self, amount: Callable[[LayerCost], int]) -> Callable[[LayerRange], int]:
        until = list(accumulate(map(amount, self._costs), initial=0))
        return lambda layers: until[layers.stop] - until[layers.start]


class _Worker:
    """A worker on its way through its operations."""

    def __init__(
        self, state: MemoryUse, layers: _Layers, buffers: MessageBuffers, operations: tuple[Operation, ...]
    ) -> None:
        self._state = state
        self._layers = layers
        self._buffers = buffers
        self._operations = operations
        self._activations = self._weight_grads = self._sent = self._handed = 0
        # Sends that are kept, the latest last: bytes, and the hop whose output it is, if it is one.
        self._sends: deque[tuple[int, _Hop | None]] = deque()
        # Outputs among them that are held for their own backward too, and so are counted as activations.
        self._twice: dict[_Hop, int] = {}
        self._worst = WorkerMemory(state, None)
        self._worst_bytes = -1

    def worst(self) -> WorkerMemory:
        receives = _Receives(self._operations, self._layers, self._buffers.receives_ahead)
        for operation in self._operations:
            self._run(operation, receives.outstanding(operation))
        return self._worst

    def _run(self, operation: Operation, waiting: int) -> None:
        match operation.kind:
            case OperationKind.FORWARD:
                self._forward(operation, waiting)
            case OperationKind.INPUT_GRAD if operation.first:
                self._put_off(operation)
            case OperationKind.WEIGHT_GRAD if operation.first:
                self._catch_up(operation, waiting)
            case OperationKind.WEIGHT_GRAD:
                self._compare(operation, waiting)
                self._weight_grads -= self._layers.weight_grads(operation.layers)
            case _:
                self._backward(operation, waiting)

    def _forward(self, operation: Operation, waiting: int) -> None:
        output = self._output_of(operation)
        self._activations += self._layers.activations(operation.layers) + output
        self._compare(operation, waiting)
        if operation.send_to is not None:
            hop = (operation.micro_batch, operation.hop)
            self._twice[hop] = output
            self._keep(output, hop)

    def _backward(self, operation: Operation, waiting: int) -> None:
        layers = operation.layers
        # A gradient is as large as what it is the gradient of.
        incoming = output = self._output_of(operation)
        outgoing = 0 if operation.first else self._layers.output(layers.start - 1)
        if not operation.last and operation.receive_from is None:
            self._handed -= incoming
        if operation.kind is OperationKind.INPUT_GRAD:
            self._weight_grads += self._layers.weight_grads(layers)
        self._compare(operation, waiting + incoming + outgoing)
        self._let_go(operation, output)
        if operation.send_to is not None:
            self._sent += outgoing
            self._keep(outgoing, None)
        elif not operation.first:
            self._handed += outgoing

    def _put_off(self, operation: Operation) -> None:
        """The I of a first hop computes nothing: all stays as it is until W, and the gradient that has come too."""
        incoming = self._output_of(operation)
        if not operation.last and operation.receive_from is None:
            self._handed -= incoming
        self._weight_grads += incoming

    def _catch_up(self, operation: Operation, waiting: int) -> None:
        """The W of a first hop is its whole backward."""
        self._compare(operation, waiting)
        output = self._output_of(operation)
        self._weight_grads -= output
        self._let_go(operation, output)

    def _let_go(self, operation: Operation, output: int) -> None:
        """The activations of a hop are not needed any more; if its output is still kept as sent, that alone holds it."""
        self._activations -= self._layers.activations(operation.layers) + output
        self._sent += self._twice.pop((operation.micro_batch, operation.hop), 0)

    def _output_of(self, operation: Operation) -> int:
        """Bytes of a hop's output, and of the gradient that comes in for it; the last hop's is a loss."""
        return 0 if operation.last else self._layers.output(operation.layers.stop - 1)

    def _keep(self, num_bytes: int, output_of: _Hop | None) -> None:
        """Keep a message that was sent, and let go of the earliest if there are too many."""
        self._sends.append((num_bytes, output_of))
        if self._buffers.sends_kept is not None and len(self._sends) > self._buffers.sends_kept:
            let_go, hop = self._sends.popleft()
            if hop is None or self._twice.pop(hop, None) is None:
                self._sent -= let_go

    def _compare(self, operation: Operation, messages: int) -> None:
        """Remember what is held while `operation` runs if it is more than ever before."""
        state = self._state
        messages += self._sent + self._handed
        working = self._layers.working(operation.layers)
        total = self._activations + self._weight_grads + messages + working
        if total > self._worst_bytes:
            self._worst_bytes = total
            use = MemoryUse(
                param_bytes=state.param_bytes,
                gradient_bytes=state.gradient_bytes,
                optimizer_bytes=state.optimizer_bytes,
                activation_bytes=self._activations,
                weight_grad_bytes=self._weight_grads,
                message_bytes=messages,
                working_bytes=working,
            )
            self._worst = WorkerMemory(use, operation)


_Hop = tuple[int, int]  # (micro-batch, hop)


class _Receives:
    """The messages that a worker has asked for and not yet used."""

    def __init__(self, operations: tuple[Operation, ...], layers: _Layers, ahead: int) -> None:
        sizes = [
            layers.output((o.layers.start if o.kind is OperationKind.FORWARD else o.layers.stop) - 1)
            for o in operations
            if o.receive_from is not None
        ]
        self._until = list(accumulate(sizes, initial=0))
        self._ahead = ahead
        self._used = 0

    def outstanding(self, operation: Operation) -> int:
        """Bytes of those beyond what `operation` itself receives; it is the next one."""
        posted = min(self._used + self._ahead, len(self._until) - 1)
        if operation.receive_from is not None:
            self._used += 1
        return self._until[posted] - self._until[self._used]
