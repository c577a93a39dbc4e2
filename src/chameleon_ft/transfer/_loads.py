"""What each holder has to send while sources are being chosen."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace


@dataclass(frozen=True, slots=True)
class _Step:
    """`worker` passes a copy of `layer` on to some worker of `group`, having taken one in the step `after`."""

    worker: int
    layer: int
    group: int
    after: _Step | None

    def givers(self) -> Iterator[int]:
        """The workers of this step and of those that it comes after."""
        step: _Step | None = self
        while step is not None:
            yield step.worker
            step = step.after


class Loads:
    """Copies of layers to be sent, by sender.

    Workers that hold the same are a group: what one of them can send, all of them can.

    Args:
        groups: the workers of each.
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
        """Each of `copies` more is sent by the holder with the least to send, the first of equals."""
        heap = [(self._bytes[worker], worker) for group in self._groups_of[layer] for worker in self._groups[group]]
        heapify(heap)
        for _ in range(copies):
            load, worker = heap[0]
            self._copies[worker][layer] += 1
            heapreplace(heap, (load + self._num_bytes[layer], worker))
        for load, worker in heap:
            self._bytes[worker] = load
        self._wanted[layer] += copies

    def even_out(self) -> int:
        """Passes layers on along chains of holders until no chain makes the largest send less.

        Returns:
            Bytes that some worker sends however the copies are shared out.
        """
        bound = self._bound(self._wanted)
        while (most := max(self._bytes.values(), default=0)) > bound:
            fullest = next(worker for worker, load in self._bytes.items() if load == most)
            chain = self._chain(fullest, most)
            if chain is None:
                return max(bound, self._bound(self._reached(fullest)))
            self._pass_on(*chain)
        return bound

    def senders(self) -> dict[int, dict[int, int]]:
        """layer -> the workers that send it, ascending, and how many copies each."""
        found: dict[int, dict[int, int]] = defaultdict(dict)
        for worker in sorted(self._copies):
            for layer, copies in self._copies[worker].items():
                found[layer][worker] = copies
        return found

    def _chain(self, fullest: int, most: int) -> tuple[int, _Step] | None:
        """A shortest chain that takes a layer from `fullest` and leaves no other worker with `most` that had less.

        Returns:
            Who takes the layer of the last step, and that step. None is certain to mean that there is no chain only
            where all layers have equal bytes: else a worker is not tried in every chain that could lead to it.
        """
        queue: deque[_Step] = deque()
        seen: set[tuple[int, int]] = set()

        def go_on(worker: int, layer: int, after: _Step | None) -> None:
            for group in self._groups_of[layer]:
                if (node := (group, self._num_bytes[layer])) not in seen:
                    seen.add(node)
                    queue.append(_Step(worker, layer, group, after))

        for layer in self._copies[fullest]:
            if self._num_bytes[layer]:
                go_on(fullest, layer, None)
        while queue:
            step = queue.popleft()
            taken = self._num_bytes[step.layer]
            givers = set(step.givers())
            others = [worker for worker in self._groups[step.group] if worker not in givers]
            for worker in others:
                if self._bytes[worker] + taken < most:
                    return worker, step
            for worker in others:
                for layer in self._copies[worker]:
                    given = self._num_bytes[layer]
                    if given >= taken or self._bytes[worker] + taken - given < most:
                        go_on(worker, layer, step)
        return None

    def _pass_on(self, taker: int, last: _Step) -> None:
        step: _Step | None = last
        while step is not None:
            copies = self._copies[step.worker]
            copies[step.layer] -= 1
            if not copies[step.layer]:
                del copies[step.layer]
            self._copies[taker][step.layer] += 1
            self._bytes[step.worker] -= self._num_bytes[step.layer]
            self._bytes[taker] += self._num_bytes[step.layer]
            taker, step = step.worker, step.after

    def _reached(self, worker: int) -> set[int]:
        """The layers that chains from `worker` can pass on, whatever their bytes."""
        layers = set(self._copies[worker])
        queue = deque(layers)
        groups: set[int] = set()
        while queue:
            for group in set(self._groups_of[queue.popleft()]) - groups:
                groups.add(group)
                sent = {layer for each in self._groups[group] for layer in self._copies[each]}
                queue.extend(sent - layers)
                layers |= sent
        return layers

    def _bound(self, layers: Collection[int]) -> int:
        """What some holder of these layers sends at least: the mean, or its share of the largest in whole copies."""
        bound = copies = total = 0
        groups: set[int] = set()
        for layer in sorted(layers, key=lambda layer: -self._num_bytes[layer]):
            groups.update(self._groups_of[layer])
            copies += self._wanted[layer]
            total += self._wanted[layer] * self._num_bytes[layer]
            holders = sum(len(self._groups[group]) for group in groups)
            alone = -(-self._wanted[layer] // self.num_holders(layer))
            together = -(-copies // holders)
            bound = max(bound, -(-total // holders), max(alone, together) * self._num_bytes[layer])
        return bound
