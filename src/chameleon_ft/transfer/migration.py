"""How long layers take that move during training, and how much longer its steps take meanwhile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from chameleon_ft.cluster import Cluster
from chameleon_ft.transfer.sources import Message
from chameleon_ft.workload import Workload


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
