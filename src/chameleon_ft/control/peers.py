"""The connected peers of a coordinator: what they are sent, and how many of their messages were handled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from chameleon_ft.control.wire import messages
from chameleon_ft.control.wire.codec import encode, encode_alike
from chameleon_ft.control.wire.server import Peer


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
        self._last_sent: dict[type[messages.Message], tuple[messages.Message, str]] = {}

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

    def count(self, connection: int, message: messages.Message, *, replaces: int | None = None) -> int:
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

    def send(self, connection: int, message: messages.Message) -> None:
        """Send a message to a peer."""
        if (peer := self._connected.get(connection)) is not None:
            last = self._last_sent.get(type(message))
            if last is None or last[0] is not message:
                last = self._last_sent[type(message)] = message, encode(message)
            peer.send(*last)

    def send_all(self, answers: Iterable[tuple[int, messages.Message]]) -> None:
        """Send each message to its peer."""
        for connection, message in answers:
            self.send(connection, message)

    def send_alike(self, orders: Mapping[int, messages.Message]) -> None:
        """Send messages of one type, by connection; what they share is encoded once."""
        for (connection, order), text in zip(orders.items(), encode_alike([*orders.values()]), strict=True):
            if (peer := self._connected.get(connection)) is not None:
                peer.send(order, text)

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
