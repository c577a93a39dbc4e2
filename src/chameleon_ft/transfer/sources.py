"""Sources: from which live holder each worker gets each layer that it lacks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chameleon_ft.errors import NoHolderError
from chameleon_ft.estimate import state_bytes
from chameleon_ft.plan import LayerRange
from chameleon_ft.transfer._loads import Loads
from chameleon_ft.transfer.holdings import Holding, groups_of
from chameleon_ft.transfer.message import Message
from chameleon_ft.workload import LayerCost

__all__ = ["Sources", "choose_sources"]


@dataclass(frozen=True, slots=True)
class Sources:
    """Who sends what to whom.

    Attributes:
        messages: by destination and layer. Neighbouring layers with the same source are one message.
        least_largest_send_bytes: whatever the sources, some worker sends as many bytes as this.
    """

    messages: tuple[Message, ...]
    least_largest_send_bytes: int


def choose_sources(
    holders: Mapping[int, Holding], missing: Mapping[int, Sequence[int]], layers: Sequence[LayerCost]
) -> Sources:
    """Sources with a small largest send, counted in bytes.

    Each layer is first sent by the holder with the least to send so far; then layers are passed on along chains of
    holders for as long as the largest send becomes less. Where all missing layers have equal bytes, the largest send is
    the least there is: without such a chain, the holders that a chain would lead to cannot do with less (Hall 1935).
    Where they have not, the least largest send is NP-hard to find; the bound says how far off it is at the most.

    Args:
        holders: what each live worker holds.
        missing: for each receiver, the layers that it lacks, ascending.
        layers: costs of all layers.

    Raises:
        NoHolderError: no live worker holds some of the missing layers.
    """
    receivers: dict[int, list[int]] = defaultdict(list)
    for receiver, lacking in sorted(missing.items()):
        for layer in lacking:
            receivers[layer].append(receiver)
    groups = groups_of({worker: Holding(each.ranges) for worker, each in sorted(holders.items())})
    held_by: dict[int, list[int]] = {layer: [] for layer in sorted(receivers)}
    for number, (each, _) in enumerate(groups):
        for held in each.ranges:
            for layer in held:
                if layer in held_by:
                    held_by[layer].append(number)
    if unheld := [layer for layer, of in held_by.items() if not of]:
        raise NoHolderError(unheld)
    num_bytes = {layer: state_bytes(layers[layer]) for layer in held_by}
    loads = Loads([workers for _, workers in groups], held_by, num_bytes)
    for layer in sorted(held_by, key=lambda layer: (-num_bytes[layer], loads.num_holders(layer), layer)):
        loads.spread(layer, len(receivers[layer]))
    bound = loads.even_out()
    return Sources(_messages(loads.senders(), missing, num_bytes), bound)


def _messages(
    senders: Mapping[int, Mapping[int, int]], missing: Mapping[int, Sequence[int]], num_bytes: Mapping[int, int]
) -> tuple[Message, ...]:
    """Shares out the copies of each layer: `senders[layer]` says how many each of its senders has to send.

    A receiver gets a layer from where it got the one before, if that sender has a copy left.
    """
    left = {layer: dict(copies) for layer, copies in senders.items()}
    in_turn = {layer: list(reversed(copies)) for layer, copies in senders.items()}
    messages: list[Message] = []
    for receiver, lacking in sorted(missing.items()):
        source, start, stop = -1, -1, -1
        for layer in lacking:
            copies, turn = left[layer], in_turn[layer]
            if layer != stop or not copies.get(source):
                messages += _message(source, receiver, start, stop, num_bytes)
                while not copies[turn[-1]]:
                    turn.pop()
                source, start = turn[-1], layer
            copies[source] -= 1
            stop = layer + 1
        messages += _message(source, receiver, start, stop, num_bytes)
    return tuple(messages)


def _message(source: int, receiver: int, start: int, stop: int, num_bytes: Mapping[int, int]) -> list[Message]:
    """The message of these layers, if there are any."""
    if start == stop:
        return []
    return [Message(source, receiver, LayerRange(start, stop), sum(num_bytes[n] for n in range(start, stop)))]
