"""The connected peers of a coordinator: what they are sent, and how many of their messages were handled.

The rendezvous store, in which the ranks of a generation publish where they listen and look up the others.

The coordinator serves it over the control connections, so it is open only to processes that have the join token. It
ends with the coordinator, without which no generation begins.

The files of a run that commands of other machines may read through its coordinator.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from chameleon_ft.protocol import messages
from chameleon_ft.protocol.codec import encode
from chameleon_ft.protocol.messages import LookUp, Message, Publish, Published, ReadRunFile, Refused, RunFilePart
from chameleon_ft.protocol.parts import folder_of
from chameleon_ft.protocol.server import Peer
from chameleon_ft.storage.files import RunDirectory


class Peers:
    """Peers by the number of their connection; whatever is sent to one that has left is dropped.

    Attributes:
        received: connection -> messages of its peer that were handled, also of peers that have left.
        written: connection -> messages of its peer that are in the journal, so that the peer need not keep them.
    """

    def __init__(self) -> None:
        self.received: dict[int, int] = {}
        self.written: dict[int, int] = {}
        self._connected: dict[int, Peer] = {}
        # The last message of each type and its text: often all peers are sent the same one.
        self._last_sent: dict[type[Message], tuple[Message, str | bytes]] = {}

    def __contains__(self, connection: int) -> bool:
        return connection in self._connected

    def add(self, peer: Peer) -> None:
        """Take in a peer, which may be known."""
        self._connected[peer.number] = peer

    def remove(self, peer: Peer) -> bool:
        """Forget a peer that has left; return whether it was known."""
        return self._connected.pop(peer.number, None) is not None

    def continue_from(self, received: Mapping[int, int]) -> None:
        """Take in the counts of another coordinator's journal."""
        self.received, self.written = dict(received), dict(received)

    def count(self, connection: int, message: Message, *, replaces: int | None = None) -> int:
        """Count a message; return how many of its peer were handled, those on the connection that it replaces included.

        The message with which a peer introduces itself does not count.

        Args:
            replaces: the connection that this one replaces, if the peer introduces itself and is known.
        """
        if isinstance(message, messages.Hello | messages.HostHello):
            self.written[connection] = self.written.get(replaces or 0, 0)
            self.received[connection] = self.received.get(replaces or 0, 0)
        else:
            self.received[connection] = self.received.get(connection, 0) + 1
        return self.received[connection]

    def mark_written(self, connection: int) -> None:
        """Note that all messages of a peer so far are in the journal."""
        self.written[connection] = self.received.get(connection, 0)

    def send(self, connection: int, message: Message) -> None:
        """Send a message to a peer."""
        if (peer := self._connected.get(connection)) is not None:
            last = self._last_sent.get(type(message))
            if last is None or last[0] is not message:
                last = self._last_sent[type(message)] = message, encode(message)
            peer.send(*last)

    def send_all(self, answers: Iterable[tuple[int, Message]]) -> None:
        """Send each message to its peer."""
        for connection, message in answers:
            self.send(connection, message)

    def send_alike(self, orders: Mapping[int, Message]) -> None:
        """Send messages by connection; what they share is encoded once."""
        shared: dict[int, tuple[object, Any]] = {}
        for connection, order in orders.items():
            if (peer := self._connected.get(connection)) is not None:
                peer.send(order, encode(order, shared))

    def drop(self, connection: int) -> None:
        """Close the connection of a peer."""
        if (peer := self._connected.get(connection)) is not None:
            peer.drop()

    def drop_all(self, *, local: bool = True) -> None:
        """Close the connections of all peers, or of all but the local ones."""
        for peer in self._connected.values():
            if local or not peer.is_local:
                peer.drop()

    def are_elsewhere(self, hosts: Mapping[int, str]) -> bool:
        """Return whether all of these peers, or those of at least two hosts, are on other hosts than this process.

        Several hosts are rarely lost at the same moment. If all are, the run ends, so that waiting costs nothing. One
        silent host beside workers that are heard is lost.

        Args:
            hosts: connection -> host of its peer.
        """
        remote = {each: host for each, host in hosts.items() if each in self and not self._connected[each].is_local}
        return len({*remote.values()}) > 1 or len(remote) == len(hosts)


_Answer = tuple[int, Published]
"""(connection, message)"""


class RendezvousStore:
    """Keys and values of generations, and the connections that wait for a key."""

    def __init__(self) -> None:
        # By generation, folder and key.
        self._values: dict[int, dict[str, dict[str, bytes]]] = {}
        # The connections, by generation and key.
        self._waiting: dict[int, dict[str, list[int]]] = {}
        # The connection, by generation, folder and key.
        self._members: dict[int, dict[str, dict[str, int]]] = {}

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


# A message has no more bytes, but for the rest of its last line.
_PART_BYTES: Final = 1 << 20


def read_part(run: RunDirectory, request: ReadRunFile) -> RunFilePart | Refused:
    """Return the requested part of a file of the run."""
    path = run.path / request.name
    if path not in (run.config_file, run.metrics_file, run.events_file) and path.parent != run.plans:
        return Refused(reason=f"{request.name}: is not a file of the run that can be read remotely")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, request.offset))
            content = file.read(_PART_BYTES)
            if len(content) == _PART_BYTES:
                content += file.readline()
            return RunFilePart(content=content.decode(), size=size)
    except FileNotFoundError:
        return RunFilePart(content="", size=0)
    except (OSError, ValueError) as error:
        return Refused(reason=f"{request.name}: cannot be read: {error}")
