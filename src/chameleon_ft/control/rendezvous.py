"""The rendezvous store, in which the ranks of a generation publish where they listen and look up the others.

The coordinator serves it over the control connections, so it is open only to processes that have the join token. It
ends with the coordinator, without which no generation begins.
"""

from __future__ import annotations

from collections.abc import Iterator

from chameleon_ft.control.wire.messages import LookUp, Publish, Published
from chameleon_ft.control.wire.parts import folder_of

__all__ = ["RendezvousStore"]

_Answer = tuple[int, Published]
"""(connection, message)"""


class RendezvousStore:
    """Keys and values of generations, and the connections that wait for a key."""

    def __init__(self) -> None:
        self._values: dict[int, dict[str, str]] = {}  # by generation and key
        self._waiting: dict[int, list[tuple[int, str]]] = {}  # by generation: (connection, key)
        self._members: dict[int, dict[str, dict[str, int]]] = {}  # by generation, folder and key: the connection

    def publish(self, connection: int, message: Publish) -> Iterator[_Answer]:
        """Store a value; yield the answers to connections that wait for it, and to its group if it is the last."""
        generation, folder = message.generation, folder_of(message.key)
        self._values.setdefault(generation, {})[message.key] = message.value
        if message.members is not None:
            members = self._members.setdefault(generation, {}).setdefault(folder, {})
            members[message.key] = connection
            if len(members) == message.members:
                published = self._published(generation, message.key)
                yield from ((member, published) for member in members.values())
        waiting = self._waiting.pop(generation, [])
        if left := [each for each in waiting if each[1] != message.key]:
            self._waiting[generation] = left
        for connection, key in waiting:
            if key == message.key:
                yield connection, self._published(generation, key)

    def look_up(self, connection: int, message: LookUp) -> Iterator[_Answer]:
        """Yield the answer, or none yet if there is no such key."""
        if message.key in self._values.get(message.generation, {}):
            yield connection, self._published(message.generation, message.key)
        else:
            self._waiting.setdefault(message.generation, []).append((connection, message.key))

    def forget_before(self, generation: int) -> None:
        """Drop earlier generations."""
        for by_generation in (self._values, self._waiting, self._members):
            for earlier in [number for number in by_generation if number < generation]:
                del by_generation[earlier]

    def _published(self, generation: int, key: str) -> Published:
        """Return all values known in the folder of `key`: a rank that needs one member of a group needs them all."""
        folder, values = folder_of(key), self._values[generation]
        known = tuple(each for each in values.items() if folder_of(each[0]) == folder)
        return Published(generation=generation, values=known)
