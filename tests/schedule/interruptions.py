"""Steps that are interrupted by the loss of a worker, and an executor that runs what remains of them."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from chameleon_ft.errors import ProgramError
from chameleon_ft.plan import Hop, LayerRange, Plan
from chameleon_ft.plan.rest import PartialHop, PartialRoute, RestOfStep, StepProgress
from chameleon_ft.schedule import (
    CostModel,
    InFlightLimit,
    Operation,
    OperationKind,
    Program,
    ScheduledRest,
    Timeline,
    check_rest,
    rest_schedules,
)
from chameleon_ft.schedule.rest import Resend

F, B, I, W = OperationKind  # noqa: E741

Keeps = Callable[[int, int], bool]
"""Whether the worker of a hop can send its gradient again, by micro-batch and first layer."""


def sound_rest(
    rest: RestOfStep, costs: CostModel, *, in_flight_limits: Mapping[int, InFlightLimit] | None = None
) -> ScheduledRest:
    """Return the first schedule of a rest that passes its check."""
    for found in rest_schedules(rest, costs, in_flight_limits=in_flight_limits or {}):
        with suppress(ProgramError):
            check_rest(found.program, found.resends, rest)
            return found
    raise AssertionError("no schedule passes")


@dataclass(frozen=True)
class Interruption:
    """A step of `plan` in which `lost` fails after `at_s` seconds."""

    plan: Plan
    timeline: Timeline
    lost: int
    at_s: float

    def progress(self, keeps: Keeps) -> dict[int, StepProgress]:
        """Return the progress of each survivor, which can send an output again until its own backward has run."""
        done: dict[int, dict[OperationKind, set[tuple[int, LayerRange]]]] = {}
        for worker in self.plan.workers:
            done[worker] = {kind: set() for kind in OperationKind}
        for worker, operation, _, end_s in self.timeline.operations:
            if end_s <= self.at_s:
                done[worker][operation.kind].add((operation.micro_batch, operation.layers))
        num_layers = self.plan.placement.num_layers
        found: dict[int, StepProgress] = {}
        for worker, own in done.items():
            if worker != self.lost:
                saved = own[F] - own[B] - own[I]
                found[worker] = StepProgress(
                    contributed=frozenset(own[B] | own[W]),
                    saved=frozenset(saved),
                    deferred=frozenset(own[I] - own[W]),
                    counted=frozenset(m for m, layers in own[F] if layers.stop == num_layers),
                    activations=frozenset((m, layers.stop - 1) for m, layers in saved),
                    gradients=frozenset((m, layers.start) for m, layers in own[B] | own[I] if keeps(m, layers.start)),
                )
        return found

    def rest(self, progress: Mapping[int, StepProgress]) -> RestOfStep:
        """The rest of the step: the lost worker's peers repeat what it did, in turns.

        A micro-batch of which all but the lost contribution is there goes through the peer's pipeline.
        """
        turns = Counter[LayerRange]()
        routes: list[PartialRoute] = []
        ways = dict.fromkeys(route.hops for route in self.plan.routes)
        live = [way for way in ways if all(hop.worker != self.lost for hop in way)]
        for route in self.plan.routes:
            missing = [hop for hop in route.hops if not _is_contributed(route.micro_batch, hop.layers, progress)]
            hops = [
                new for hop in route.hops for new in ([hop] if hop.worker != self.lost else self._peers(hop, turns))
            ]
            if [hop.worker for hop in missing] == [self.lost]:
                peers = {*hops} - {*route.hops}
                hops = next((list(way) for way in live if _alike(way, hops) and not peers.isdisjoint(way)), hops)
            is_counted = any(route.micro_batch in own.counted for own in progress.values())
            partial = partial_hops(route.micro_batch, hops, progress, is_counted=is_counted)
            if any(hop.forward or hop.backward or hop.weight_grad for hop in partial):
                routes.append(PartialRoute(micro_batch=route.micro_batch, hops=partial, is_counted=is_counted))
        return RestOfStep(plan=self.plan, routes=tuple(routes))

    def _peers(self, hop: Hop, turns: Counter[LayerRange]) -> Iterator[Hop]:
        placement = self.plan.placement.without([self.lost])
        layer, stop = hop.layers.start, hop.layers.stop
        turns[hop.layers] += 1
        while layer < stop:
            holders = placement.holders(layer)
            peer = holders[turns[hop.layers] % len(holders)]
            held = next(held for held in placement.ranges_of(peer) if layer in held)
            yield Hop(peer, LayerRange(layer, min(stop, held.stop)))
            layer = min(stop, held.stop)


def _is_contributed(micro_batch: int, layers: LayerRange, progress: Mapping[int, StepProgress]) -> bool:
    return any((micro_batch, layers) in own.contributed for own in progress.values())


def _alike(one: Sequence[Hop], other: Sequence[Hop]) -> bool:
    return [hop.layers for hop in one] == [hop.layers for hop in other]


def partial_hops(
    micro_batch: int, hops: Sequence[Hop], progress: Mapping[int, StepProgress], *, is_counted: bool
) -> tuple[PartialHop, ...]:
    """The operations that remain on these hops: those that contribute, and those that make the inputs of others."""
    found = [PartialHop(worker=hop.worker, layers=hop.layers) for hop in hops]
    keys = [(micro_batch, hop.layers) for hop in hops]
    held = [progress[hop.worker] for hop in hops]
    for index, hop in enumerate(hops):
        asked = index > 0 and found[index - 1].backward
        sends_gradient = asked and (micro_batch, hop.layers.start) in held[index].gradients
        missing = not _is_contributed(*keys[index], progress)
        backward = (asked and not sends_gradient) or (missing and keys[index] not in held[index].deferred)
        found[index] = replace(
            found[index],
            backward=backward,
            weight_grad=missing,
            sends_gradient=sends_gradient and not backward,
        )
    for index in reversed(range(len(hops))):
        asked = found[index + 1].forward if index + 1 < len(hops) else not is_counted
        sends_activation = asked and index + 1 < len(hops) and keys[index] in held[index].saved
        forward = (asked and not sends_activation) or (found[index].backward and keys[index] not in held[index].saved)
        found[index] = replace(found[index], forward=forward, sends_activation=sends_activation and not forward)
    return tuple(found)


class Executor:
    """Runs programs of a rest on what the survivors hold, with channels of one message and blocking sends.

    Messages that are sent again arrive beside the channels, each with a tag.
    """

    def __init__(self, program: Program, resends: Mapping[int, Sequence[Resend]], progress: Mapping[int, StepProgress]):
        self.contributed = Counter[tuple[int, int]]()
        self.counted = {micro_batch for own in progress.values() for micro_batch in own.counted}
        self._saved = {worker: set(own.saved) for worker, own in progress.items()}
        self._deferred = {worker: set(own.deferred) for worker, own in progress.items()}
        self._queues: dict[tuple[int, int, bool], deque[tuple[int, int]]] = defaultdict(deque)
        self._local: dict[int, set[tuple[int, int, bool]]] = defaultdict(set)
        self._resent: set[tuple[tuple[int, int, bool], tuple[int, int]]] = set()
        self._left = {worker: deque(program.of(worker)) for worker in program.workers}
        self._sending: dict[int, tuple[tuple[int, int, bool], tuple[int, int]]] = {}
        for own in progress.values():
            for micro_batch, layers in own.contributed:
                self._contribute(micro_batch, layers)
        for sender, messages in resends.items():
            for micro_batch, layer, forward, receiver in messages:
                held = progress[sender].activations if forward else progress[sender].gradients
                assert (micro_batch, layer) in held
                if receiver == sender:
                    self._local[sender].add((micro_batch, layer, forward))
                else:
                    self._resent.add(((sender, receiver, forward), (micro_batch, layer)))

    def run(self) -> None:
        while sum(self._advance(worker) for worker in self._left):
            pass
        stuck = {worker: str(own[0]) for worker, own in self._left.items() if own}
        assert not stuck
        assert not self._sending
        assert not self._resent

    def _advance(self, worker: int) -> bool:
        if worker in self._sending:
            channel, message = self._sending[worker]
            if self._queues[channel]:
                return False
            self._queues[channel].append(message)
            del self._sending[worker]
            return True
        left = self._left[worker]
        if not left or not self._has_input(worker, left[0]):
            return False
        self._execute(worker, left.popleft())
        return True

    def _has_input(self, worker: int, operation: Operation) -> bool:
        """Whether the input is there; takes it if so."""
        layers, forward = operation.layers, operation.kind is F
        if operation.kind is W or (operation.first if forward else operation.last):
            return True
        message = operation.micro_batch, (layers.start - 1 if forward else layers.stop)
        if operation.receive_from is None:
            assert (*message, forward) in self._local[worker]
            self._local[worker].remove((*message, forward))
            return True
        channel = operation.receive_from, worker, forward
        if (channel, message) in self._resent:
            self._resent.remove((channel, message))
            return True
        if queue := self._queues[channel]:
            assert queue.popleft() == message
            return True
        return False

    def _execute(self, worker: int, operation: Operation) -> None:
        kind, layers, micro_batch = operation.kind, operation.layers, operation.micro_batch
        key = micro_batch, layers
        if kind is F:
            self._saved[worker].add(key)
            if operation.last:
                self.counted.add(micro_batch)
        elif kind is W:
            self._deferred[worker].remove(key)
            self._contribute(micro_batch, layers)
        else:
            self._saved[worker].remove(key)
            if kind is B:
                self._contribute(micro_batch, layers)
            else:
                self._deferred[worker].add(key)
        if kind is not W:
            result = micro_batch, (layers.stop - 1 if kind is F else layers.start)
            if operation.send_to is None:
                self._local[worker].add((*result, kind is F))
            else:
                self._sending[worker] = (worker, operation.send_to, kind is F), result

    def _contribute(self, micro_batch: int, layers: LayerRange) -> None:
        self.contributed.update((micro_batch, layer) for layer in layers)
