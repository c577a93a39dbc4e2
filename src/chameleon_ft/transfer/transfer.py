"""Transfers: everything that moves when one placement follows another, and how long it takes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

from chameleon_ft.cluster import Cluster
from chameleon_ft.errors import PlanError
from chameleon_ft.plan import Placement
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.transfer.holdings import Holding, holdings_of, missing_layers
from chameleon_ft.transfer.message import Message
from chameleon_ft.transfer.roles import assign_roles, remap_placement
from chameleon_ft.transfer.rounds import message_rounds
from chameleon_ft.transfer.sources import choose_sources
from chameleon_ft.workload import LayerCost

__all__ = ["Transfer", "plan_transfer", "transfer_s", "transfer_to"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The way from one placement to another.

    Attributes:
        placement: which layers each worker holds when all has arrived.
        roles: worker of the plan that was asked for -> the live worker that takes its place in `placement`.
        rounds: the messages; in a round, a worker sends to one other at most and receives from one at most.
        least_largest_send_bytes: whatever the sources, some worker sends as many bytes as this.

    Raises:
        PlanError: a worker sends, or receives, two messages in a round.
    """

    placement: Placement
    roles: Mapping[int, int]
    rounds: tuple[tuple[Message, ...], ...]
    least_largest_send_bytes: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "roles", FrozenMap(self.roles))
        for messages in self.rounds:
            for end, workers in (
                ("source", [message.source for message in messages]),
                ("destination", [message.destination for message in messages]),
            ):
                if len(set(workers)) < len(workers):
                    worker = Counter(workers).most_common(1)[0][0]
                    raise PlanError(
                        f"worker {worker} is the {end} of two messages of a round; put them into different rounds"
                    )

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages, round by round."""
        return tuple(message for messages in self.rounds for message in messages)

    @property
    def total_bytes(self) -> int:
        """Bytes of all messages."""
        return sum(message.num_bytes for message in self.messages)

    @property
    def largest_send_bytes(self) -> int:
        """The most bytes that a worker sends."""
        sent: Counter[int] = Counter()
        for message in self.messages:
            sent[message.source] += message.num_bytes
        return max(sent.values(), default=0)

    @property
    def largest_receive_bytes(self) -> int:
        """The most bytes that a worker receives."""
        received: Counter[int] = Counter()
        for message in self.messages:
            received[message.destination] += message.num_bytes
        return max(received.values(), default=0)

    @property
    def bound_bytes(self) -> int:
        """Bytes that, with these roles, some worker has to send or to receive whatever the sources and rounds."""
        return max(self.least_largest_send_bytes, self.largest_receive_bytes)


def plan_transfer(
    current: Placement | None, new: Placement, *, kinds: Mapping[int, Hashable], layers: Sequence[LayerCost]
) -> Transfer:
    """The transfer to `new`, whose workers may change places with others of their kind, that moves the fewest bytes.

    Args:
        current: what workers hold now, lost ones included or not; None when nobody holds anything.
        new: the placement to go to.
        kinds: every live worker and its kind; equal kinds are as good as each other (`worker_kinds`).
        layers: costs of all layers.

    Returns:
        Roles by `assign_roles`, sources by `choose_sources`, rounds by `message_rounds`.

    Raises:
        PlanError: `new` has a worker that is not live, or not as many layers as there are costs.
        NoHolderError: no live worker holds some of the layers that have to move.
    """
    if lost := sorted(set(new.workers) - set(kinds)):
        raise PlanError(f"the new placement has workers that are not live: {lost}; plan for the live workers")
    workers, places = holdings_of(current, kinds), holdings_of(new, {place: kinds[place] for place in new.workers})
    roles = assign_roles(workers, places, layers)
    return _transfer(workers, remap_placement(new, roles), roles, layers)


def transfer_to(
    current: Placement | None, new: Placement, *, live: Collection[int], layers: Sequence[LayerCost]
) -> Transfer:
    """The transfer to `new` as it is: its workers keep their places, whatever moves. Else as `plan_transfer`."""
    workers = holdings_of(current, dict.fromkeys(live))
    if lost := sorted(set(new.workers) - set(workers)):
        raise PlanError(f"the new placement has workers that are not live: {lost}; plan for the live workers")
    return _transfer(workers, new, {worker: worker for worker in new.workers}, layers)


def transfer_s(rounds: Sequence[Sequence[Message]], cluster: Cluster) -> float:
    """Seconds until the last message has arrived.

    A worker sends and receives at the same time, and goes on to its next round when its own messages of the one before
    are through; others it does not wait for. Messages of other workers on the same host do not slow each other down.

    Raises:
        ConfigError: a worker that the cluster does not have.
    """
    ready_s: dict[int, float] = defaultdict(float)
    for messages in rounds:
        done_s: dict[int, float] = defaultdict(float)
        for message in messages:
            ends = (message.source, message.destination)
            end_s = max(ready_s[end] for end in ends) + cluster.link(*ends).message_s(message.num_bytes)
            for end in ends:
                done_s[end] = max(done_s[end], end_s)
        ready_s |= done_s
    return max(ready_s.values(), default=0.0)


def _transfer(
    workers: Mapping[int, Holding], placement: Placement, roles: Mapping[int, int], layers: Sequence[LayerCost]
) -> Transfer:
    if placement.num_layers != len(layers):
        raise PlanError(f"the new placement has {placement.num_layers} layers, but there are costs of {len(layers)}")
    missing = {worker: missing_layers(workers[worker], Holding(ranges)) for worker, ranges in placement.ranges.items()}
    sources = choose_sources(workers, missing, layers)
    return Transfer(
        placement=placement,
        roles=roles,
        rounds=message_rounds(sources.messages),
        least_largest_send_bytes=sources.least_largest_send_bytes,
    )
