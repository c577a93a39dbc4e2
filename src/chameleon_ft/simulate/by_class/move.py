"""The state that moves between two layouts of thousands of workers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from chameleon_ft.simulate.by_class.cluster_layout import ClusterLayout, Places, count_layers
from chameleon_ft.simulate.by_class.pipeline_classes import Pipelines


@dataclass(frozen=True, slots=True)
class Move:
    """The state that moves to a new layout.

    Attributes:
        moved_bytes: all that workers receive.
        transfer_s: seconds until it has arrived.
        most_bytes: the most that a worker of the layout before needs for what it receives, gradients included.
        most_idle_bytes: likewise for workers outside that layout.
    """

    moved_bytes: int = 0
    transfer_s: float = 0.0
    most_bytes: int = 0
    most_idle_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Lacked:
    """The layers that the workers of a new layout lack: those of each stage before and after the layers it has.

    Attributes:
        places: of the new layout.
        starts, stops: `starts, ..., stops - 1` are the layers of the stage that the worker has.
        is_held: whether the worker held any layers.
        changes: whether it held others than those of its stage.
        before_bytes: what it held.
    """

    places: Places
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    is_held: NDArray[np.bool_]
    changes: NDArray[np.bool_]
    before_bytes: NDArray[np.int64]

    def bytes_of(self, table: NDArray[np.int64], depth_of: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the bytes that each worker lacks.

        Args:
            table: bytes of all layers before each one, of shape (depths, layers + 1).
            depth_of: the row of each worker.
        """
        whole = table[depth_of, self.places.stops] - table[depth_of, self.places.starts]
        found: NDArray[np.int64] = whole - (table[depth_of, self.stops] - table[depth_of, self.starts])
        return found

    def workers_by_layer(self, of: NDArray[np.bool_], num_layers: int) -> NDArray[np.int64]:
        """Return how many of these workers lack each layer."""
        whole = count_layers(self.places.starts[of], self.places.stops[of], num_layers)
        return whole - count_layers(self.starts[of], self.stops[of], num_layers)


def move_to(new: ClusterLayout, current: ClusterLayout, pipelines: Pipelines) -> Move | None:
    """Return the state that moves to a new layout.

    The time is that of the worker that sends or receives most, at the bandwidth between hosts, which the sources and
    rounds of `chameleon_ft.transfer` reach but for a few messages. None if a layer has no holder, or the state that
    arrives does not fit beside the old.
    """
    lacked = _lacked(new.places, current.places, pipelines)
    depths, depth_of = np.unique(lacked.places.depths, return_inverse=True)
    own = [pipelines.state_bytes(depth) for depth in depths.tolist()]
    received = lacked.bytes_of(np.array([list(accumulate(each, initial=0)) for each in own]), depth_of)
    over = pipelines.memory_bytes is not None and lacked.before_bytes + received > pipelines.memory_bytes
    if np.any(over & lacked.changes):
        return None
    num_layers = pipelines.num_layers
    lacking = np.zeros(num_layers, dtype=np.int64)
    sizes = np.zeros(num_layers, dtype=np.int64)  # the most that a worker receives of each layer
    for index, each in enumerate(own):
        lack = lacked.workers_by_layer(depth_of == index, num_layers)
        lacking += lack
        sizes = np.maximum(sizes, np.where(lack > 0, each, 0))
    if not lacking.any():
        return Move()
    holders = current.places.holders(num_layers)
    if np.any((lacking > 0) & (holders == 0)):
        return None
    sent = np.max(-(-lacking // np.maximum(holders, 1)) * sizes)
    beside = lacked.bytes_of(np.array([pipelines.held_before(depth) for depth in depths.tolist()]), depth_of)
    return Move(
        int(received.sum()),
        pipelines.costs.cluster.inter_host.message_s(int(max(received.max(), sent))),
        int(beside.max(initial=0, where=lacked.is_held)),
        int(beside.max(initial=0, where=~lacked.is_held)),
    )


def _lacked(new: Places, current: Places, pipelines: Pipelines) -> _Lacked:
    """Return what the workers of a new layout lack of their stages."""
    size = 1 + max(new.workers.max(initial=0), current.workers.max(initial=0))
    starts, stops, held_bytes = (np.zeros(size, dtype=np.int64) for _ in range(3))
    starts[current.workers], stops[current.workers] = current.starts, current.stops
    for depth in np.unique(current.depths).tolist():
        held, of = np.array(pipelines.held_before(depth)), current.depths == depth
        held_bytes[current.workers[of]] = held[current.stops[of]] - held[current.starts[of]]
    had_start, had_stop = starts[new.workers], stops[new.workers]
    first, last = np.maximum(had_start, new.starts), np.minimum(had_stop, new.stops)
    return _Lacked(
        places=new,
        starts=np.where(first < last, first, new.starts),
        stops=np.where(first < last, last, new.starts),
        is_held=had_stop > 0,
        changes=(had_start != new.starts) | (had_stop != new.stops),
        before_bytes=held_bytes[new.workers],
    )
