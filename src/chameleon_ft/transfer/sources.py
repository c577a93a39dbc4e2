"""Sources: the live holder that sends each missing layer to each worker."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

from chameleon_ft.cost.transition import state_bytes
from chameleon_ft.errors import NoHolderError, PlanError
from chameleon_ft.plan import LayerRange
from chameleon_ft.transfer.roles import Holding, groups_of
from chameleon_ft.workload import LayerCost

# Steps (worker, layer): each worker passes a copy of its layer to the worker of the next step, or to the taker.
_Chain = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Message:
    """The state of neighbouring layers, sent from a holder to a future holder.

    Attributes:
        source: the worker that sends.
        destination: the worker that receives.
        layers: the layers sent.
        num_bytes: their parameters and optimizer state.

    Raises:
        PlanError: both workers are the same, or the bytes are negative.
    """

    source: int
    destination: int
    layers: LayerRange
    num_bytes: int

    def __post_init__(self) -> None:
        if self.source == self.destination:
            raise PlanError(f"worker {self.source} cannot send to itself; what it holds needs no transfer")
        if self.num_bytes < 0:
            raise PlanError(f"a message needs zero or more bytes; got {self.num_bytes}")


def choose_sources(
    holders: Mapping[int, Holding], missing: Mapping[int, Sequence[int]], layers: Sequence[LayerCost]
) -> tuple[Message, ...]:
    """Return the messages that bring each worker its missing layers, by destination and layer.

    Sources are chosen to keep the largest send small, in bytes. Neighbouring layers with the same source are one
    message.

    Each layer is first sent by the holder with the least to send so far; then layers are passed on along chains of
    holders as long as the largest send shrinks. If all missing layers have equal bytes, the result is optimal: without
    such a chain, the holders that a chain would reach cannot send less (Hall 1935). Otherwise the least largest send is
    NP-hard to find.

    Args:
        holders: layers of each live worker.
        missing: for each receiver, the layers that it lacks, ascending.
        layers: costs of all layers.

    Raises:
        NoHolderError: no live worker holds some of the missing layers.
    """
    copies = Counter(layer for lacking in missing.values() for layer in lacking)
    groups = groups_of({worker: Holding(each.ranges) for worker, each in sorted(holders.items())})
    held_by: dict[int, list[int]] = {layer: [] for layer in sorted(copies)}
    for group, (each, _) in enumerate(groups):
        for held in each.ranges:
            for layer in held:
                if layer in held_by:
                    held_by[layer].append(group)
    if unheld := [layer for layer, of in held_by.items() if not of]:
        raise NoHolderError(unheld)
    num_bytes = {layer: state_bytes(layers[layer]) for layer in held_by}
    loads = Loads([workers for _, workers in groups], held_by, num_bytes)
    for layer in sorted(held_by, key=lambda layer: (-num_bytes[layer], loads.num_holders(layer), layer)):
        loads.spread(layer, copies[layer])
    loads.even_out()
    return _messages(loads.senders(), missing, num_bytes)


def _messages(
    left: Mapping[int, dict[int, int]], missing: Mapping[int, Sequence[int]], num_bytes: Mapping[int, int]
) -> tuple[Message, ...]:
    """Share out the copies of each layer, which `left[layer]` counts by sender.

    A receiver gets a layer from the source of its previous layer, if that sender has a copy left.
    """
    messages: list[Message] = []
    for receiver, lacking in sorted(missing.items()):
        runs: list[tuple[int, list[int]]] = []
        for layer in lacking:
            copies = left[layer]
            if not runs or runs[-1][1][-1] + 1 != layer or runs[-1][0] not in copies:
                runs.append((next(iter(copies)), []))
            source, run = runs[-1]
            run.append(layer)
            copies[source] -= 1
            if not copies[source]:
                del copies[source]
        messages += [
            Message(source, receiver, LayerRange(run[0], run[-1] + 1), sum(num_bytes[layer] for layer in run))
            for source, run in runs
        ]
    return tuple(messages)


class Loads:
    """Copies of layers to send, by sender.

    Workers with equal holdings are a group: they can send the same layers.

    Args:
        groups: workers of each group.
        groups_of: layer -> the groups that hold it.
        num_bytes: layer -> bytes of one copy.
    """

    def __init__(
        self, groups: Sequence[Sequence[int]], groups_of: Mapping[int, Sequence[int]], num_bytes: Mapping[int, int]
    ) -> None:
        self._groups = groups
        self._groups_of = groups_of
        self._num_bytes = num_bytes
        self._bytes = {worker: 0 for workers in groups for worker in workers}
        self._copies: dict[int, Counter[int]] = {worker: Counter() for worker in self._bytes}
        self._wanted: Counter[int] = Counter()

    def num_holders(self, layer: int) -> int:
        return sum(len(self._groups[group]) for group in self._groups_of[layer])

    def spread(self, layer: int, copies: int) -> None:
        """Give each additional copy to the holder with the least to send, the first of equals."""
        heap = [(self._bytes[worker], worker) for group in self._groups_of[layer] for worker in self._groups[group]]
        heapify(heap)
        for _ in range(copies):
            load, worker = heap[0]
            self._copies[worker][layer] += 1
            heapreplace(heap, (load + self._num_bytes[layer], worker))
        for load, worker in heap:
            self._bytes[worker] = load
        self._wanted[layer] += copies

    def even_out(self) -> None:
        """Pass layers on along chains of holders until no chain reduces the largest send."""
        bound = self._bound()
        while (most := max(self._bytes.values(), default=0)) > bound:
            fullest = next(worker for worker, load in self._bytes.items() if load == most)
            if (found := self._find_chain(fullest, most)) is None:
                return
            taker, chain = found
            for worker, layer in reversed(chain):
                self._copies[worker][layer] -= 1
                if not self._copies[worker][layer]:
                    del self._copies[worker][layer]
                self._copies[taker][layer] += 1
                self._bytes[worker] -= self._num_bytes[layer]
                self._bytes[taker] += self._num_bytes[layer]
                taker = worker

    def senders(self) -> dict[int, dict[int, int]]:
        """Return layer -> the workers that send it, ascending, with the copies of each."""
        found: dict[int, dict[int, int]] = defaultdict(dict)
        for worker in sorted(self._copies):
            for layer, copies in self._copies[worker].items():
                found[layer][worker] = copies
        return found

    def _find_chain(self, fullest: int, most: int) -> tuple[int, _Chain] | None:
        """The worker that takes the last layer of a chain, and a shortest chain from `fullest`, breadth first.

        The chain leaves no other worker with `most` that had less. None proves that there is no chain only if all
        layers have equal bytes: otherwise a worker is not tried in every chain that could reach it.
        """
        queue: deque[tuple[int, _Chain]] = deque()
        seen: set[tuple[int, int]] = set()

        def extend(chain: _Chain, worker: int, layer: int) -> None:
            for group in self._groups_of[layer]:
                if (node := (group, self._num_bytes[layer])) not in seen:
                    seen.add(node)
                    queue.append((group, (*chain, (worker, layer))))

        for layer in self._copies[fullest]:
            if self._num_bytes[layer]:
                extend((), fullest, layer)
        while queue:
            group, chain = queue.popleft()
            taken = self._num_bytes[chain[-1][1]]
            givers = {worker for worker, _ in chain}
            others = [worker for worker in self._groups[group] if worker not in givers]
            for worker in others:
                if self._bytes[worker] + taken < most:
                    return worker, chain
            for worker in others:
                for layer in self._copies[worker]:
                    given = self._num_bytes[layer]
                    if given >= taken or self._bytes[worker] + taken - given < most:
                        extend(chain, worker, layer)
        return None

    def _bound(self) -> int:
        """Lower bound on the largest send: the mean of the largest layers, or a share in whole copies."""
        bound = copies = total = 0
        groups: set[int] = set()
        for layer in sorted(self._wanted, key=lambda layer: -self._num_bytes[layer]):
            groups.update(self._groups_of[layer])
            copies += self._wanted[layer]
            total += self._wanted[layer] * self._num_bytes[layer]
            holders = sum(len(self._groups[group]) for group in groups)
            alone = -(-self._wanted[layer] // self.num_holders(layer))
            together = -(-copies // holders)
            bound = max(bound, -(-total // holders), max(alone, together) * self._num_bytes[layer])
        return bound
