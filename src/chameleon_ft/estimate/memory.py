"""How much memory each worker needs at its worst moment, by going through its operations one by one.

What a worker holds:

- all the time, for the layers that it holds: parameters, gradients, optimizer state, and the samples kept at hand;
- from the F of a hop to its B or I: the activations of the hop's layers, and the hop's output, which is one tensor with
  the input of the next hop if that is on the same worker, up to that one's I;
- from I to W: what the layers keep for their weight gradients, the gradient that came in among it; at the first hop of
  a route, whose I computes nothing, the activations and the gradient that has come in;
- messages: those it has asked for and not yet used; those it has sent, until it may let go of them; gradients handed
  over between two hops of its own, until the lower has used them and the upper's W is done; and the gradient that came
  in for a B, until the next operation has what it waits for.

While an operation runs, it goes through its layers one by one, and each works with `working_bytes` on top:

- F upwards: activations of the layers so far, and the output of the one that runs;
- B downwards: activations of the layers that are left, the hop's output and the gradient that came in until the
  end, and the gradients between which the layer that runs stands;
- I downwards: all activations, what the layers so far leave for W, and the gradient that the one that runs makes. A
  layer that leaves at least as much as its activations leaves these too, as in this package's runtime; where it leaves
  less, both are counted, although they may share tensors: an upper bound;
- W: what the layers have kept.

A worker that recomputes keeps of the activations of a layer only its input. The rest is there while the layer's own F
runs, and with the output again while its B or I does; an I that leaves the activations for W makes them there.

Vote and update come when there are no activations any more, and are not looked at. The logits are activations and
working bytes of the last layer. With tensor parallelism all bytes are those of one rank.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from chameleon_ft.errors import ConfigError, PlanError
from chameleon_ft.estimate._receives import Receives
from chameleon_ft.plan import LayerRange, Placement
from chameleon_ft.schedule import Operation, OperationKind, Program
from chameleon_ft.workload import Workload, is_recomputed

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
    sample_bytes: int = 0
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
            + self.sample_bytes
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
    layers_if: dict[bool, _Layers] = {}
    memory: dict[int, WorkerMemory] = {}
    for worker in placement.workers:
        operations = program.of(worker)
        recompute = any(operation.recompute for operation in operations)
        if recompute not in layers_if:
            layers_if[recompute] = _Layers(workload, recompute=recompute)
        layers = layers_if[recompute]
        memory[worker] = _Worker(layers.state_of(placement, worker), layers, buffers, operations).worst()
    return memory


@dataclass(frozen=True, slots=True)
class _Moment:
    """What an operation needs while one of its layers runs, the activations of its hop included."""

    activation_bytes: int = 0
    weight_grad_bytes: int = 0
    message_bytes: int = 0
    working_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.activation_bytes + self.weight_grad_bytes + self.message_bytes + self.working_bytes


class _Layers:
    """What ranges of layers need, on a worker that recomputes or one that does not."""

    def __init__(self, workload: Workload, *, recompute: bool) -> None:
        self._costs = workload.layers
        # Of each layer, the activations that are kept, and those that are there while it runs.
        self._kept = [layer.activation_bytes for layer in (workload.recomputed() if recompute else workload).layers]
        self._rest = [
            max(0, layer.activation_bytes - kept) for layer, kept in zip(self._costs, self._kept, strict=True)
        ]
        self._runs_again = [recompute and is_recomputed(layer, len(self._costs)) for layer in range(len(self._costs))]
        self._moments: dict[tuple[OperationKind, LayerRange], _Moment] = {}
        self.activations = _summed(self._kept)
        self.weight_grads = _summed(layer.weight_grad_bytes for layer in self._costs)
        # Of the activations, what is still there in what I leaves for W.
        self._left = _summed(
            kept if layer.weight_grad_bytes >= kept else 0 for layer, kept in zip(self._costs, self._kept, strict=True)
        )
        self._params = _summed(layer.param_bytes for layer in self._costs)
        self._gradients = _summed(layer.gradient_bytes for layer in self._costs)
        self._optimizer = _summed(layer.optimizer_bytes for layer in self._costs)

    def output(self, layer: int) -> int:
        """Bytes of a layer's output and of its gradient; none before the first, and the last one's is a loss."""
        return self._costs[layer].output_bytes if 0 <= layer < len(self._costs) - 1 else 0

    def worst(self, kind: OperationKind, layers: LayerRange) -> _Moment:
        """The worst moment of an operation, without messages that come in or wait."""
        key = kind, layers
        if key not in self._moments:
            moments = (self._moment(kind, layers, running) for running in layers)
            self._moments[key] = max(moments, key=lambda moment: moment.total_bytes)
        return self._moments[key]

    def state_of(self, placement: Placement, worker: int) -> MemoryUse:
        held = placement.ranges_of(worker)
        return MemoryUse(
            param_bytes=sum(map(self._params, held)),
            gradient_bytes=sum(map(self._gradients, held)),
            optimizer_bytes=sum(map(self._optimizer, held)),
            # Inputs and targets are kept together, by whoever needs one of them.
            sample_bytes=max((self._costs[layer].sample_bytes for layers in held for layer in layers), default=0),
        )

    def _moment(self, kind: OperationKind, layers: LayerRange, running: int) -> _Moment:
        cost = self._costs[running]
        below, through = LayerRange(layers.start, running + 1), LayerRange(running, layers.stop)
        made = self.output(running - 1)  # the gradient of its input
        outgoing = made if running == layers.start else 0
        again = cost.output_bytes if self._runs_again[running] else 0
        match kind:
            case OperationKind.FORWARD:
                activations = self.activations(below) + self.output(running)
                return _Moment(activation_bytes=activations, working_bytes=cost.working_bytes + self._rest[running])
            case OperationKind.BACKWARD:
                from_above = 0 if running + 1 == layers.stop else self.output(running)
                return _Moment(
                    activation_bytes=self.activations(below) + self.output(layers.stop - 1),
                    message_bytes=outgoing,
                    working_bytes=cost.working_bytes + again + self._rest[running] + from_above + made - outgoing,
                )
            case OperationKind.INPUT_GRAD:
                apart = self.activations(layers) - self._left(through)
                rest = 0 if cost.weight_grad_bytes >= cost.activation_bytes else self._rest[running]
                return _Moment(
                    activation_bytes=apart + self.output(layers.stop - 1),
                    weight_grad_bytes=self.weight_grads(through),
                    message_bytes=outgoing,
                    working_bytes=cost.working_bytes + again + rest + made - outgoing,
                )
            case OperationKind.WEIGHT_GRAD:
                return _Moment(weight_grad_bytes=self.weight_grads(layers), working_bytes=cost.working_bytes)


def _summed(amounts: Iterable[int]) -> Callable[[LayerRange], int]:
    """Sums over ranges of layers, of the amounts of each."""
    until = list(accumulate(amounts, initial=0))
    return lambda layers: until[layers.stop] - until[layers.start]


_Hop = tuple[int, int]  # (micro-batch, hop)


class _Worker:
    """A worker on its way through its operations."""

    def __init__(
        self, state: MemoryUse, layers: _Layers, buffers: MessageBuffers, operations: tuple[Operation, ...]
    ) -> None:
        self._state = state
        self._layers = layers
        self._buffers = buffers
        self._operations = operations
        self._activations = self._weight_grads = self._sent = self._handed = self._used = 0
        # Inputs of hops that are the output of the hop before, on this worker too, and counted there.
        self._shared: dict[_Hop, int] = {}
        # How many operations will yet use the gradient that a hop has handed over.
        self._uses: dict[_Hop, int] = {}
        # Sends that are kept, the latest last: bytes, and the hop whose output it is, if it is one.
        self._sends: deque[tuple[int, _Hop | None]] = deque()
        # Outputs among them that are held for their own backward too, and so are counted as activations.
        self._twice: dict[_Hop, int] = {}
        self._worst = WorkerMemory(state, None)
        self._worst_bytes = -1

    def worst(self) -> WorkerMemory:
        receives = Receives(self._operations, self._layers.output, self._buffers.receives_ahead)
        for operation in self._operations:
            self._compare(operation, _NOTHING, receives.posted() + self._used)
            self._used = 0
            self._run(operation, receives.left(operation))
        return self._worst

    def _run(self, operation: Operation, waiting: int) -> None:
        match operation.kind:
            case OperationKind.FORWARD:
                self._forward(operation, waiting)
            case OperationKind.BACKWARD:
                self._backward(operation, waiting)
            case OperationKind.INPUT_GRAD if operation.first:
                # It computes nothing: all stays as it is until W, and the gradient that has come too.
                self._weight_grads += self._received(operation)
            case OperationKind.INPUT_GRAD:
                self._input_grad(operation, waiting)
            case OperationKind.WEIGHT_GRAD if operation.first:
                self._weight_grads -= self._received(operation)
                self._backward(operation, waiting)
            case OperationKind.WEIGHT_GRAD:
                self._weight_grad(operation, waiting)

    def _forward(self, operation: Operation, waiting: int) -> None:
        hop, output = _hop(operation), self._layers.output(operation.layers.stop - 1)
        if operation.receive_from is None:
            self._shared[hop] = self._layers.output(operation.layers.start - 1)
        self._compute(operation, OperationKind.FORWARD, waiting)
        self._activations += self._activations_of(operation)
        if operation.send_to is not None:
            self._twice[hop] = output
            self._keep(output, hop)

    def _backward(self, operation: Operation, waiting: int) -> None:
        """A B, or the W of a first hop, which is one."""
        self._activations -= self._activations_of(operation)
        incoming = self._received(operation)
        self._compute(operation, OperationKind.BACKWARD, waiting + incoming)
        self._used = incoming if operation.receive_from is not None else 0
        self._pass_on(operation, uses=1)

    def _input_grad(self, operation: Operation, waiting: int) -> None:
        self._activations -= self._activations_of(operation)
        self._shared.pop(_hop(operation), None)
        self._compute(operation, OperationKind.INPUT_GRAD, waiting)
        self._weight_grads += self._layers.weight_grads(operation.layers)
        # What waits for W keeps the input, and with it the input's gradient.
        self._pass_on(operation, uses=2)

    def _weight_grad(self, operation: Operation, waiting: int) -> None:
        self._weight_grads -= self._layers.weight_grads(operation.layers)
        self._compute(operation, OperationKind.WEIGHT_GRAD, waiting)
        self._use(_hop(operation), self._layers.output(operation.layers.start - 1))

    def _pass_on(self, operation: Operation, *, uses: int) -> None:
        """A hop's backward is done: its activations are not needed any more, and its gradient goes on."""
        hop, layers = _hop(operation), operation.layers
        self._shared.pop(hop, None)
        # An output that is still kept as sent is held by that alone now.
        self._sent += self._twice.pop(hop, 0)
        self._use((operation.micro_batch, operation.hop + 1), self._layers.output(layers.stop - 1))
        outgoing = self._layers.output(layers.start - 1)
        if operation.first:
            return
        if operation.send_to is not None:
            self._sent += outgoing
            self._keep(outgoing, None)
        else:
            self._handed += outgoing
            self._uses[hop] = uses

    def _use(self, maker: _Hop, gradient: int) -> None:
        """An operation has used the gradient that the hop `maker` made, if that was handed over on this worker."""
        if maker in self._uses:
            self._uses[maker] -= 1
            if not self._uses[maker]:
                del self._uses[maker]
                self._handed -= gradient

    def _received(self, operation: Operation) -> int:
        """Bytes of the gradient that a hop's backward starts from, where another worker has sent it."""
        handed = (operation.micro_batch, operation.hop + 1) in self._uses
        return 0 if handed else self._layers.output(operation.layers.stop - 1)

    def _activations_of(self, operation: Operation) -> int:
        layers = operation.layers
        whole = self._layers.activations(layers) + self._layers.output(layers.stop - 1)
        return whole - self._shared.get(_hop(operation), 0)

    def _keep(self, num_bytes: int, output_of: _Hop | None) -> None:
        """Keep a message that was sent, and let go of the earliest if there are too many."""
        self._sends.append((num_bytes, output_of))
        if self._buffers.sends_kept is not None and len(self._sends) > self._buffers.sends_kept:
            let_go, hop = self._sends.popleft()
            if hop is None or self._twice.pop(hop, None) is None:
                self._sent -= let_go

    def _compute(self, operation: Operation, kind: OperationKind, messages: int) -> None:
        own = self._layers.worst(kind, operation.layers)
        self._compare(operation, own, messages, shared=self._shared.get(_hop(operation), 0))

    def _compare(self, operation: Operation, own: _Moment, messages: int, *, shared: int = 0) -> None:
        """Remember what is held, and what `operation` itself needs, if it is more than ever before."""
        messages += self._sent + self._handed
        activations = self._activations - shared
        total = activations + self._weight_grads + messages + own.total_bytes
        if total > self._worst_bytes:
            self._worst_bytes = total
            use = dataclasses.replace(
                self._state,
                activation_bytes=activations + own.activation_bytes,
                weight_grad_bytes=self._weight_grads + own.weight_grad_bytes,
                message_bytes=messages + own.message_bytes,
                working_bytes=own.working_bytes,
            )
            self._worst = WorkerMemory(use, operation)


_NOTHING = _Moment()


def _hop(operation: Operation) -> _Hop:
    return operation.micro_batch, operation.hop
