"""The rendezvous store, in which the ranks of a generation publish where they listen and look up the others.

The coordinator serves it over the control connections, so it is open only to processes that have the join token. It
ends with the coordinator, without which no generation begins.
"""

from __future__ import annotations

from collections.abc import Iterator

from chameleon_ft.control.wire.messages import LookUp, Publish, Published
from chameleon_ft.control.wire.parts import folder_of

_Answer = tuple[int, Published]
"""(connection, message)"""


class RendezvousStore:
    """Keys and values of generations, and the connections that wait for a key."""

    def __init__(self) -> None:
        self._values: dict[int, dict[str, dict[str, str]]] = {}  # by generation, folder and key
        self._waiting: dict[int, dict[str, list[int]]] = {}  # by generation and key: the connections
        self._members: dict[int, dict[str, dict[str, int]]] = {}  # by generation, folder and key: the connection

    def publish(self, connection: int, message: Publish) -> Iterator[_Answer]:
        """Store a value; yield the answers to connections that wait for it, and to its group if it is the last."""
        generation, key, folder = message.generation, message.key, folder_of(message.key)
        self._values.setdefault(generation, {}).setdefault(folder, {})[key] = message.value
        receivers: list[int] = []
        if message.members is not None:
            members = self._members.setdefault(generation, {}).setdefault(folder, {})
            members[key] = connection
            if len(members) == message.members:
                receivers += members.values()
        receivers += self._waiting.get(generation, {}).pop(key, ())
        if receivers:
            published = self._published(generation, folder)
            yield from ((receiver, published) for receiver in receivers)

    def look_up(self, connection: int, message: LookUp) -> Iterator[_Answer]:
        """Yield the answer, or none yet if there is no such key."""
        generation, key, folder = message.generation, message.key, folder_of(message.key)
        if key in self._values.get(generation, {}).get(folder, {}):
            yield connection, self._published(generation, folder)
        else:
            self._waiting.setdefault(generation, {}).setdefault(key, []).append(connection)

    def forget_before(self, generation: int) -> None:
        """Drop earlier generations."""
        for by_generation in (self._values, self._waiting, self._members):
            for earlier in [number for number in by_generation if number < generation]:
                del by_generation[earlier]

    def _published(self, generation: int, folder: str) -> Published:
        """Return all values known in a folder: a rank that needs one member of a group needs them all."""
        return Published(generation=generation, values=tuple(self._values[generation][folder].items()))
