"""Rounds: messages in an order in which nobody sends to two, or receives from two, at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from chameleon_ft.transfer.message import Message

__all__ = ["fewest_rounds", "message_rounds"]


def fewest_rounds(messages: Sequence[Message]) -> int:
    """The most messages that any worker has to send, or to receive."""
    sent = Counter(message.source for message in messages)
    received = Counter(message.destination for message in messages)
    return max((*sent.values(), *received.values()), default=0)


def message_rounds(messages: Sequence[Message]) -> tuple[tuple[Message, ...], ...]:
    """`messages` in the fewest rounds; in each, a worker sends to one other at most and receives from one at most.

    Senders on one side and receivers on the other make a bipartite multigraph, whose edges can be coloured with as many
    colours as messages meet at a worker (Koenig 1916). Rounds with the largest messages come first.
    """
    # Imported late: it costs time, and rerouting needs none of it.
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
