"""Transfers: everything that moves when one placement follows another, at once or during training, and its time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

from chameleon_ft.cluster import Cluster
from chameleon_ft.errors import PlanError
from chameleon_ft.plan import Placement
from chameleon_ft.plan.frozen_map import FrozenMap
from chameleon_ft.transfer.roles import Holding, assign_roles, holdings_of, remap_placement
from chameleon_ft.transfer.sources import Message, choose_sources
from chameleon_ft.workload import LayerCost, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The messages that lead from one placement to another.

    Attributes:
        placement: which layers each worker holds when all has arrived.
        roles: worker of the plan that was asked for -> the live worker that takes its place in `placement`.
        rounds: the messages; in a round, a worker sends to one other at most and receives from one at most.

    Raises:
        PlanError: a worker sends, or receives, two messages in a round.
    """

    placement: Placement
    roles: Mapping[int, int]
    rounds: tuple[tuple[Message, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "roles", FrozenMap(self.roles))
        for messages in self.rounds:
            for end in ("source", "destination"):
                for worker, count in Counter(getattr(message, end) for message in messages).items():
                    if count > 1:
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


def plan_transfer(
    current: Placement | None, new: Placement, *, kinds: Mapping[int, Hashable], layers: Sequence[LayerCost]
) -> Transfer:
    """Plan the transfer to `new`, whose workers may change places with others of their kind, that moves fewest bytes.

    Args:
        current: what workers hold now, lost ones included or not; None when no worker holds anything.
        new: the placement to go to.
        kinds: every live worker and its kind; workers of equal kinds are interchangeable (`worker_kinds`).
        layers: costs of all layers.

    Returns:
        Roles by `assign_roles`, sources by `choose_sources`, rounds by `message_rounds`.

    Raises:
        PlanError: `new` has a worker that is not live, or not as many layers as there are costs.
        NoHolderError: no live worker holds some of the layers that have to move.
    """
    _check_live(new, kinds)
    places = holdings_of(new, {place: kinds[place] for place in new.workers})
    roles = assign_roles(holdings_of(current, kinds), places, layers)
    return _transfer(current, remap_placement(new, roles), roles, kinds, layers)


def transfer_to(
    current: Placement | None, new: Placement, *, live: Collection[int], layers: Sequence[LayerCost]
) -> Transfer:
    """Plan the transfer to `new` as it is: its workers keep their places. Otherwise as `plan_transfer`."""
    _check_live(new, live)
    return _transfer(current, new, {worker: worker for worker in new.workers}, live, layers)


def message_rounds(messages: Sequence[Message]) -> tuple[tuple[Message, ...], ...]:
    """Arrange messages in the fewest rounds; in each, a worker sends to one other at most and receives from one.

    Senders on one side and receivers on the other make a bipartite multigraph, whose edges can be coloured with as many
    colours as messages meet at a worker (Koenig 1916). Rounds with the largest messages come first.
    """
    # Imported late: it takes time, and rerouting needs none of it.
    import rustworkx

    graph = rustworkx.PyGraph(multigraph=True)
    senders = {worker: graph.add_node(None) for worker in sorted({message.source for message in messages})}
    receivers = {worker: graph.add_node(None) for worker in sorted({message.destination for message in messages})}
    graph.add_edges_from([(senders[each.source], receivers[each.destination], None) for each in messages])
    colours = rustworkx.graph_bipartite_edge_color(graph)
    rounds: list[list[Message]] = [[] for _ in range(max(colours.values(), default=-1) + 1)]
    for index, message in enumerate(messages):
        rounds[colours[index]].append(message)
    rounds.sort(key=lambda each: -max(message.num_bytes for message in each))
    return tuple(map(tuple, rounds))


def transfer_s(rounds: Sequence[Sequence[Message]], cluster: Cluster) -> float:
    """Return the seconds until the last message has arrived.

    A worker sends and receives at the same time, and begins its next round when its own messages of the one before have
    arrived. Messages of other workers on the same host do not slow each other down.

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


def _check_live(new: Placement, live: Collection[int]) -> None:
    if lost := sorted(set(new.workers).difference(live)):
        raise PlanError(f"the new placement has workers that are not live: {lost}; plan for the live workers")


def _transfer(
    current: Placement | None,
    new: Placement,
    roles: Mapping[int, int],
    live: Collection[int],
    layers: Sequence[LayerCost],
) -> Transfer:
    if new.num_layers != len(layers):
        raise PlanError(f"the new placement has {new.num_layers} layers, but there are costs of {len(layers)}")
    workers: dict[int, Holding] = holdings_of(current, dict.fromkeys(live))
    missing: dict[int, list[int]] = {}
    for worker, ranges in new.ranges.items():
        held = {layer for own in workers[worker].ranges for layer in own}
        missing[worker] = [layer for own in ranges for layer in own if layer not in held]
    return Transfer(placement=new, roles=roles, rounds=message_rounds(choose_sources(workers, missing, layers)))


def pull_s(messages: Sequence[Message], cluster: Cluster) -> float:
    """Return the seconds until all layers have arrived, if nothing interrupts them.

    A destination pulls its layers one by one: for each, a request and an answer cross the link. Destinations pull at
    the same time, and a source that serves several shares its bandwidth among them. So the time is that of the busiest
    end, with b bytes at bandwidth beta and latency alpha for each layer:

        max(max over destinations of sum(2 alpha + b / beta), max over sources of sum(b / beta))

    Messages of training, which layers give way to, are left out, and so are layers that wait for the next step.
    """
    return _busiest_s(messages, cluster, num_bytes=lambda message: message.num_bytes, latencies=2)


def sums_s(messages: Sequence[Message], workload: Workload, cluster: Cluster) -> float:
    """Return the seconds by which a step takes longer, because sources send the sums of gradients to destinations.

    They do so once all reductions are complete. If the optimizer's state has owners, sources also send the parameters
    that these have updated. The time is that of the busiest end, as in `pull_s`, without requests.
    """

    def told_bytes(message: Message) -> int:
        layers = [workload.layers[layer] for layer in message.layers]
        return sum(each.gradient_bytes + (0 if workload.owners is None else each.param_bytes) for each in layers)

    return _busiest_s(messages, cluster, num_bytes=told_bytes, latencies=1)


def _busiest_s(
    messages: Sequence[Message], cluster: Cluster, *, num_bytes: Callable[[Message], int], latencies: int
) -> float:
    received_s: dict[int, float] = defaultdict(float)
    sent_s: dict[int, float] = defaultdict(float)
    for message in messages:
        link = cluster.link(message.source, message.destination)
        carry_s = num_bytes(message) / link.bytes_per_s
        sent_s[message.source] += carry_s
        received_s[message.destination] += carry_s + latencies * link.latency_s * len(message.layers)
    return max((*received_s.values(), *sent_s.values()), default=0.0)
